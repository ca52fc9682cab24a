"""One client at a time is asked for an adapter, and another one if it does not answer."""

from engine.adapters.fetch_desk import ANSWER_SECONDS, FetchDesk
from tests.support.scripted_engine import digest_of

A, B, C = (digest_of(number) for number in range(3))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_need_is_given_to_one_client_once() -> None:
    desk = FetchDesk(Clock())
    for _ in range(100):
        desk.need(A)
    assert desk.assign([b"x", b"y"]) == [(b"x", A)]
    assert desk.assign([b"x", b"y"]) == []
    assert desk.is_asked(b"x", A) and not desk.is_asked(b"y", A)
    desk.close(A)
    assert desk.num_open == 0 and not desk.is_asked(b"x", A)


def test_needs_spread_over_the_clients() -> None:
    desk = FetchDesk(Clock())
    for digest in (A, B, C):
        desk.need(digest)
    assert desk.assign([b"x", b"y"]) == [(b"x", A), (b"y", B), (b"x", C)]


def test_without_a_client_a_need_waits_for_one() -> None:
    desk = FetchDesk(Clock())
    desk.need(A)
    assert desk.assign([]) == []
    assert desk.assign([b"x"]) == [(b"x", A)]


def test_when_the_asked_client_goes_another_is_asked() -> None:
    desk = FetchDesk(Clock())
    desk.need(A)
    assert desk.assign([b"x", b"y"]) == [(b"x", A)]
    desk.client_gone(b"x")
    assert desk.assign([b"y"]) == [(b"y", A)]


def test_a_client_that_does_not_answer_is_passed_over_and_comes_round_again() -> None:
    clock = Clock()
    desk = FetchDesk(clock)
    desk.need(A)
    assert desk.assign([b"x", b"y"]) == [(b"x", A)]
    clock.now = ANSWER_SECONDS - 1
    assert desk.assign([b"x", b"y"]) == []
    clock.now = ANSWER_SECONDS
    assert desk.assign([b"x", b"y"]) == [(b"y", A)]
    assert not desk.is_asked(b"x", A)
    clock.now *= 2
    assert desk.assign([b"x", b"y"]) == [(b"x", A)]
