"""Where one choice stands in its grammar."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the scheduler's side holds cursors, and imports no numpy
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class GrammarCursor:
    """Lives as long as its sequence does, over preemptions; `Grammars` moves and reads it.

    It follows the sequence's output tokens when the next one is to be drawn, so that a fork, a
    recompute or a stop needs no word to it.
    """

    grammar: str
    tenant: str = ""
    """In whose turn it is compiled."""
    matcher: Any = None
    """llguidance's state; None until the grammar is compiled."""
    has_started_anew: bool = False
    """It failed in a compiled grammar that others had used, and has one of its own time since."""
    num_followed: int = 0
    """Output tokens the matcher has consumed."""
    mask: "NDArray[np.bool_] | None" = None
    """[vocab_size], True for a token that may be drawn next."""
