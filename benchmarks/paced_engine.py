"""An engine without a model: the real server, scheduler and socket on a runner that does nothing.

    python -m benchmarks.paced_engine STEP_SECONDS [whole] < ARGS.json

A step takes STEP_SECONDS (0: as short as it gets), counted from one end to the next, or, where
steps are to be whole, from its own start, however late a request comes after the last one. Rows say
the same English text over and over, in tokens of the model's own tokenizer.
"""

import sys
import time
from pathlib import Path
from typing import NamedTuple

from engine.config import SchedulerConfig
from engine.engine_args import parse_engine_args
from engine.engine_info import EngineInfo
from engine.logs import configure_logs
from engine.parent import die_with_parent
from engine.parts import AdapterLimits, EngineParts
from engine.process import serve
from engine.scheduled_batch import SampledRow, SampledToken, ScheduledBatch, StepResult
from engine.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 40
TEXT = (
    "The parcel left the warehouse on Tuesday morning, and the courier's scan shows that it came "
    "to your town at 14:05. Nobody was at home, so it waits at the “Blue Corner” shop until "
    "Friday; bring the letter (or your ID) and €3.50, please. "
)


class NoWeights(NamedTuple):
    """Stands in for an adapter."""

    digest: str
    nbytes: int = 1


class PacedRunner:
    """`engine.runner.protocol.Runner` without tensors."""

    def __init__(self, token_ids: list[int], step_seconds: float, is_whole: bool) -> None:
        self._drawn = [SampledRow((SampledToken(token_id),)) for token_id in token_ids]
        self._step_seconds = step_seconds
        self._is_whole = is_whole
        self._last_end = 0.0

    def execute(self, batch: ScheduledBatch) -> StepResult:
        now = time.monotonic()
        begun = now if self._is_whole else self._last_end
        time.sleep(max(0.0, begun + self._step_seconds - now))
        self._last_end = time.monotonic()
        return StepResult(
            [
                row.sampling and self._drawn[row.sampling.output_position % len(self._drawn)]
                for row in batch.rows
            ]
        )

    def install_adapter(self, slot: int, weights: NoWeights) -> None:
        """Nothing to do."""

    def clear_slot(self, slot: int) -> None:
        """Nothing to do."""


def main(step_seconds: float, is_whole: bool) -> int:
    args = parse_engine_args(sys.stdin.buffer.read())
    configure_logs(process="engine", generation=args.generation)
    die_with_parent(args.parent_pid)
    tokenizer = Tokenizer.from_pretrained(Path(args.model_dir))
    config = SchedulerConfig(
        num_kv_blocks=MAX_NUM_SEQS * MAX_MODEL_LEN // 16,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )
    info = EngineInfo(
        model="paced",
        fingerprint="0" * 64,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=[0],
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_loras=config.max_loras,
        max_lora_rank=64,
        dtype="none",
        device="none",
    )
    parts = EngineParts.assemble(
        PacedRunner(tokenizer.encode(TEXT), step_seconds, is_whole),
        lambda digest, folder: NoWeights(digest),
        config=config,
        limits=AdapterLimits(cache_dir=Path(args.cache_dir)),
        info=info,
    )
    return serve(parts, args)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:] == ["whole"]))
