"""A real engine core on a scripted runner: an engine without a model, in milliseconds.

Usage, with everything optional::

    async with scripted_engine(reply=lambda prompt, adapter: [5, 6, EOS]) as engine:
        stream = await engine.client.generate(request(1, [1, 2, 3]))
        outputs = [output async for output in stream]
"""

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.adapters.disk import ADAPTER_FILES
from engine.config import SchedulerConfig
from engine.errors import AdapterUnavailable
from engine.messages import EngineInfo, EngineRequest
from engine.parts import AdapterLimits, EngineParts
from engine.runner.protocol import Runner
from engine.sampling_params import SamplingParams
from engine.scheduled_batch import (
    SampledRow,
    SampledToken,
    SamplingRow,
    ScheduledBatch,
    StepResult,
)
from engine.transport.inline_client import InlineEngineClient

EOS = 0
VOCAB_SIZE = 512
SEVENS = (7,) * 100_000

Reply = Callable[[tuple[int, ...], str | None], Sequence[int]]
"""(prompt, adapter's digest or None) -> output token ids; EOS follows where it ends."""


def echo(prompt: tuple[int, ...], adapter: str | None) -> Sequence[int]:
    """Say the prompt again, then EOS."""
    return prompt


def pace(batch: ScheduledBatch) -> None:
    """Make a step last a millisecond or more, as a model's would; for `before_step`."""
    time.sleep(0.001)


def endless(prompt: tuple[int, ...], adapter: str | None) -> Sequence[int]:
    """Go on until `max_tokens`."""
    return SEVENS


class UntilTold:
    """A `Reply` that goes on until `end` is called; every choice ends with its next token then."""

    def __init__(self) -> None:
        self._reply = SEVENS

    def __call__(self, prompt: tuple[int, ...], adapter: str | None) -> Sequence[int]:
        return self._reply

    def end(self) -> None:
        self._reply = ()


@dataclass(frozen=True)
class FakeWeights:
    digest: str
    nbytes: int


class ScriptedRunner:
    """An `engine.runner.protocol.Runner` that draws tokens from a script.

    `before_step(batch)` is called first in each step: to wait on a `threading.Event`, to raise, or
    to keep the batch. A row whose `prompt[0]` is in `failing_rows` fails alone.
    """

    def __init__(
        self,
        reply: Reply = echo,
        *,
        before_step: Callable[[ScheduledBatch], None] = lambda batch: None,
        failing_rows: frozenset[int] = frozenset(),
    ) -> None:
        self.reply = reply
        self.before_step = before_step
        self.failing_rows = failing_rows
        self.slots: dict[int, FakeWeights] = {}
        self.num_steps = 0

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.num_steps += 1
        self.before_step(batch)
        rows: list[SampledRow | None] = []
        for row in batch.rows:
            adapter = None if row.slot is None else self.slots[row.slot].digest
            rows.append(None if row.sampling is None else self._sample(row.sampling, adapter))
        return StepResult(rows)

    def install_adapter(self, slot: int, weights: FakeWeights) -> None:
        self.slots[slot] = weights

    def clear_slot(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def _sample(self, row: SamplingRow, adapter: str | None) -> SampledRow:
        prompt = tuple(row.token_ids[: row.num_prompt_tokens])
        if prompt[0] in self.failing_rows:
            return SampledRow(error="this row was told to fail")
        reply = self.reply(prompt, adapter)
        position = row.output_position
        token_id = reply[position] if position < len(reply) else EOS
        if row.params.logprobs is None:
            return SampledRow(tuple(SampledToken(token_id) for _ in row.choices))
        top = tuple((token_id + k, -0.5 - k) for k in range(row.params.logprobs))
        return SampledRow(tuple(SampledToken(token_id, -0.5, top) for _ in row.choices))


def load_fake_adapter(digest: str, folder: Path) -> FakeWeights:
    """Stands in for `load_adapter`: any two files will do, unless one says `damaged`."""
    texts = [(folder / name).read_bytes() for name in ADAPTER_FILES]
    if b"damaged" in texts:
        raise AdapterUnavailable(digest, "its files are damaged")
    return FakeWeights(digest, nbytes=sum(map(len, texts)))


def put_fake_adapter(cache_dir: Path, digest: str, content: bytes = b"weights") -> None:
    """Put an adapter's files where the engine looks for them."""
    folder = cache_dir / digest
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_FILES[0]).write_bytes(b"{}")
    (folder / ADAPTER_FILES[1]).write_bytes(content)


def scripted_parts(
    runner: Runner,
    cache_dir: Path,
    *,
    config: SchedulerConfig | None = None,
    load: Callable[[str, Path], FakeWeights] = load_fake_adapter,
    model: str = "scripted",
    prepare_grammar: Callable[[str, str], None] | None = None,
) -> EngineParts:
    config = config or SchedulerConfig(num_kv_blocks=512, max_num_seqs=16)
    info = EngineInfo(
        model=model,
        fingerprint="f" * 64,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS],
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_loras=config.max_loras,
        max_lora_rank=64,
        dtype="float32",
        device="cpu",
    )
    limits = AdapterLimits(cache_dir=cache_dir)
    return EngineParts.assemble(
        runner, load, config=config, limits=limits, info=info, prepare_grammar=prepare_grammar
    )


@dataclass(frozen=True)
class ScriptedEngine:
    client: InlineEngineClient
    runner: ScriptedRunner
    parts: EngineParts
    cache_dir: Path
    fetched: list[str]
    """Digests in the order in which they were fetched."""


@contextlib.asynccontextmanager
async def scripted_engine(
    reply: Reply = echo,
    *,
    runner: ScriptedRunner | None = None,
    config: SchedulerConfig | None = None,
    threaded: bool = False,
    cache_dir: Path | None = None,
    fetch: Callable[[str, Path], None] | None = None,
) -> AsyncIterator[ScriptedEngine]:
    """An engine behind an `InlineEngineClient`.

    `fetch(digest, cache_dir)` puts an adapter's files at `cache_dir/<digest>/` or raises; without
    it every adapter exists.
    """
    runner = runner or ScriptedRunner(reply)
    with _folder(cache_dir) as folder:
        fetched: list[str] = []

        async def fetch_adapter(digest: str) -> None:
            fetched.append(digest)
            (fetch or _put)(digest, folder)

        parts = scripted_parts(runner, folder, config=config)
        async with InlineEngineClient(parts, fetch_adapter, threaded=threaded) as client:
            yield ScriptedEngine(client, runner, parts, folder, fetched)


def request(
    request_id: int,
    prompt_token_ids: Sequence[int],
    *,
    tenant: str = "acme",
    adapter: str | None = None,
    max_tokens: int = 16,
    n: int = 1,
) -> EngineRequest:
    """A greedy request."""
    return EngineRequest(
        request_id=request_id,
        tenant=tenant,
        prompt_token_ids=list(prompt_token_ids),
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, n=n),
        adapter=adapter,
    )


def digest_of(number: int) -> str:
    """A well-formed digest."""
    return f"{number:064x}"


def _put(digest: str, folder: Path) -> None:
    put_fake_adapter(folder, digest)


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="scripted-") as name:
        yield Path(name)
