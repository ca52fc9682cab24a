"""The usage of calls whose client dies is handed to another client, once, and bounded."""

import msgspec

from engine.messages import ChoiceDelta, EngineRequest, RequestOutput, RequestTiming
from engine.transport.usage_ledger import UsageLedger
from tests.support.scripted_engine import digest_of, request

TIMING = RequestTiming(queue={"turn": 0.5}, prefill=0.1, decode=0.2)


def of_call(call: str, request_id: int = 1, tokens: int = 3) -> EngineRequest:
    asked = request(request_id, [5] * tokens, adapter=digest_of(1))
    return msgspec.structs.replace(asked, call=call, label="legal@2")


def tokens(
    request_id: int, number: int, *, cached: int = 0, seconds: float = 0.0, end: bool = False
) -> RequestOutput:
    delta = ChoiceDelta(0, [7] * number, finish_reason="length" if end else None)
    return RequestOutput(
        request_id, [delta], num_cached_tokens=cached, engine_seconds=seconds, finished=end,
        timing=TIMING if end else None,
    )  # fmt: skip


def test_the_engine_seconds_of_a_calls_requests_are_summed() -> None:
    ledger = UsageLedger()
    for request_id in (1, 2):
        ledger.begin("dead", of_call("c", request_id))
        for seconds in (0.25, 0.5, 0.75):
            ledger.note("dead", tokens(request_id, 1, seconds=seconds))
    ledger.note("dead", RequestOutput(2, finished=True, error_code="engine_stopped", error="x"))
    ledger.client_gone("dead")
    [usage] = ledger.hand_over("alive")
    assert usage.engine_seconds == 1.5


def test_what_a_dead_client_had_running_is_handed_to_the_next() -> None:
    ledger = UsageLedger()
    ledger.begin("dead", of_call("c"))
    for _ in range(3):
        ledger.note("dead", tokens(1, 2, cached=2))
    assert not ledger.has_orphans
    ledger.client_gone("dead")
    assert ledger.has_orphans
    [usage] = ledger.hand_over("alive")
    assert (usage.call, usage.tenant, usage.label, usage.is_base) == ("c", "acme", "legal@2", False)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (3, 2, 6)
    assert usage.finish_reasons == ["abort"]
    assert not ledger.has_orphans and ledger.hand_over("third") == []


def test_a_call_that_ended_is_kept_until_it_is_settled() -> None:
    ledger = UsageLedger()
    for call, request_id in (("written", 1), ("unwritten", 2)):
        ledger.begin("dead", of_call(call, request_id))
        ledger.note("dead", tokens(request_id, 4, end=True))
    ledger.settle("dead", ["written", "never heard of"])
    ledger.client_gone("dead")
    [usage] = ledger.hand_over("alive")
    assert (usage.call, usage.finish_reasons, usage.timing) == ("unwritten", ["length"], TIMING)


def test_an_heir_that_dies_before_it_has_settled_has_an_heir_itself() -> None:
    ledger = UsageLedger()
    ledger.begin("first", of_call("a"))
    ledger.begin("first", of_call("b", 2))
    ledger.client_gone("first")
    assert len(ledger.hand_over("second")) == 2
    ledger.settle("second", ["a"])
    ledger.client_gone("second")
    assert [usage.call for usage in ledger.hand_over("third")] == ["b"]
    ledger.settle("third", ["b"])
    assert ledger.num_unsettled("third") == 0


def test_a_call_of_several_requests_is_one() -> None:
    ledger = UsageLedger()
    for request_id in (1, 2):
        ledger.begin("dead", of_call("c", request_id))
        ledger.note("dead", tokens(request_id, 1, cached=1))
    ledger.note("dead", tokens(1, 2, cached=1, end=True))
    ledger.abort("dead", 2)
    ledger.note("dead", tokens(2, 50))  # too late
    ledger.client_gone("dead")
    [usage] = ledger.hand_over("alive")
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (6, 2, 4)
    assert usage.finish_reasons == ["abort", "length"]


def test_the_ledger_is_bounded_and_counts_what_it_forgets() -> None:
    ledger = UsageLedger(max_calls=10)
    for client in ("a", "b"):
        for number in range(15):
            ledger.begin(client, of_call(f"{client}{number}", number))
            ledger.note(client, tokens(number, 1, end=True))
        assert ledger.num_unsettled(client) == 10
        ledger.client_gone(client)
    assert [usage.call for usage in ledger.hand_over("c", limit=4)] == [
        f"b{n}" for n in range(5, 9)
    ]
    assert len(ledger.hand_over("c")) == 6
    assert (ledger.take_forgotten(), ledger.take_forgotten()) == (20, 0)


def test_a_request_without_a_call_costs_nothing() -> None:
    ledger = UsageLedger()
    ledger.begin("dead", of_call(""))
    ledger.note("dead", tokens(1, 5))
    ledger.client_gone("dead")
    assert not ledger.has_orphans
