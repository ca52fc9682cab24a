"""The roofline of each kernel: the bytes and operations that it cannot do without.

Every operand is moved once between memory and the chip; what a kernel reads twice it has to make
up for. A kernel takes at least ``max(bytes / bandwidth, operations / speed)`` (Williams, Waterman
and Patterson, CACM 2009), and on a GPU never less than an empty launch, about 2 microseconds in a
graph.
"""

from dataclasses import dataclass

from engine.triton.tiles import choose_num_splits


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of a GPU's data sheet, or as measured."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    """Dense bfloat16, on tensor cores."""


H100 = Peaks("H100 SXM", 3.35e12, 989e12)
A100 = Peaks("A100 80 GB SXM", 2.039e12, 312e12)
B200 = Peaks("B200", 8.0e12, 2250e12)


@dataclass(frozen=True, slots=True)
class KernelCost:
    """What one launch does at least."""

    num_bytes: int
    flops: int = 0
    """A multiplication and an addition are two. Only products of matrices are counted."""

    def microseconds(self, peaks: Peaks) -> float:
        """With bytes and operations overlapped.

        >>> KernelCost(3_350_000).microseconds(H100)
        1.0
        >>> KernelCost(0, 989_000_000).microseconds(H100)
        1.0
        """
        seconds = max(self.num_bytes / peaks.bytes_per_second, self.flops / peaks.flops_per_second)
        return 1e6 * seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """A decoder's sizes; values are bfloat16."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int
    vocab: int

    @property
    def query_width(self) -> int:
        """Channels of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all KV heads."""
        return self.kv_heads * self.head_dim

    def attention(self, rows: int, queries: int, context: int, kv_bytes: int = 2) -> KernelCost:
        """`rows` sequences with `queries` new tokens behind `context` cached ones, in one layer.

        Keys and values are read once a row, not once a query or head.

        A decode of Llama-3-8B does 4 operations a byte, of 295 that an H100 could do meanwhile:

        >>> cost = LLAMA_3_8B.attention(1, 1, 100_000)
        >>> round(cost.flops / cost.num_bytes, 1)
        4.0
        >>> cost = LLAMA_3_8B.attention(1, 2048, 0)
        >>> cost.flops == 4 * 4096 * 2048 * 2049 // 2
        True
        """
        pairs = queries * context + queries * (queries + 1) // 2
        kept = 2 * kv_bytes * self.kv_width * (context + queries)
        return KernelCost(
            num_bytes=rows * (kept + 2 * 2 * self.query_width * queries),
            flops=4 * rows * self.query_width * pairs,
        )

    def combine(self, rows: int, num_splits: int) -> KernelCost:
        """Shares of a decode's positions, put together: float32 parts, bfloat16 out.

        >>> LLAMA_3_8B.combine(1, 8).num_bytes
        140288
        """
        parts = 4 * num_splits * (self.query_width + self.heads)
        return KernelCost(rows * (parts + 2 * self.query_width))

    def add_and_norm(self, rows: int) -> KernelCost:
        """Residual, update and norm: two read, two written.

        >>> LLAMA_3_8B.add_and_norm(1).num_bytes
        40960
        """
        return KernelCost(2 * self.hidden * (4 * rows + 1))

    def rotate_and_store(self, rows: int, kv_bytes: int = 2) -> KernelCost:
        """Queries read and written, keys and values read and stored, a cosine and sine each.

        >>> LLAMA_3_8B.rotate_and_store(1).num_bytes
        25088
        """
        values = 2 * (2 * self.query_width + 2 * self.kv_width) + kv_bytes * 2 * self.kv_width
        return KernelCost(rows * (values + 4 * self.head_dim))

    def activate(self, rows: int) -> KernelCost:
        """Gate and up read, their product written.

        >>> QWEN_2_5_05B.activate(2).num_bytes
        58368
        """
        return KernelCost(2 * 3 * rows * self.inner)

    def draw(self, rows: int, *, is_narrow: bool = False) -> KernelCost:
        """Tokens from logits: read once for their best and once for the race.

        `is_narrow`: top-k or top-p, with a float32 copy that is written and read twice; each pass
        of the search for the nucleus reads it again, from the L2 cache.

        >>> LLAMA_3_8B.draw(1).num_bytes
        513024
        """
        copy = 3 * 4 * self.vocab - 2 * self.vocab if is_narrow else 0
        return KernelCost(rows * (2 * 2 * self.vocab + copy))

    @property
    def projections(self) -> tuple[tuple[int, int, int], ...]:
        """Inputs, slices and outputs of a layer's four fused linears."""
        return (
            (self.hidden, 3, self.query_width + 2 * self.kv_width),
            (self.query_width, 1, self.hidden),
            (self.hidden, 2, 2 * self.inner),
            (self.inner, 1, self.hidden),
        )

    def lora_shrink(self, rows: int, adapters: int, rank: int) -> KernelCost:
        """``t = x @ A.T`` on all linears of a layer, four launches: x and A read, t in float32.

        >>> LLAMA_3_8B.lora_shrink(1, 1, 16).num_bytes
        1298880
        """
        kept, done = 0, 0
        for inputs, slices, _ in self.projections:
            kept += 2 * inputs * (slices * adapters * rank + rows) + 4 * slices * rows * rank
            done += 2 * rows * slices * rank * inputs
        return KernelCost(kept, done)

    def lora_expand(self, rows: int, adapters: int, rank: int) -> KernelCost:
        """``y += t @ B.T`` on all linears of a layer, four launches: y is read and written.

        >>> LLAMA_3_8B.lora_expand(1, 1, 16).num_bytes
        1548736
        """
        kept, done = 0, 0
        for _, slices, outputs in self.projections:
            kept += 2 * outputs * (adapters * rank + 2 * rows) + 4 * slices * rows * rank
            done += 2 * rows * rank * outputs
        return KernelCost(kept, done)

    def linears(self, rows: int) -> KernelCost:
        """All of a layer's linears, for comparison: PyTorch's.

        >>> round(LLAMA_3_8B.linears(1).num_bytes / 1e6)
        436
        """
        qkv = self.hidden * (self.query_width + 2 * self.kv_width)
        weights = qkv + self.query_width * self.hidden + 3 * self.hidden * self.inner
        ends = 2 * self.hidden + 2 * self.query_width + 2 * self.kv_width
        values = ends + 2 * self.hidden + 3 * self.inner
        return KernelCost(2 * (weights + rows * values), 2 * rows * weights)


