"""The least time that a step's parts can take on this machine, measured and not assumed.

GEMMs are those of the model: its shapes, weights prepacked, every layer's own so that they come
from memory as in a forward pass; by oneDNN or by our own kernel, whichever takes less time.
Attention and LoRA are their bytes at the bandwidth just measured, or their FLOPs at the rate of
those GEMMs, whichever takes longer; sampling reads its logits.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.models.decoder_config import DecoderConfig
from engine.ops import TorchOps, choose_ops
from engine.runner.padding import padded_rows

BYTES = 2  # of a bfloat16
HEAD = "head"


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What the arithmetic needs to know of a model."""

    hidden: int
    inner: int
    query: int
    kv: int
    """Outputs of the key projection, which are those of the value projection."""
    num_layers: int
    vocab_size: int

    @classmethod
    def of(cls, config: DecoderConfig) -> "ModelShapes":
        """Shapes of a model that the engine can run."""
        return cls(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            query=config.num_heads * config.head_dim,
            kv=config.num_kv_heads * config.head_dim,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
        )

    @property
    def projections(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Inputs and slices of a layer's four linears, as the engine fuses them."""
        return (
            (self.hidden, (self.query, self.kv, self.kv)),
            (self.query, (self.hidden,)),
            (self.hidden, (self.inner, self.inner)),
            (self.inner, (self.hidden,)),
        )

    @property
    def body_weights(self) -> int:
        """Elements of all layers' linears."""
        return self.num_layers * sum(n * sum(sizes) for n, sizes in self.projections)


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes."""

    rows: int
    """Tokens."""
    logit_rows: int
    """Tokens that sample."""
    context_tokens: int
    """Keys and values that attention reads, over all sequences."""
    scores: int
    """Pairs of a query and a key that it sees."""
    adapters: int = 0
    """Those that have rows."""
    adapter_rows: int = 0
    rank: int = 16


def gemm_name(in_features: int, out_features: int) -> str:
    """The part that a linear's time is charged to."""
    return f"GEMM {in_features}->{out_features}"


def kv_bytes(shapes: ModelShapes, load: Load) -> int:
    """Keys and values read once."""
    return BYTES * 2 * shapes.kv * shapes.num_layers * load.context_tokens


def attention_flops(shapes: ModelShapes, load: Load) -> int:
    """A product with the key and one with the value for each pair and head."""
    return 2 * 2 * shapes.query * shapes.num_layers * load.scores


def lora_weights(shapes: ModelShapes, rank: int) -> int:
    """Elements of one adapter on all linears."""
    per_layer = sum(len(sizes) * rank * n + rank * sum(sizes) for n, sizes in shapes.projections)
    return shapes.num_layers * per_layer


def lora_bytes(shapes: ModelShapes, load: Load) -> int:
    """Each active adapter's weights once; rows are in cache, the base's GEMM has just run."""
    return BYTES * lora_weights(shapes, load.rank) * load.adapters


def lora_flops(shapes: ModelShapes, load: Load) -> int:
    """By true rank."""
    return 2 * lora_weights(shapes, load.rank) * load.adapter_rows


class Gemm:
    """One linear with random weights, in each arrangement that the engine can run it in."""

    def __init__(self, in_features: int, out_features: int, generator: torch.Generator) -> None:
        weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
        self.name = gemm_name(in_features, out_features)
        self.in_features = in_features
        self.linears = [
            ops.make_linear(weight.to(torch.bfloat16))
            for ops in {ops.name: ops for ops in (TorchOps(), choose_ops())}.values()
        ]


class FloorMeter:
    """Times the model's GEMMs and the machine's memory, once a call."""

    def __init__(
        self, shapes: ModelShapes, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.shapes = shapes
        self._clock = clock
        self._layers = [
            [Gemm(n, sum(sizes), generator) for n, sizes in shapes.projections]
            for _ in range(shapes.num_layers)
        ]
        self._head = Gemm(shapes.hidden, shapes.vocab_size, generator)
        self._memory = torch.ones(2**26)

    @torch.inference_mode()
    def milliseconds(self, load: Load) -> dict[str, float]:
        """By part; one pass, so that callers can interleave passes with what they compare."""
        shapes = self.shapes
        rows = padded_rows(load.rows)
        taken: dict[str, float] = {}
        for place in range(len(shapes.projections)):
            gemms = [layer[place] for layer in self._layers]
            name = gemms[0].name
            taken[name] = taken.get(name, 0.0) + self._least(gemms, rows)
        flops_per_ms = 2 * shapes.body_weights * rows / sum(taken.values())
        taken[HEAD] = self._least([self._head], padded_rows(load.logit_rows))
        bytes_per_ms = self._memory.nbytes / self._timed(self._memory.sum)
        taken["attention"] = max(
            kv_bytes(shapes, load) / bytes_per_ms, attention_flops(shapes, load) / flops_per_ms
        )
        if load.adapters:
            taken["LoRA"] = max(
                lora_bytes(shapes, load) / bytes_per_ms, lora_flops(shapes, load) / flops_per_ms
            )
        taken["sample"] = BYTES * shapes.vocab_size * load.logit_rows / bytes_per_ms
        return taken

    def _least(self, gemms: Sequence[Gemm], rows: int) -> float:
        """All layers' GEMMs of one shape, in the fastest arrangement."""
        x = torch.randn(rows, gemms[0].in_features).to(torch.bfloat16)
        arrangements = zip(*(gemm.linears for gemm in gemms), strict=True)
        return min(sum(self._timed(lambda f=f: f(x)) for f in layers) for layers in arrangements)

    def _timed(self, work: Callable[[], object]) -> float:
        start = self._clock()
        work()
        return (self._clock() - start) / 1e6


def tokens_per_second(
    prompt_tokens: int,
    output_tokens: int,
    prefill_ms_per_token: float,
    decode_ms_per_token: float,
) -> float:
    """Output tokens a second of a saturated engine whose steps take these times."""
    busy = prompt_tokens * prefill_ms_per_token + output_tokens * decode_ms_per_token
    return 1e3 * output_tokens / busy
