import pytest

from engine.transport.silence import dead_after, doubt_after


@pytest.mark.parametrize("hang_seconds", [0.5, 5, 30, 120, 150, 600, 3600])
def test_an_engine_is_doubted_before_its_watch_ends_it_and_given_up_only_after(hang_seconds: float):
    assert doubt_after(hang_seconds) < hang_seconds < dead_after(hang_seconds)
    assert doubt_after(hang_seconds) <= 30
