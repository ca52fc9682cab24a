"""One choice's tokens as text, cut at the first stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a push released."""

    text: str
    """Text that nothing to come can change or cut."""
    num_tokens: int
    """Tokens released: those whose text is out (or that have none), in order. The sum over all
    deltas is the choice's number of output tokens; after a stop, tokens past the one that completed
    the stop string are not in it."""
    stopped_by: str | None = None
    """The stop string that ended the choice; the engine's sequence is to be aborted."""


class TextStream:
    """Detokenises one choice incrementally and looks for its stop strings."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        *,
        include_stop_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None: ...

    def push(
        self, token_ids: Sequence[int], finished: bool, stop_token_id: int | None = None
    ) -> TextDelta:
        """Add output tokens; `finished` releases everything that is held back.

        `stop_token_id`: the id that ended the choice (`ChoiceDelta.stop_token_id`), which is then
        the last of `token_ids`: it is counted, but its text is shown only if stop strings are. After
        a stop every push returns an empty delta.
        """
        raise NotImplementedError
