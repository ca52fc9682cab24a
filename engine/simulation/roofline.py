"""The roofline: a step takes as long as its bytes or its operations do, whichever is longer.

Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures" (CACM 2009). A step reads all weights once, and the K/V of its rows' contexts.
"""

from dataclasses import dataclass

from engine.scheduled_batch import ScheduledBatch
from engine.simulation.model_shape import ModelShape
from engine.simulation.step_load import StepLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Peak rates of a data sheet, and the share of them that a good engine reaches."""

    name: str
    bandwidth: float
    """Bytes a second."""
    flops: float
    """Dense bfloat16 operations a second."""
    memory: float
    """Bytes."""
    source: str
    bandwidth_share: float = 0.80
    flops_share: float = 0.60
    step_overhead: float = 0.0005
    """Further seconds that every step takes: launches, scheduling, sampling."""

    @property
    def achieved_bandwidth(self) -> float:
        """Bytes a second."""
        return self.bandwidth_share * self.bandwidth

    @property
    def achieved_flops(self) -> float:
        """Operations a second."""
        return self.flops_share * self.flops

    @property
    def ridge(self) -> float:
        """Operations for each byte at which both limits meet; of the peaks, as they are quoted.

        A decode step does about as many for each byte of bfloat16 weights as it has rows: below a
        batch of this size it is bound by memory.

        >>> [f"{gpu.name} {gpu.ridge:.0f}" for gpu in GPUS]
        ['H100 295', 'H200 206', 'A100 153', 'L40S 419']
        """
        return self.flops / self.bandwidth


H100 = Gpu(
    name="H100", bandwidth=3.35e12, flops=989e12, memory=80e9,
    source="NVIDIA H100 data sheet, SXM5 (bf16 without sparsity)",
)  # fmt: skip
H200 = Gpu(
    name="H200", bandwidth=4.8e12, flops=989e12, memory=141e9,
    source="NVIDIA H200 data sheet, SXM (bf16 without sparsity)",
)  # fmt: skip
A100 = Gpu(
    name="A100", bandwidth=2.039e12, flops=312e12, memory=80e9,
    source="NVIDIA A100 data sheet, 80 GB SXM4 (bf16 without sparsity)",
)  # fmt: skip
L40S = Gpu(
    name="L40S", bandwidth=0.864e12, flops=362e12, memory=48e9,
    source="NVIDIA L40S data sheet (bf16 without sparsity)",
)  # fmt: skip
GPUS = (H100, H200, A100, L40S)


@dataclass(frozen=True, slots=True)
class RooflineStepTime:
    """Seconds of a step of `model` on `gpu`.

    `is_padded`: every row reads the longest prompt's and the longest output's context, as in a
    batch of padded sequences. `adapter_bytes`: of weights, read once for each different adapter.
    """

    model: ModelShape
    gpu: Gpu
    is_padded: bool = False
    adapter_bytes: int = 0

    def __call__(self, batch: ScheduledBatch) -> float:
        """See `StepTime`."""
        return self.seconds(StepLoad.of(batch))

    def seconds(self, load: StepLoad) -> float:
        """See `LoadTime`."""
        context = load.context
        if self.is_padded and load.num_tokens == load.num_rows:
            context = load.num_rows * (load.longest_prompt + load.longest_output)
        return self.of_sums(load.num_tokens, context, load.pairs, load.num_adapters)

    def of_sums(
        self, num_tokens: float, context: float, pairs: float, num_adapters: int = 0
    ) -> float:
        """A step of `num_tokens` that reads `context` positions and attends over `pairs`."""
        model, gpu = self.model, self.gpu
        num_bytes = model.weight_bytes + model.kv_bytes_per_token * context
        num_bytes += self.adapter_bytes * num_adapters
        # A score and its share of the output: two multiplications and additions a channel.
        attention = 4 * model.num_layers * model.attention_width * pairs
        num_operations = 2 * model.num_parameters * num_tokens + attention
        return gpu.step_overhead + max(
            num_bytes / gpu.achieved_bandwidth, num_operations / gpu.achieved_flops
        )

    def decode_seconds(self, batch: int, context: float) -> float:
        """A step of `batch` decodes, each with `context` positions.

        >>> from engine.simulation.model_shape import LLAMA_3_1_8B
        >>> for gpu in GPUS:
        ...     step = RooflineStepTime(LLAMA_3_1_8B, gpu).decode_seconds
        ...     print(f"{gpu.name:4} {[round(b / step(b, 1125)) for b in (1, 64, 256)]} tokens/s")
        H100 [153, 6391, 12440] tokens/s
        H200 [212, 8964, 17640] tokens/s
        A100 [96, 3967, 7645] tokens/s
        L40S [42, 1712, 3267] tokens/s
        """
        return self.of_sums(batch, batch * context, batch * context)

    def prefill_seconds(self, num_tokens: float) -> float:
        """A step that prefills one prompt."""
        return self.of_sums(num_tokens, num_tokens, num_tokens**2 / 2)
