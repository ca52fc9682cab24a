"""Load tests: what is sent, when, and what is made of the replies."""

import threading

import pytest

from engine.simulation.figures import Slo
from engine.simulation.workload import simulated_request
from loraplex.load.calls import CallFormat
from loraplex.load.client import open_client
from loraplex.load.figures import after_warm_up, by_model, load_figures
from loraplex.load.loops import Sender, closed_loop, open_loop
from loraplex.load.outcome import Outcome
from loraplex.load.run import Loop, run_load
from tests.support.sse_server import event, sse_server, tokens

pytestmark = pytest.mark.anyio
SLO = Slo(0.5, 0.08)


def calls_of(*at, api="completions", adapter=None, prompt=7, output=3):
    arrivals = [
        (time, simulated_request(number, prompt, output, tenant="acme", adapter=adapter))
        for number, time in enumerate(at)
    ]
    return list(CallFormat(api=api, model="base", adapters=["polite"]).calls(arrivals, seed=0))


async def run(reply, *at, loop=None, **options):
    with sse_server(reply) as server:
        run = await run_load(
            server.url + "/v1/", loop or Loop("open", 1.0), calls_of(*at, **options),
            key="k", tenant_keys={}, silence=10, slo=SLO,
        )  # fmt: skip
    return server, run


async def test_prompts_have_their_length_and_no_two_share_a_prefix():
    calls = calls_of(0, 0, 0, 0, adapter="a0")
    assert {call.model for call in calls} == {"polite"}
    assert {len(call.body["prompt"]) for call in calls} == {7}
    assert len({call.body["prompt"][0] for call in calls}) == 4
    [chat] = calls_of(0, api="chat", adapter="elsewhere")
    assert (chat.path, chat.model) == ("chat/completions", "elsewhere")
    assert len(chat.body["messages"][0]["content"].split()) == 7
    assert chat.body["min_tokens"] == chat.body["max_tokens"] == 3 and chat.body["ignore_eos"]
    plain = CallFormat(model="m", is_exact=False).calls([(0.0, simulated_request(0, 2, 3))], 0)
    assert not {"min_tokens", "ignore_eos"} & next(plain).body.keys()


async def test_an_open_loop_sends_whatever_became_of_the_others_and_counts_from_when_it_was_due():
    all_sent = threading.Barrier(3, timeout=60)  # a closed loop of one would wait for ever

    def reply(body):
        all_sent.wait()
        return tokens(body)

    _, run_ = await run(reply, 0.0, 0.01, 0.02)
    assert [outcome.due for outcome in run_.outcomes] == [0.0, 0.01, 0.02]
    assert all(outcome.sent >= outcome.due for outcome in run_.outcomes)
    first = run_.outcomes[0]
    assert first.ttft == first.token_times[0] and first.is_served
    assert (run_.rate, run_.concurrency) == (1.0, None)


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_closed_loop_keeps_so_many_calls_under_way(api):
    pairs = threading.Barrier(2, timeout=60)
    num_open, most = 0, []

    def reply(body):
        nonlocal num_open
        num_open += 1
        most.append(num_open)
        pairs.wait()
        num_open -= 1
        return tokens(body)

    server, run_ = await run(reply, *[0.0] * 6, loop=Loop("closed", 2), api=api)
    assert len(run_.outcomes) == 6 and max(most) == 2
    assert all(o.is_served and o.output_tokens == 3 for o in run_.outcomes)
    assert {path for path, _, _ in server.requests} == {
        "/v1/completions" if api == "completions" else "/v1/chat/completions"
    }
    assert {key for _, key, _ in server.requests} == {"Bearer k"}


async def test_events_may_be_cut_anywhere_and_a_reply_tells_its_queue_time():
    def reply(body):
        whole = b"".join(tokens(body, loraplex={"queue": {"slot": 3.0, "kv": 1.5}, "load_ms": 2}))
        return [whole[start : start + 7] for start in range(0, len(whole), 7)]

    _, run_ = await run(reply, 0.0, output=4)
    [outcome] = run_.outcomes
    assert (outcome.output_tokens, outcome.prompt_tokens, len(outcome.token_times)) == (4, 5, 4)
    assert (outcome.queue_ms, outcome.load_ms, outcome.finish_reason) == (4.5, 2.0, "length")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (lambda body: 429, "429 queue_full"),
        (lambda body: [event(error={"code": "engine_restarted"})], "engine_restarted"),
        (lambda body: [event(choices=[{"text": "x"}])], "the stream broke off"),
        (lambda body: [b"data: no json\n\n"], "not an event"),
    ],
)
async def test_a_call_that_fails_is_counted_and_stops_nothing(reply, error):
    _, run_ = await run(lambda body: tokens(body) if body["max_tokens"] == 3 else reply(body), 0.0)
    assert run_.outcomes[0].error is None
    _, run_ = await run(reply, 0.0, 0.0)
    assert all(error in outcome.error for outcome in run_.outcomes)
    assert (run_.figures.num_failed, run_.figures.goodput) == (2, 0.0)


async def test_a_service_that_is_not_there_fails_every_call():
    async with open_client("http://127.0.0.1:9/v1/", {}, silence=5) as http:
        for outcomes in (
            await open_loop(Sender(http, None, {}), calls_of(0.0, 0.0)),
            await closed_loop(Sender(http, None, {}), calls_of(0.0, 0.0), 1),
        ):
            assert [outcome.error for outcome in outcomes] == ["ConnectError"] * 2


async def test_a_tenant_may_have_a_key_of_its_own():
    with sse_server() as server:
        await run_load(
            server.url + "/v1/", Loop("open", 1), calls_of(0.0), key="k",
            tenant_keys={"acme": "theirs"}, slo=SLO,
        )  # fmt: skip
    assert server.requests[0][1] == "Bearer theirs"


def outcome(due, *times, model="m", **fields):
    return Outcome(
        model=model, tenant="t", due=due, sent=due, ended=times[-1] if times else due,
        token_times=list(times), output_tokens=len(times), **fields,
    )  # fmt: skip


async def test_figures_count_what_failed_and_what_meets_the_slo():
    fast = outcome(0.0, 0.4, 0.45, 0.5, queue={"slot": 100.0})
    slow = outcome(1.0, 1.6, 1.7, queue={"slot": 300.0, "kv": 2.0})
    refused = outcome(1.0, error="429", model="n")
    figures = load_figures([fast, slow, refused], SLO)
    assert (figures.num_requests, figures.num_failed) == (3, 1)
    assert figures.seconds == pytest.approx(1.7)
    assert figures.output_tokens_per_second == pytest.approx(5 / 1.7)
    assert figures.ttft_p50_ms == pytest.approx(500)
    assert figures.goodput == pytest.approx(1 / 3)
    assert figures.queue_p50_ms == pytest.approx(201)
    m, n = by_model([fast, slow, refused])
    assert m.queue_ms == {"slot": 200.0, "kv": 1.0} and (n.model, n.num_failed) == ("n", 1)
    assert after_warm_up([slow, fast], 0.5) == [slow]
    assert load_figures([], SLO).output_tokens_per_second == 0.0
