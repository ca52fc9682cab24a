"""Where one choice stands in its grammar."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the scheduler's side holds cursors, and imports no numpy
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class GrammarCursor:
    """Lives as long as its sequence, preemptions included; `Grammars` moves and reads it.

    It catches up with the sequence's output when the next token is drawn, so that forks, recomputes
    and stops need not tell it anything.
    """

    grammar: str
    tenant: str = ""
    """The tenant in whose turn the grammar is compiled."""
    matcher: Any = None
    """llguidance's state; None until the grammar is compiled."""
    has_started_anew: bool = False
    """Whether it failed with a compiled grammar that others had used, and was given a fresh one."""
    num_followed: int = 0
    """Output tokens the matcher has consumed."""
    mask: "NDArray[np.bool_] | None" = None
    """[vocab_size], True for a token that may be drawn next."""
