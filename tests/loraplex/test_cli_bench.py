"""`loraplex bench`, as one types it."""

import json
import signal
import threading

import pytest
from click.testing import CliRunner

from loraplex.cli import main
from tests.support.sse_server import sse_server, tokens

SMALL = ["--prompts", "fixed:4", "--outputs", "fixed:3", "--requests", "6", "--warm-up", "0"]


def _bench(*arguments):
    result = CliRunner().invoke(main, ["bench", *map(str, arguments)])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_sweep_writes_rows_calls_and_a_report_that_loads_nothing(tmp_path):
    rows, calls, page = (tmp_path / name for name in ("rows.json", "calls.jsonl", "page.html"))
    told = {"queue": {"load": 2.0, "slot": 1.0}, "load_ms": 2.0}
    with sse_server(lambda body: tokens(body, loraplex=told)) as server:
        result = _bench("--url", server.url, "--rate", 200, "--rate", 400, "--concurrency", 2,
                        "--adapter", "<polite>", "--adapter", "rude", "--popularity", "uniform",
                        *SMALL, "--json", rows, "--jsonl", calls, "--html", page)  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(rows.read_text())
    assert [(r["loop"], r["rate"], r["concurrency"]) for r in document["rows"]] == [
        ("open", 200, None), ("open", 400, None), ("closed", None, 2),
    ]  # fmt: skip
    assert all(r["num_requests"] == 6 and r["goodput"] == 1 for r in document["rows"])
    assert document["saturation"] == max(r["output_tokens_per_second"] for r in document["rows"])
    assert document["rows"][0]["models"][0]["queue_ms"] == told["queue"]
    lines = [json.loads(line) for line in calls.read_text().splitlines()]
    assert len(lines) == 18 and {line["output_tokens"] for line in lines} == {3}
    text = page.read_text()
    assert text.count("<svg") == 5 and "&lt;polite&gt;" in text and "<polite>" not in text
    assert "fixed:4" in text and "poisson" in text
    assert "<script" not in text and "src=" not in text and "@import" not in text
    assert {body["model"] for _, _, body in server.requests} == {"<polite>", "rude"}


def test_a_trace_is_replayed_at_its_own_times_or_at_a_rate(tmp_path):
    trace, calls = tmp_path / "trace.jsonl", tmp_path / "calls.jsonl"
    trace.write_text(
        '{"at": 0.0, "prompt_tokens": 5, "output_tokens": 6, "adapter": "x"}\n'
        '{"at": 0.1, "prompt_tokens": 5, "output_tokens": 2}\n'
    )
    with sse_server() as server:
        result = _bench("--url", server.url, "--trace", trace, "--jsonl", calls, "--rate", 200)
        again = _bench("--url", server.url, "--trace", trace)
    assert (result.exit_code, again.exit_code) == (0, 0) and "trace" in again.output
    lines = [json.loads(line) for line in calls.read_text().splitlines()]
    dues = {line["model"]: line["due"] for line in lines}
    assert dues == pytest.approx({"x": 0.0, "the-base": 0.01})
    # Which of two calls 10 ms apart arrives first is the network's.
    for run in (server.requests[:2], server.requests[2:]):
        assert sorted(body["model"] for _, _, body in run) == ["the-base", "x"]


