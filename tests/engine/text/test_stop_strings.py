import random

import pytest

from engine.text.stop_strings import StopMatch, StopStrings


def search_finished_text(text: str, stops: list[str]) -> StopMatch | None:
    matches = [
        StopMatch(stop, start, start + len(stop))
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    return min(matches, key=lambda match: (match.start, match.end), default=None)


def test_find_equals_a_search_over_all_places():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("abc", k=rng.randint(0, 12)))
        stops = ["".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        assert StopStrings(stops).find(text) == search_finished_text(text, stops)


def test_undecided_text_is_the_longest_tail_that_begins_a_stop_string():
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 10)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        expected = min(
            (
                start
                for start in range(len(text))
                for stop in stops
                if stop.startswith(text[start:]) and stop != text[start:]
            ),
            default=len(text),
        )
        assert StopStrings(stops).undecided_from(text) == expected


def test_matches_that_end_too_early_do_not_count():
    stops = StopStrings(["ab"])
    assert stops.find("abcab", ends_after=1) == ("ab", 0, 2)
    assert stops.find("abcab", ends_after=2) == ("ab", 3, 5)
    assert stops.find("abcab", ends_after=5) is None


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
