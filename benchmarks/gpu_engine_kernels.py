"""The engine's own kernels for `gpu_kernels.py`: attention, what lies beside it, and drawing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_cases import Rates
from engine.models.rotary import RotaryTable
from engine.runner.attention import AttentionShape
from engine.runner.kv_cache import KVShape
from engine.sampling.filters import min_p_, scale_by_temperature, top_k_top_p
from engine.sampling.noise import exponential_noise, stream_key
from engine.scheduled_batch import SamplingRow
from engine.triton.attention import AttentionPlan, TritonAttention
from engine.triton.kernel_costs import (
    CONTEXT,
    LLAMA_3_8B,
    PROMPT,
    QWEN_2_5_05B,
    Dimensions,
    KernelCost,
    Peaks,
)
from engine.triton.kv_cache import FP8, TritonKVCache
from engine.triton.ops import architecture_of
from engine.triton.query_tiles import TileMap, chunk_tiles, decode_tiles
from engine.triton.rotary import TritonRotation
from engine.triton.rows import activation_call, norm_call
from engine.triton.sampling_batch import RowPacker
from engine.triton.sampling_calls import sampling_calls
from engine.triton.tiles import Kind
from lora_kernels.kernel_call import KernelCall

COLUMNS = ("model", "kernel", "of", "us", "floor", "x floor")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest difference from float64 in attention over values of about 1."""
CHUNK = 4096


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Rows of a step: (cached positions, new tokens)."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    spans: tuple[tuple[int, int], ...]
    is_fp8: bool = False
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """A case's tensors; K and V of row i lie at [i, position] before they are stored."""

    attention: TritonAttention
    cache: TritonKVCache
    plan: AttentionPlan
    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Params:
    """`SamplingParams` without its library, which this benchmark does without."""

    seed: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logprobs: int | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[()] = ()


MIXED = ((0, 37), (300, 1), (130, 70), (0, 1), (15, 1), (1023, 2))
CHECKS = (
    AttentionCase("Llama", 32, 8, 128, MIXED),
    AttentionCase("Qwen", 14, 2, 64, MIXED),
    AttentionCase("80 channels, window", 8, 2, 80, MIXED, window=100),
    AttentionCase("256 channels, cap, window", 8, 4, 256, MIXED, window=64, softcap=50.0),
    AttentionCase("fp8", 8, 2, 128, MIXED, is_fp8=True),
)
DRAWS = (
    Params(temperature=0.0), Params(), Params(temperature=0.7, top_p=0.9), Params(top_k=40),
    Params(top_k=1000, top_p=0.95, min_p=0.01), Params(min_p=0.1, temperature=1.5),
)  # fmt: skip


