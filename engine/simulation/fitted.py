"""Step times fitted to what a real engine took: its machine, its kernels, its adapters.

    steps = read_steps(path)                      # `engine.telemetry.records.StepRecord`, JSONL
    model = fit(steps, block_size=16)
    seconds = FittedStepTime(model).seconds(load)

A step's time is a sum of costs that are not negative (Lawson and Hanson, "Solving Least Squares
Problems", 1974; `scipy.optimize.nnls`): a fixed one, and one for each row, token, token of K/V that
is read, different adapter, and token that goes through one.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from engine.errors import ConfigError
from engine.scheduled_batch import ScheduledBatch
from engine.simulation.step_load import StepLoad
from engine.telemetry.records import StepRecord

GEMM_ROWS = 16
"""Tokens are computed in groups of this size, for batch invariance."""
LONGEST_PAUSE = 0.005
"""Longest pause, in seconds, between two steps of a busy engine; after a longer one it was idle."""
FEWEST_STEPS = 50


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that each thing in a step costs."""

    step: float
    row: float
    padded_token: float
    """For each token, their number rounded up to whole groups."""
    token: float
    context_token: float
    """For each position whose K/V the rows read."""
    adapter: float
    lora_token: float


class StepModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine on its machine, as in a file for `loraplex simulate --step-model`."""

    costs: StepCosts
    mean_error: float
    """Mean error of a single step's predicted time, relative to the mean step."""
    num_steps: int
    load_seconds: float = 0.03
    """Seconds that an adapter takes to host memory."""
    install_seconds: float = 0.0
    """Seconds from there into its slot, during which no step runs."""
    service_seconds: float = 0.0
    """Seconds that a first token takes outside the engine: HTTP, tokenizing, sockets."""
    num_kv_blocks: int
    block_size: int = 16
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_loras: int
    max_cpu_loras: int = 32
    machine: str = ""


@dataclass(frozen=True, slots=True)
class FittedStepTime:
    """A machine with these costs: an `engine.simulation.step_time.LoadTime`."""

    costs: StepCosts

    def __call__(self, batch: ScheduledBatch) -> float:
        """See `StepTime`."""
        return self.seconds(StepLoad.of(batch))

    def seconds(self, load: StepLoad) -> float:
        """See `LoadTime`."""
        costs = self.costs
        return (
            costs.step
            + costs.row * load.num_rows
            + costs.padded_token * _padded(load.num_tokens)
            + costs.token * load.num_tokens
            + costs.context_token * load.context
            + costs.adapter * load.num_adapters
            + costs.lora_token * load.lora_tokens
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs, and how well they predict the steps they were fitted to."""

    costs: StepCosts
    mean_error: float
    num_steps: int


def fit_steps(steps: Sequence[StepRecord], block_size: int) -> Fit:
    """Fit costs to steps in the order in which they were taken. Raises ConfigError for too few.

    A step lasts until the next one begins, so that sending outputs counts; where the engine had
    nothing to do in between, a pause of mean length is taken. The K/V that a step reads is what all
    running sequences hold. Errors are weighted by the inverse root of the time that was measured,
    and the costs scaled so that all steps together take what they took.
    """
    from scipy.optimize import nnls  # half a second that only fitting takes

    if len(steps) < FEWEST_STEPS:
        raise ConfigError(f"{len(steps)} steps are too few to fit; {FEWEST_STEPS} are needed")
    took = _durations(steps)
    rows = np.array([_terms(step, block_size) for step in steps])
    weights = 1 / np.sqrt(took)
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(rows / scale * weights[:, None], took * weights)
    costs = found / scale
    costs *= took.sum() / (rows @ costs).sum()
    error = float(np.abs(rows @ costs - took).mean() / took.mean())
    named = dict(zip(StepCosts.__struct_fields__, costs.tolist(), strict=True))
    return Fit(StepCosts(**named), error, len(steps))


def slowness(costs: StepCosts, steps: Sequence[StepRecord], block_size: int) -> float:
    """Measured over predicted time of consecutive steps: how far a machine's speed has drifted."""
    each = msgspec.structs.astuple(costs)
    rows = np.array([_terms(step, block_size) for step in steps])
    return float(_durations(steps).sum() / (rows @ np.array(each)).sum())


def scaled(costs: StepCosts, factor: float) -> StepCosts:
    """The costs of a machine that takes `factor` times as long for everything."""
    return StepCosts(
        **{name: factor * cost for name, cost in msgspec.structs.asdict(costs).items()}
    )


def read_steps(path: Path) -> list[StepRecord]:
    """Steps of a JSONL file, one `StepRecord` a line. Raises ConfigError, naming the line."""
    decode = msgspec.json.Decoder(StepRecord).decode
    steps: list[StepRecord] = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            steps.append(decode(line))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
    return steps


def read_step_model(path: Path) -> StepModel:
    """A file that was written with `msgspec.json.encode`. Raises ConfigError, naming the field."""
    try:
        return msgspec.json.decode(_read(path), type=StepModel)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from error


def _terms(step: StepRecord, block_size: int) -> list[float]:
    tokens = step.num_tokens
    lora = sum(s.prefill_tokens + s.decode_rows for s in step.shares if s.label is not None)
    context = step.kv_blocks_used * block_size
    return [1.0, step.num_rows, _padded(tokens), tokens, context, step.adapters, lora]


def _durations(steps: Sequence[StepRecord]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    pauses = [
        after.at - step.at - step.seconds.total
        if after.number == step.number + 1
        else LONGEST_PAUSE + 1.0
        for step, after in pairwise(steps)
    ]
    short = [max(0.0, pause) for pause in pauses if pause <= LONGEST_PAUSE]
    usual = statistics.fmean(short) if short else 0.0
    return np.array(
        [
            step.seconds.total + (max(0.0, pause) if pause <= LONGEST_PAUSE else usual)
            for step, pause in zip(steps, [*pauses, LONGEST_PAUSE + 1.0], strict=True)
        ]
    )


def _padded(num_tokens: int) -> int:
    return -(-num_tokens // GEMM_ROWS) * GEMM_ROWS


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def median_seconds(values: Iterable[float], default: float) -> float:
    """Of loads: one that waited for a slow disk is not the rule."""
    found = list(values)
    return statistics.median(found) if found else default
