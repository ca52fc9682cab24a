"""Adapters on their way to slots beside the steps: nobody waits, and no row uses half of one."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from engine.device.adapter_transfers import AdapterTransfers
from engine.device.device import HostDevice, Mark
from tests.support.memory_engine import FakeSource, MemoryEngine, request
from tests.support.memory_runner import MemoryRunner, Overlap


class ManualTransfer:
    def __init__(self, land: Callable[[], None]) -> None:
        self._land = land
        self._error: str | None = None
        self._is_over = False

    def end(self, error: str | None = None) -> None:
        self._is_over, self._error = True, error
        if error is None:
            self._land()

    def is_done(self) -> bool:
        return self._is_over

    def error(self) -> str | None:
        assert self._is_over
        return self._error


class SlowRunner(MemoryRunner):
    """Weights are in their slot when the test says so."""

    transfers: dict[str, ManualTransfer]

    def install_adapter(self, slot: int, weights: str) -> ManualTransfer:  # type: ignore[override]
        assert weights not in self.transfers, "a transfer is begun twice"
        assert slot not in self.slots, "a slot is loaded over another adapter"

        def land() -> None:
            self.slots[slot] = weights

        transfer = self.transfers[weights] = ManualTransfer(land)
        return transfer


def slow_engine(**config: Any) -> tuple[MemoryEngine, dict[str, ManualTransfer]]:
    engine = MemoryEngine(**config)
    engine.runner.__class__ = SlowRunner
    engine.runner.transfers = {}  # type: ignore[attr-defined]
    return engine, engine.runner.transfers  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlap", [None, "early", "late"])
def test_others_run_on_while_an_adapter_is_on_its_way_and_its_rows_begin_when_it_is_there(
    overlap: Overlap | None,
):
    engine, transfers = slow_engine(overlap=overlap)
    engine.add(request(1, [1], max_tokens=30))
    engine.add(request(2, [2], adapter="a", max_tokens=3))
    for _ in range(10):
        engine.step()
    assert list(transfers) == ["a"]
    assert len(engine.choice(1)[0]) >= 9 and not engine.choice(2)[0]
    assert engine.core.stats().slots_used == 1
    transfers["a"].end()
    for _ in range(3):
        engine.step()
    assert engine.choice(2)[0], "with the next step that plans anew"
    engine.run()
    engine.assert_as_alone(1)
    engine.assert_as_alone(2)
    engine.assert_at_rest()


def test_an_engine_with_nothing_but_a_transfer_has_work_until_it_is_over():
    engine, transfers = slow_engine()
    engine.add(request(1, [1], adapter="a", max_tokens=2))
    for _ in range(5):
        assert engine.core.has_work
        engine.step()
    transfers["a"].end()
    engine.run()
    engine.assert_as_alone(1)
    assert not engine.core.has_work


def test_a_transfer_that_fails_ends_its_adapters_requests_and_no_others():
    engine, transfers = slow_engine()
    engine.add(request(1, [1], adapter="a"))
    engine.add(request(2, [1], adapter="b", tenant="u"))
    engine.step()
    engine.step()
    transfers["a"].end("no room in the pool")
    transfers["b"].end()
    engine.run()
    assert engine.last(1).error_code == "adapter_unavailable"
    assert engine.last(1).error == "no room in the pool"
    engine.assert_as_alone(2)
    assert engine.core.stats().resident == ["b"]


def test_a_load_that_is_called_off_under_way_is_of_no_account():
    engine, transfers = slow_engine(max_loras=1)
    engine.add(request(1, [1], adapter="a"))
    engine.step()
    engine.step()
    engine.core.abort("c", 1)
    engine.add(request(2, [2], adapter="b", tenant="u"))
    engine.step()
    engine.step()
    assert list(transfers) == ["a", "b"]
    transfers["b"].end()  # behind the first, which was cleared
    transfers["a"]._is_over = True
    engine.run()
    engine.assert_as_alone(2)
    assert engine.core.stats().resident == ["b"]
    engine.assert_at_rest()


def test_weights_that_are_told_of_twice_are_sent_once():
    engine, transfers = slow_engine(source=FakeSource())
    engine.add(request(1, [1], adapter="a"))
    engine.step()
    engine.step()
    engine.source.prefetch("a")
    engine.step()
    transfers["a"].end()
    engine.run()
    engine.assert_as_alone(1)


class ManualMark:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.thread = threading.current_thread().name

    def is_done(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        assert self.event.wait(10)


class LateDevice(HostDevice):
    """Its marks are done when the test says so; work put aside is noted with its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[ManualMark] = []
        self.aside_of: list[tuple[ManualMark, str]] = []

    def mark(self) -> Mark:
        self.marks.append(ManualMark())
        return self.marks[-1]

    def aside(self, after: Mark) -> AbstractContextManager[object]:
        return self._note(after)

    @contextmanager
    def _note(self, after: Mark):
        assert isinstance(after, ManualMark)
        self.aside_of.append((after, threading.current_thread().name))
        yield


def test_a_transfer_is_queued_on_its_thread_behind_the_steps_and_done_with_its_mark():
    device = LateDevice()
    done: list[tuple[str, int]] = []
    transfers = AdapterTransfers(
        device,
        lambda slot, weights: done.append((f"install {weights}", slot)),
        lambda slot: done.append(("clear", slot)),
    )
    transfers.clear(3)
    transfer = transfers.install(3, "weights")
    transfers.close()
    assert done == [("clear", 3), ("install weights", 3)], "in the order of the calls"
    here = threading.current_thread().name
    assert [mark.thread for mark, _ in device.aside_of] == [here, here], "when it was asked for"
    assert {name for _, name in device.aside_of} == {"adapter-transfer_0"}
    assert not transfer.is_done(), "the copies were queued, and are not over"
    for mark in device.marks:
        mark.event.set()
    assert transfer.is_done() and transfer.error() is None


def test_a_slot_that_cannot_be_filled_is_cleared_and_the_transfer_says_why():
    cleared: list[int] = []

    def install(slot: int, weights: object) -> None:
        raise ValueError("A has 3 columns")

    transfers = AdapterTransfers(HostDevice(), install, cleared.append)
    transfer = transfers.install(2, "weights")
    transfers.close()
    assert transfer.is_done() and transfer.error() == "A has 3 columns"
    assert cleared == [2]