def make_attention(
    case: AttentionCase,
    dtype: torch.dtype,
    device: str,
    architecture: int,
    *,
    batch_invariant: bool = False,
) -> AttentionWork:
    """Random tensors, in blocks in a random order; memory that is not used is poison."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    lengths = [start + new for start, new in case.spans]
    each = -(-max(lengths) // 16)
    kv_shape = KVShape(
        num_layers=1, num_kv_heads=case.kv_heads, head_dim=case.head_dim, block_size=16,
        dtype=FP8 if case.is_fp8 else dtype,
    )  # fmt: skip
    cache = TritonKVCache(kv_shape, each * len(lengths), device)
    cache._storage.fill_(0x7F if case.is_fp8 else float("nan"))
    if case.is_fp8:
        cache.set_scales(torch.full_like(cache.scales, 0.02))
    tables = np.random.default_rng(0).permutation(each * len(lengths)).reshape(len(lengths), each)
    shape = (len(lengths), max(lengths), case.kv_heads, case.head_dim)
    key, value = random(*shape), random(*shape)
    for row, length in enumerate(lengths):
        positions = np.arange(length)
        slots = torch.from_numpy(tables[row][positions // 16] * 16 + positions % 16).to(device)
        cache.write(0, key[row, :length], value[row, :length], slots)
    attention_shape = AttentionShape(
        num_heads=case.heads, num_kv_heads=case.kv_heads, head_dim=case.head_dim, block_size=16,
        windows=(None,), scale=case.head_dim**-0.5, softcap=case.softcap,
    )  # fmt: skip
    attention = TritonAttention(
        attention_shape, max_positions=max(lengths), device=device,
        batch_invariant=batch_invariant, architecture=architecture,
    )  # fmt: skip
    starts, new = (np.array(column) for column in zip(*case.spans, strict=True))
    first = np.cumsum(new) - new
    single, several = np.flatnonzero(new == 1), np.flatnonzero(new > 1)
    maps: list[tuple[Kind, TileMap]] = []
    if len(single):
        maps.append(("decode", decode_tiles(single, first[single], starts[single])))
    if len(several):
        rows = attention.tile("chunk", cache.layer(0)[0].dtype).rows
        parts = (several, first[several], new[several], starts[several])
        maps.append(("chunk", chunk_tiles(*parts, rows * case.kv_heads // case.heads)))
    tokens = int(new.sum())
    return AttentionWork(
        attention, cache, attention.plan_of(maps, tables, tokens),
        random(tokens, case.heads, case.head_dim), key, value,
    )  # fmt: skip


def exact_attention(case: AttentionCase, work: AttentionWork) -> Tensor:
    """The definition, in float64; keys and values as the cache rounds them."""
    out: list[Tensor] = []
    token = 0
    for row, (start, new) in enumerate(case.spans):
        length = start + new
        key, value = work.key[row, :length], work.value[row, :length]
        if case.is_fp8:
            key, value = ((part.float() / 0.02).to(FP8).double() * 0.02 for part in (key, value))
        group = case.heads // case.kv_heads
        key, value = (part.double().repeat_interleave(group, dim=1) for part in (key, value))
        query = work.query[token : token + new].double()
        scores = torch.einsum("qhd,khd->hqk", query, key) * case.head_dim**-0.5
        if case.softcap is not None:
            scores = (scores / case.softcap).tanh() * case.softcap
        seen = torch.arange(length, device=key.device)
        position = seen[start:, None]
        hidden = seen[None, :] > position
        if case.window is not None:
            hidden |= seen[None, :] <= position - case.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
        token += new
    return torch.cat(out)


def wrong_values(device: str, architecture: int | None = None) -> Iterator[str]:
    """Names of what differs from float64, or from the host's draws."""
    architecture = architecture or architecture_of(torch.device(device))
    for dtype in TOLERANCE:
        for case in CHECKS:
            if case.is_fp8 and dtype is torch.float32:
                continue  # an 8-bit cache is for 16-bit models
            for batch_invariant in (False, True):
                work = make_attention(
                    case, dtype, device, architecture, batch_invariant=batch_invariant
                )
                got = work.attention.attend(work.query, work.cache, 0, case.window, work.plan)
                difference = (got.double() - exact_attention(case, work)).abs().max().item()
                if not difference <= TOLERANCE[dtype]:
                    kind = "invariant " if batch_invariant else ""
                    yield f"{kind}attention, {case.name}, {dtype}: {difference:.1e}"
    drawn, expected = draws(device)
    if drawn != expected:
        yield f"draws: {drawn}, on the host {expected}"


def draws(device: str, vocab: int = 32768) -> tuple[list[int], list[int]]:
    """Tokens drawn on the device, and with PyTorch on the host."""
    logits = torch.randn(len(DRAWS), vocab, generator=torch.Generator().manual_seed(0)) * 3
    out = draw(logits.to(device), sampling_rows(DRAWS))
    expected: list[int] = []
    for scores, params in zip(logits, DRAWS, strict=True):
        if params.temperature == 0:
            expected.append(int(scores.argmax()))
            continue
        scaled = scale_by_temperature(scores[None], torch.tensor([params.temperature]))
        kept = top_k_top_p(
            scaled, torch.tensor([params.top_k]), torch.tensor([params.top_p]), vocab
        ).candidates
        min_p_(kept.scores, torch.tensor([params.min_p]))
        noise = exponential_noise([stream_key(params.seed, 0, 0)], kept.token_ids)
        expected.append(int(kept.token_ids[0, (noise / kept.scores.exp())[0].argmin()]))
    return out[:, 0].tolist(), expected


def sampling_rows(params: tuple[Params, ...]) -> list[SamplingRow]:
    """A first token for each."""
    return [SamplingRow(stand_in(one), (0,), [1], 1) for one in params]


def stand_in(params: Params) -> Any:
    """In the place of `SamplingParams`."""
    return params


