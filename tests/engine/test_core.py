"""The core's part: adapters fetched, installed, failed and dropped around the steps."""

import pytest
import structlog

from tests.support.memory_engine import FakeSource, MemoryEngine, request


def test_a_hundred_first_requests_to_a_cold_adapter_are_one_load_and_others_go_on():
    engine = MemoryEngine(source=FakeSource(auto=False), max_num_seqs=8, num_kv_blocks=200)
    for number in range(100):
        engine.add(request(number, [1, 2], adapter="cold", tenant="x"))
    engine.add(request(500, [3], tenant="y"))
    assert list(engine.source.pending) == ["cold"], "fetched from the moment it is queued"
    engine.run()
    assert engine.is_over(("c", 500)), "the base's stream does not wait for the load"
    assert not engine.core.has_work, "all that is left waits for a load: sleep"
    assert engine.core.stats().slots_used == 0, "no slot idles while weights are fetched"
    engine.source.deliver("cold")
    engine.step()
    engine.run()
    assert engine.source.num_loads == 1
    for number in range(100):
        engine.assert_as_alone(number)
    engine.assert_at_rest()


def test_while_twenty_adapters_load_a_base_stream_has_a_token_in_every_step():
    engine = MemoryEngine(
        source=FakeSource(auto=False), max_loras=4, max_num_seqs=32, num_kv_blocks=400
    )
    base, slow = 500, "a7"
    engine.add(request(base, [3], tenant="base", max_tokens=90))
    for number in range(20):
        engine.add(request(number, [1, 2], adapter=f"a{number}", tenant=f"t{number}"))
    assert len(engine.source.pending) == 20, "all are fetched at once"
    loaded: set[str] = set()
    while not engine.is_over(("c", base)):
        if ready := next((digest for digest in engine.source.pending if digest != slow), None):
            engine.source.deliver(ready)
        engine.step()
        loaded |= set(engine.runner.slots.values())
        assert engine.core.stats().steps == len(engine.outputs["c", base]), "no step without it"
    assert loaded == {f"a{number}" for number in range(20)} - {slow}
    for number in range(20):
        assert engine.is_over(("c", number)) is (f"a{number}" != slow)
    engine.source.deliver(slow)
    engine.step()
    engine.run()
    for number in (*range(20), base):
        engine.assert_as_alone(number)
    engine.assert_at_rest()


def test_a_failed_fetch_ends_only_that_adapters_requests_and_can_be_tried_again():
    engine = MemoryEngine(source=FakeSource(auto=False))
    engine.add(request(1, [1], adapter="bad", n=2))
    engine.add(request(2, [1], adapter="bad", tenant="u"))
    engine.add(request(3, [1], adapter="good"))
    engine.step()
    engine.source.fail("bad", "no such blob")
    engine.source.deliver("good")
    engine.step()
    engine.run()
    for number in (1, 2):
        output = engine.last(number)
        assert (output.error_code, output.error) == ("adapter_unavailable", "no such blob")
        assert output.timing is not None and output.timing.queue["load"] > 0
    assert [delta.finish_reason for delta in engine.last(1).deltas] == ["error", "error"]
    engine.assert_as_alone(3)
    engine.assert_at_rest()

    engine.add(request(4, [1], adapter="bad"))
    engine.source.deliver("bad")
    engine.step()
    engine.run()
    engine.assert_as_alone(4)


def test_an_adapter_that_fails_on_the_device_gives_its_slot_back():
    engine = MemoryEngine(max_loras=1)
    engine.runner.broken_adapters.add("bad")
    engine.add(request(1, [1], adapter="bad"))
    engine.add(request(2, [1], adapter="good", tenant="u"))
    engine.run()
    assert engine.last(1).error_code == "adapter_unavailable"
    assert "not for this base" in (engine.last(1).error or "")
    engine.assert_as_alone(2)
    assert engine.core.stats().resident == ["good"]


def test_what_nobody_foresaw_about_an_adapter_ends_its_requests_and_is_logged(monkeypatch):
    engine = MemoryEngine(max_loras=1)
    install = engine.runner.install_adapter

    def broken_install(slot: int, weights: str) -> None:
        if weights == "bad":
            raise TypeError("no such shape")
        install(slot, weights)

    monkeypatch.setattr(engine.runner, "install_adapter", broken_install)
    engine.add(request(1, [1], adapter="bad"))
    engine.add(request(2, [1], adapter="good", tenant="u"))
    with structlog.testing.capture_logs() as logs:
        engine.run()
    assert engine.last(1).error_code == "adapter_unavailable"
    engine.assert_as_alone(2)
    assert [(entry["event"], entry["adapter"]) for entry in logs] == [
        ("adapter_not_installed", "bad")
    ]


def test_a_late_failure_does_not_end_what_a_resident_adapter_serves():
    engine = MemoryEngine()
    engine.add(request(1, [1], adapter="a", max_tokens=8))
    for _ in range(3):
        engine.step()
    engine.source.pending["a"] = None
    engine.source.fail("a")
    engine.run()
    engine.assert_as_alone(1)