LLAMA_3_8B = Dimensions(
    name="Llama-3-8B", hidden=4096, heads=32, kv_heads=8, head_dim=128, inner=14336, layers=32,
    vocab=128256,
)  # fmt: skip
QWEN_2_5_05B = Dimensions(
    name="Qwen2.5-0.5B", hidden=896, heads=14, kv_heads=2, head_dim=64, inner=4864, layers=24,
    vocab=151936,
)  # fmt: skip
CONTEXT = 1024
"""Cached positions of each row of the sheet."""
PROMPT = 2048
ADAPTERS, RANK = 16, 16
"""Of the sheet, on all linears; a batch of fewer rows has an adapter for each."""


def sheet(model: Dimensions) -> list[tuple[str, str, int, KernelCost]]:
    """(kernel, what of, launches a step, cost of one) of decode steps and of a prompt's prefill."""
    rows: list[tuple[str, str, int, KernelCost]] = []
    for batch in (1, 32, 256):
        case = "1 row" if batch == 1 else f"{batch} rows"
        rows += [
            ("attention", case, model.layers, model.attention(batch, 1, CONTEXT - 1)),
            ("attention, fp8", case, model.layers, model.attention(batch, 1, CONTEXT - 1, 1)),
        ]
        num_splits = choose_num_splits(batch, model.kv_heads, CONTEXT, 90)
        if num_splits > 1:
            of = f"{case}, {num_splits} shares"
            rows.append(("combine", of, model.layers, model.combine(batch, num_splits)))
        rows += [
            ("add and norm", case, 2 * model.layers, model.add_and_norm(batch)),
            ("rotate and store", case, model.layers, model.rotate_and_store(batch)),
            ("activate", case, model.layers, model.activate(batch)),
            *_adapters(model, case, batch, min(batch, ADAPTERS)),
            ("draw", case, 1, model.draw(batch)),
            ("draw, top-p", case, 1, model.draw(batch, is_narrow=True)),
            ("(linears)", case, model.layers, model.linears(batch)),
        ]
    case = f"{PROMPT} tokens"
    rows += [
        ("attention", case, model.layers, model.attention(1, PROMPT, 0)),
        ("add and norm", case, 2 * model.layers, model.add_and_norm(PROMPT)),
        ("rotate and store", case, model.layers, model.rotate_and_store(PROMPT)),
        ("activate", case, model.layers, model.activate(PROMPT)),
        *_adapters(model, case, PROMPT, 1),
        ("(linears)", case, model.layers, model.linears(PROMPT)),
    ]
    return rows


def _adapters(
    model: Dimensions, case: str, rows: int, adapters: int
) -> list[tuple[str, str, int, KernelCost]]:
    of = f"{case}, {adapters} of rank {RANK}"
    return [
        ("LoRA shrink", of, model.layers, model.lora_shrink(rows, adapters, RANK)),
        ("LoRA expand", of, model.layers, model.lora_expand(rows, adapters, RANK)),
    ]


def table(model: Dimensions, gpus: tuple[Peaks, ...] = (A100, H100, B200)) -> str:
    """The sheet in Markdown; floors in microseconds a launch."""
    names = " | ".join(f"{gpu.name} µs" for gpu in gpus)
    lines = [
        f"| {model.name} | of | a step | MB | GFLOP | {names} |",
        f"|---|---|---:|---:|---:|{'---:|' * len(gpus)}",
    ]
    for kernel, case, launches, cost in sheet(model):
        floors = " | ".join(f"{cost.microseconds(gpu):.2f}" for gpu in gpus)
        lines.append(
            f"| {kernel} | {case} | {launches} | {cost.num_bytes / 1e6:.2f} "
            f"| {cost.flops / 1e9:.2f} | {floors} |"
        )
    return "\n".join(lines)
