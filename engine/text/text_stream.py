"""One choice's tokens as text, cut at the first stop string."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from engine.text.detokenizer import Detokenizer
from engine.text.stop_strings import StopStrings


class TextDelta(NamedTuple):
    """What a push released."""

    text: str
    """Text that later tokens can neither change nor cut."""
    num_tokens: int
    """Tokens released: those whose text is out, or that have none, in order. The sum over all
    deltas is the choice's number of output tokens, without tokens after the one that completed a
    stop string."""
    stopped_by: str | None = None
    """The stop string that ended the choice; the caller aborts the engine's sequence."""


class TextStream:
    """Detokenises one choice incrementally and looks for its stop strings.

    The text of all deltas joined is the decoding of all tokens up to the first stop string, however
    the tokens are grouped into pushes. Stop strings that are complete within the first `min_tokens`
    tokens do not count.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        *,
        include_stop_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop)
        self._include_stop = include_stop_in_output
        self._min_tokens = min_tokens
        self._held = ""  # decoded, not released
        self._num_released_chars = 0
        self._token_ends: list[int] = []  # where the text of each token not released ends in _held
        self._num_pushed = 0
        self._num_released_tokens = 0
        self._ignored_chars = 0  # stop strings that end within so many characters do not count
        self._is_over = False
        self._stopped_by: str | None = None

    def push(
        self, token_ids: Sequence[int], finished: bool, stop_token_id: int | None = None
    ) -> TextDelta:
        """Add output tokens; `finished` releases everything that is held back.

        `stop_token_id`: the id that ended the choice (`ChoiceDelta.stop_token_id`), which is then
        the last of `token_ids`: it is counted, but its text is shown only if stop strings are. Once
        the choice has ended, every push returns an empty delta.
        """
        if self._is_over:
            return TextDelta("", 0, self._stopped_by)
        has_hidden = stop_token_id is not None and not self._include_stop
        if has_hidden and (not finished or not token_ids or token_ids[-1] != stop_token_id):
            raise ValueError("stop_token_id is not the last of a finished choice's tokens")
        shown = token_ids[:-1] if has_hidden else token_ids
        if not self._stops:
            return self._pass_on(shown, finished, 1 if has_hidden else 0)
        for token_id in shown:
            self._append(self._detokenizer.push(token_id), 1)
        if finished:
            self._append(self._detokenizer.flush(), 1 if has_hidden else 0)
        return self._release(finished)

    def _pass_on(self, token_ids: Sequence[int], finished: bool, num_hidden: int) -> TextDelta:
        """Release all that is decoded: there is no stop string that could cut it."""
        text = "".join(map(self._detokenizer.push, token_ids))
        if finished:
            text += self._detokenizer.flush()
            self._is_over = True
        self._num_pushed += len(token_ids) + num_hidden
        num_decoded = self._num_pushed - self._detokenizer.num_held
        num_tokens = num_decoded - self._num_released_tokens
        self._num_released_tokens = num_decoded
        return TextDelta(text, num_tokens)

    def _append(self, text: str, num_tokens: int) -> None:
        self._held += text
        self._num_pushed += num_tokens
        num_decoded = self._num_pushed - self._detokenizer.num_held
        num_new = num_decoded - self._num_released_tokens - len(self._token_ends)
        self._token_ends.extend([len(self._held)] * num_new)
        if self._num_pushed <= self._min_tokens:
            self._ignored_chars = self._num_released_chars + len(self._held)

    def _release(self, finished: bool) -> TextDelta:
        undecided = len(self._held) if finished else self._stops.undecided_from(self._held)
        match = self._stops.find(self._held, max(0, self._ignored_chars - self._num_released_chars))
        if match is not None and match.start <= undecided:
            text = self._held[: match.end if self._include_stop else match.start]
            self._is_over = True
            self._stopped_by = match.stop
            # The token that completes the stop string may itself be held, for half a character.
            return TextDelta(text, bisect_left(self._token_ends, match.end) + 1, match.stop)
        text, self._held = self._held[:undecided], self._held[undecided:]
        num_tokens = bisect_right(self._token_ends, undecided)
        self._token_ends = [end - undecided for end in self._token_ends[num_tokens:]]
        self._num_released_chars += undecided
        self._num_released_tokens += num_tokens
        self._is_over = finished
        return TextDelta(text, num_tokens)