def test_weights_evicted_before_their_slot_was_granted_are_fetched_again():
    engine = MemoryEngine(max_loras=1, source=FakeSource(capacity=0))
    engine.add(request(1, [1], adapter="a", max_tokens=12))
    engine.step()
    engine.step()
    engine.add(request(2, [1], adapter="b", tenant="u"))
    engine.step()
    del engine.source.in_host["b"]
    engine.run()
    engine.assert_as_alone(2)
    assert engine.source.num_loads == 3


def test_a_load_that_nobody_wants_any_more_is_called_off_and_its_slot_given_on():
    engine = MemoryEngine(max_loras=1, source=FakeSource(auto=True))
    engine.add(request(1, [1], adapter="a"))
    engine.source.poll()
    engine.source.in_host.clear()
    engine.source.auto = False
    engine.core._scheduler.adapter_fetched("a")  # pyright: ignore  # as if evicted since
    engine.step()
    assert engine.core.stats().slots_used == 1 and list(engine.source.pending) == ["a"]
    engine.core.abort("c", 1)
    assert engine.core.stats().slots_used == 0
    engine.add(request(2, [1], adapter="b", tenant="u"))
    engine.source.deliver("a")
    engine.source.deliver("b")
    engine.run()
    engine.assert_as_alone(2)
    assert engine.runner.slots == {0: "b"}
    engine.assert_at_rest()


def test_unload_acts_when_the_last_sequence_has_ended_and_a_stream_finishes_first():
    engine = MemoryEngine()
    engine.add(request(1, [1] * 9, adapter="old", max_tokens=10))
    for _ in range(4):
        engine.step()
    engine.core.unload("old")
    engine.step()
    assert engine.source.forgotten == [] and engine.core.stats().resident == ["old"]
    engine.run()
    engine.assert_as_alone(1)
    assert engine.source.forgotten == ["old"] and engine.core.stats().resident == []
    engine.add(request(2, [1] * 9, adapter="old", max_tokens=2))
    engine.run()
    assert engine.last(2).num_cached_tokens == 0, "its prefixes went with it"


def test_a_released_adapter_stays_resident_until_its_slot_is_needed():
    engine = MemoryEngine(max_loras=2)
    for number, adapter in enumerate(["a", "b", "a", "b", "a"]):
        engine.add(request(number, [1], adapter=adapter))
        engine.run()
    assert engine.source.num_loads == 2, "loads equal distinct adapters: nothing is read twice"
    engine.add(request(9, [1], adapter="c"))
    engine.run()
    assert sorted(engine.core.stats().resident) == ["a", "c"], "the longest idle went"


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_many_more_adapters_than_slots_and_host_memory_are_all_served(capacity):
    engine = MemoryEngine(max_loras=3, source=FakeSource(capacity=capacity), max_num_seqs=6)
    for number in range(60):
        engine.add(
            request(
                number, [1 + number % 9] * 5, adapter=f"a{number % 20}", tenant=f"t{number % 4}"
            )
        )
    engine.run()
    for number in range(60):
        engine.assert_as_alone(number)
    engine.assert_at_rest()


def test_outputs_of_one_step_are_one_message_for_a_request_and_carry_logprobs_only_if_asked():
    engine = MemoryEngine()
    engine.add(request(1, [1, 2], n=3))
    outputs = engine.step()
    assert len(outputs) == 1
    client, output = outputs[0]
    assert client == "c" and [delta.index for delta in output.deltas] == [0, 1, 2]
    assert all(delta.logprobs is None for delta in output.deltas)
    assert not output.finished and output.timing is not None


def test_stats_count_what_happened():
    engine = MemoryEngine(max_loras=2)
    engine.add(request(1, [1] * 9, adapter="a", max_tokens=3))
    engine.add(request(2, [1] * 9, adapter="b", max_tokens=3))
    engine.run()
    engine.add(request(3, [1] * 9, adapter="b", max_tokens=3))
    engine.run()
    stats = engine.core.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (27, 8, 9)
    assert stats.steps == len(engine.runner.batches)
    assert (stats.slots_used, stats.slots_total) == (2, 2)


def test_what_left_a_slot_is_cleared_before_another_adapter_arrives_in_it():
    engine = MemoryEngine(max_loras=1, max_num_seqs=2)
    engine.add(request(1, [1] * 4, adapter="a", max_tokens=40))
    for _ in range(3):
        engine.step()
    engine.add(request(2, [2] * 4, adapter="b", max_tokens=3))
    engine.step()
    assert engine.core.stats().resident == ["a"], "which is to make room for b"
    engine.source.prefetch("b")  # so that its arrival is told once more, in the very next step
    engine.core.abort("c", 1)
    engine.run()
    engine.assert_as_alone(2)
