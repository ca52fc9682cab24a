"""What a server can sustain, by formulas: Little's law and GPU-seconds a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from engine.simulation.roofline import RooflineStepTime


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """A decode step takes about `base + per_row x batch` seconds."""

    base: float
    per_row: float


def decode_line(step_time: RooflineStepTime, context: float) -> DecodeLine:
    """The roofline's decode step at one context, as long as it is bound by memory.

    >>> from engine.simulation.model_shape import LLAMA_3_1_8B
    >>> from engine.simulation.roofline import H100
    >>> line = decode_line(RooflineStepTime(LLAMA_3_1_8B, H100), context=1125)
    >>> f"{line.base * 1e3:.2f} ms + {line.per_row * 1e3:.3f} ms for each sequence"
    '6.49 ms + 0.055 ms for each sequence'
    """
    one, two = (step_time.decode_seconds(batch, context) for batch in (1, 2))
    return DecodeLine(2 * one - two, two - one)


def little_batch(rate: float, mean_output: float, line: DecodeLine) -> float:
    """Sequences that decode at a time: Little's law, b = rate x E[output] x step time at b.

    Infinite where decoding alone takes more time than there is.

    >>> round(little_batch(10, 248, DecodeLine(6.47e-3, 0.055e-3)), 1)
    18.6
    >>> little_batch(100, 248, DecodeLine(6.47e-3, 0.055e-3))
    inf
    """
    tokens = rate * mean_output
    idle = 1 - tokens * line.per_row
    return tokens * line.base / idle if idle > 0 else float("inf")


def slot_efficiency(mean_output: float, mean_longest: float) -> float:
    """Of a static batch: the share of its slot-steps that draw a token which is returned.

    >>> round(slot_efficiency(248, 812), 2)
    0.31
    """
    return mean_output / mean_longest


@dataclass(frozen=True, slots=True)
class GpuTime:
    """GPU seconds that one request takes."""

    prefill: float
    decode: float
    mean_output: float

    @property
    def seconds(self) -> float:
        """Prefill and decode together."""
        return self.prefill + self.decode

    @property
    def requests_per_second(self) -> float:
        """The ceiling: a GPU that is never idle, at a batch that is always full.

        >>> ceiling = GpuTime(prefill=28.3e-3, decode=248 * 0.080e-3, mean_output=248)
        >>> f"{ceiling.requests_per_second:.1f} requests/s"
        '20.8 requests/s'
        """
        return 1 / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        """The same in tokens.

        >>> ceiling = GpuTime(prefill=28.3e-3, decode=248 * 0.080e-3, mean_output=248)
        >>> round(ceiling.output_tokens_per_second, -1)
        5150.0
        """
        return self.mean_output / self.seconds


def gpu_time(
    step_time: RooflineStepTime,
    prompts: Sequence[int],
    outputs: Sequence[int],
    *,
    batch: int,
    context: float,
) -> GpuTime:
    """A prefill of its own, and a share of each decode step of a full batch: a sample's mean."""
    mean_output = fmean(outputs)
    decode = mean_output * step_time.decode_seconds(batch, context) / batch
    return GpuTime(fmean(map(step_time.prefill_seconds, prompts)), decode, mean_output)