def draw(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """[draws, 2] int32 on the device; waits for nothing."""
    packer = RowPacker(logits.shape[1], ())
    packed = packer.pack(len(rows), [packer.prepare(i, row) for i, row in enumerate(rows)])
    out = logits.new_zeros(len(rows), 2, dtype=torch.int32)
    token_ids = logits.new_zeros(len(rows), dtype=torch.int64)
    for call in sampling_calls(out, token_ids, logits, packed, CHUNK):
        call.run()
    return out


def measured(
    microseconds: Callable[[Callable[[], None]], float],
    rates: Rates,
    models: tuple[Dimensions, ...] = (LLAMA_3_8B, QWEN_2_5_05B),
    batches: tuple[int, ...] = (1, 32, 256),
    device: str = "cuda",
    architecture: int | None = None,
    context: int = CONTEXT,
    prompt: int = PROMPT,
) -> Iterator[list[str]]:
    """Rows of the table; `microseconds` times a function that can be captured."""
    architecture = architecture or architecture_of(torch.device(device))
    peaks = Peaks("measured", rates.bytes_per_second, rates.flops_per_second)
    for model in models:
        for of, run, name, cost in _works(model, batches, device, architecture, context, prompt):
            taken, floor = microseconds(run), cost.microseconds(peaks)
            yield [model.name, name, of, f"{taken:.1f}", f"{floor:.1f}", f"{taken / floor:.1f}"]


Work = tuple[str, Callable[[], None], str, KernelCost]
"""What of, what to time, the kernel's name and its least cost."""


def _works(
    model: Dimensions,
    batches: tuple[int, ...],
    device: str,
    architecture: int,
    context: int,
    prompt: int,
) -> Iterator[Work]:
    shape = (model.heads, model.kv_heads, model.head_dim)
    dtype = torch.bfloat16
    for batch in batches:
        of = f"{batch} x {context}"
        for is_fp8 in (False, True):
            case = AttentionCase("decode", *shape, ((context - 1, 1),) * batch, is_fp8)
            run = _attend(make_attention(case, dtype, device, architecture))
            cost = model.attention(batch, 1, context - 1, 1 if is_fp8 else 2)
            yield of, run, "attention, fp8" if is_fp8 else "attention", cost
        yield from _row_works(model, batch, device)
        logits = torch.randn(batch, model.vocab, device=device).to(dtype)
        yield f"{batch} rows", _draw(logits, Params()), "draw", model.draw(batch)
        narrow = _draw(logits, Params(top_p=0.9))
        yield f"{batch} rows", narrow, "draw, top-p", model.draw(batch, is_narrow=True)
    case = AttentionCase("prefill", *shape, ((0, prompt),))
    run = _attend(make_attention(case, dtype, device, architecture))
    yield f"{prompt} tokens", run, "attention", model.attention(1, prompt, 0)
    yield from _row_works(model, prompt, device)


def _row_works(model: Dimensions, rows: int, device: str) -> Iterator[Work]:
    of = f"{rows} rows"
    x, update = (
        torch.randn(rows, model.hidden, device=device).to(torch.bfloat16) for _ in range(2)
    )
    weight, out = torch.ones_like(x[0]), torch.empty_like(x)
    yield of, norm_call(out, x, update, weight, 1e-5).run, "add and norm", model.add_and_norm(rows)
    gate_up = torch.randn(rows, 2 * model.inner, device=device).to(torch.bfloat16)
    active = gate_up.new_empty(rows, model.inner)
    yield of, activation_call(active, gate_up, "silu").run, "activate", model.activate(rows)
    half = model.head_dim // 2
    table = RotaryTable(tuple([0.5] * half), 1.0, 64)
    table.cos, table.sin = table.cos.to(device), table.sin.to(device)
    rotation = TritonRotation(table, torch.zeros(rows, dtype=torch.int64, device=device))
    heads = gate_up.new_ones(rows, model.heads + 2 * model.kv_heads, model.head_dim)
    kv_shape = KVShape(
        num_layers=1, num_kv_heads=model.kv_heads, head_dim=model.head_dim, block_size=16,
        dtype=torch.bfloat16,
    )  # fmt: skip
    cache = TritonKVCache(kv_shape, -(-rows // 16), device)
    slots = torch.arange(rows, device=device)
    call = rotation.store_call(heads, model.heads, cache, 0, slots, None)
    yield of, call.run, "rotate and store", model.rotate_and_store(rows)


def _attend(work: AttentionWork) -> Callable[[], None]:
    out = work.query.new_empty(work.query.shape[0], work.query.shape[1] * work.query.shape[2])
    calls = list(work.attention.calls(out, work.query, work.cache, 0, None, work.plan))
    return _runs(calls)


def _draw(logits: Tensor, params: Params) -> Callable[[], None]:
    rows = sampling_rows((params,) * len(logits))
    packer = RowPacker(logits.shape[1], ())
    packed = packer.pack(len(rows), [packer.prepare(i, row) for i, row in enumerate(rows)])
    out = logits.new_zeros(len(rows), 2, dtype=torch.int32)
    token_ids = logits.new_zeros(len(rows), dtype=torch.int64)
    calls = list(sampling_calls(out, token_ids, logits, packed, CHUNK))
    return _runs(calls)


def _runs(calls: list[KernelCall]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call.run()

    return run