def test_errors_are_named_and_a_test_of_which_nothing_was_served_fails():
    with sse_server(lambda body: 429) as server:
        result = _bench("--url", server.url, "--concurrency", 1, *SMALL)
    assert result.exit_code == 1 and "429 queue_full" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "nowhere"], "no answer from nowhere/v1/"),
        (["--tenant-key", "acme"], "must be TENANT=KEY"),
        (["--rate", "0"], "x>0"),
        (["--jsonl", "/nowhere/calls.jsonl"], "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(arguments, message):
    result = _bench(*arguments)
    assert result.exit_code != 0 and message in result.output


def test_a_model_that_is_not_served_is_named_before_anything_is_sent():
    with sse_server(unknown={"nope"}) as server:
        result = _bench("--url", server.url, "--adapter", "rude", "--adapter", "nope",
                        "--popularity", "uniform", *SMALL)  # fmt: skip
        assert result.exit_code == 1 and server.requests == []
        assert result.stderr == (
            f"Error: {server.url}/v1/ serves no model 'nope' to this key: Not here. "
            "It lists the-base\n"
        )
        result = _bench("--url", server.url, "--model", "nope", *SMALL)
    assert result.exit_code == 1 and server.requests == [] and "'nope'" in result.stderr


def test_a_key_that_may_not_list_models_still_calls_those_that_it_names():
    with sse_server(refused=403) as server:
        nameless = _bench("--url", server.url, *SMALL)
        named = _bench("--url", server.url, "--model", "the-base", *SMALL)
    assert nameless.exit_code == 1 and "the scope inference" in nameless.stderr
    assert named.exit_code == 0 and len(server.requests) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api-key", "old"], "unknown, revoked or past its time"),
        (["--model", "x", "--tenant-key", "t0=old"], "unknown, revoked or past its time"),
        ([], "needs a key"),
        (["--model", "x"], "needs a key"),
    ],
)
def test_a_refused_key_is_told_with_the_variable_and_where_keys_come_from(
    monkeypatch, arguments, words
):
    monkeypatch.delenv("LORAPLEX_API_KEY", raising=False)
    with sse_server(refused=401) as server:
        result = _bench("--url", server.url, *arguments, *SMALL)
    assert result.exit_code == 1 and server.requests == []
    assert words in result.stderr and "old" not in result.stderr
    assert "LORAPLEX_API_KEY" in result.stderr and "loraplex keys create" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--model", "x"]])
def test_where_nothing_listens_the_address_is_named_and_how_to_start_a_service(arguments):
    result = _bench("--url", "http://127.0.0.1:9", *arguments)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    for words in ("http://127.0.0.1:9/v1/", "loraplex serve --model", "LORAPLEX_URL"):
        assert words in result.stderr


def test_what_is_sent_and_not_counted_is_told_and_figures_have_units():
    with sse_server() as server:
        result = _bench("--url", server.url, *SMALL, "--requests", 20, "--warm-up", 0.1)
        whole = _bench("--url", server.url, *SMALL, "--requests", 20)
    heading, row = result.stdout.splitlines()[:2]
    assert row.split()[:5] == ["8", "at", "a", "time", "18"]
    assert heading.count(", ms") == 6
    assert "20 requests; the first 2 are its warm-up and not counted" in result.stdout
    assert "warm-up" not in whole.stdout
    assert "TTFT of 500 ms and TPOT of" in result.stdout
    assert (
        f"8 at a time: sending 20 requests to {server.url}/v1/: prompts of 4 tokens and replies "
        "of 3 on average, 140 tokens in all ...\n"
    ) in result.stderr


def test_queue_time_is_told_by_cause_of_a_single_model_too_and_not_where_nobody_waited():
    replies = {"waited": {"load": 2.0, "slot": 1.0, "kv": 0.0}, "did not": {"turn": 0.0}}
    said = {}
    for name, queue in replies.items():
        with sse_server(
            lambda body, queue=queue: tokens(body, loraplex={"queue": queue})
        ) as server:
            said[name] = _bench("--url", server.url, *SMALL).stdout
    assert "By model, at 8 at a time" in said["waited"] and "load 2.0, slot 1.0\n" in said["waited"]
    assert "By model" not in said["did not"]


def _interrupt(server, number):
    """Answer all but request `number`, at which the user presses Ctrl-C."""

    def reply(body):
        if len(server[0].requests) == number:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return iter(())
        return tokens(body)

    return reply


@pytest.mark.parametrize(
    ("number", "words"), [(3, "this run.\n"), (9, "this run; before it: 1 at a time.\n")]
)
def test_an_interrupted_run_says_how_far_it_came_and_is_no_figure(number, words, tmp_path):
    rows, found = tmp_path / "rows.json", []
    with sse_server(_interrupt(found, number)) as server:
        found.append(server)
        result = _bench("--url", server.url, "--concurrency", 1, "--concurrency", 1, *SMALL,
                        "--json", rows)  # fmt: skip
    assert result.exit_code == 130
    assert (
        f"Interrupted: 2 of 6 requests had ended. Nothing is reported of {words}" in result.stderr
    )
    assert ("tokens/s" in result.stdout, rows.exists()) == (number == 9, number == 9)
    if rows.exists():
        assert len(json.loads(rows.read_text())["rows"]) == 1
