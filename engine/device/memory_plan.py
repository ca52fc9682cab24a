"""What a GPU's memory is used for: pure arithmetic, which is logged when an engine starts.

may use  =  utilization x all of the device
         -  what others use
         -  weights, activations, graphs, buffers, adapters   (measured, or by their shapes)
         =  KV cache                                 (in whole blocks)
"""

from dataclasses import dataclass

from engine.errors import ConfigError

GRAPH_BYTES = 8 * 2**20
"""The driver's share for each captured graph: an estimate, not measured."""
SPARE_BLOCKS = 2
"""Blocks of the KV cache beyond the scheduler's: one for padding, one that reads as zeros."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device says of itself, in bytes."""

    name: str
    total: int
    free: int
    """Not used by any process."""
    own: int
    """Used by this process: what PyTorch has reserved on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What has to fit; sizes are in bytes."""

    weights: int
    activations: int
    """Measured in a step of `max_num_batched_tokens` tokens, sampling included."""
    num_graphs: int
    graph_tensors: int
    """Shared by all graphs: activations of the largest decode step."""
    buffers: int
    """Tensors that keep their addresses: tables, partial sums and logits of decode steps, and the
    batches in which rows are laid out for adapters."""
    adapter_rows: int
    """Rank rows of each pool."""
    adapter_row_bytes: int
    """One rank row of every slice of every projection, A and B."""
    bytes_per_block: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_loras: int
    max_lora_rank: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine takes."""

    num_kv_blocks: int
    """The scheduler's; the cache has `SPARE_BLOCKS` more."""
    lines: tuple[str, ...]
    """The arithmetic, for a person."""

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)


def plan_memory(
    facts: DeviceFacts,
    needs: MemoryNeeds,
    *,
    utilization: float,
    num_kv_blocks: int | None = None,
) -> MemoryPlan:
    """Divide a device's memory; raises ConfigError, with the arithmetic, if it does not fit.

    `facts` may be taken before or after the KV cache and the pools are made. If `num_kv_blocks` is
    given it is only checked. Otherwise as many blocks are taken as fit, up to what all sequences at
    full length need; that one such sequence fits is required.
    """
    if not 0 < utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and up to 1, not {utilization}")
    allowed = int(facts.total * utilization)
    others = max(0, facts.total - facts.free - facts.own)
    graphs = needs.num_graphs * GRAPH_BYTES + needs.graph_tensors
    adapters = needs.adapter_rows * needs.adapter_row_bytes
    taken = needs.weights + needs.activations + graphs + needs.buffers + adapters
    left = allowed - others - taken
    one_sequence = -(-needs.max_model_len // needs.block_size)
    room = max(0, left) // needs.bytes_per_block - SPARE_BLOCKS
    blocks = num_kv_blocks or max(0, min(room, needs.max_num_seqs * one_sequence))
    lines = [
        describe(facts),
        _line(" ", allowed, "may be used", f"gpu_memory_utilization {utilization:g}"),
        _line("-", others, "others", "other processes, and the driver"),
        _line("-", needs.weights, "weights", ""),
        _line(
            "-",
            needs.activations,
            "activations",
            f"a step of {needs.max_num_batched_tokens} tokens, measured",
        ),
        _line("-", graphs, "graphs", f"{needs.num_graphs} of decode steps, estimated"),
        _line("-", needs.buffers, "buffers", "of decode steps, and of adapters' rows"),
        _line(
            "-",
            adapters,
            "adapters",
            f"{needs.max_loras} slots of rank {needs.max_lora_rank}: {needs.adapter_rows} rank "
            f"rows of {needs.adapter_row_bytes} bytes over all layers",
        ),
        _line("=", left, "left", ""),
        _line(
            " ",
            (blocks + SPARE_BLOCKS) * needs.bytes_per_block,
            "KV cache",
            f"{blocks} blocks of {needs.block_size} and {SPARE_BLOCKS} spare: "
            f"{blocks * needs.block_size} tokens, {blocks / one_sequence:.1f} sequences of "
            f"{needs.max_model_len}",
        ),
    ]
    if num_kv_blocks is None and blocks < one_sequence:
        raise ConfigError(
            "\n".join(
                [
                    f"not one sequence of max_model_len {needs.max_model_len} fits: it needs "
                    f"{one_sequence} KV blocks of {_size(needs.bytes_per_block)}, there are "
                    f"{blocks}. Lower max_model_len, max_num_batched_tokens, max_loras or "
                    "max_lora_rank, or raise gpu_memory_utilization.",
                    *lines,
                ]
            )
        )
    if blocks > room:
        raise ConfigError(
            "\n".join([f"num_kv_blocks {num_kv_blocks} do not fit: {max(0, room)} do.", *lines])
        )
    return MemoryPlan(blocks, tuple(lines))


def describe(facts: DeviceFacts) -> str:
    """What a device has, in a line."""
    return f"memory of {facts.name}: {_size(facts.total)}, of which {_size(facts.free)} are free"


def _line(sign: str, size: int, name: str, why: str) -> str:
    return f"{sign} {_size(size):>11}  {name:<12} {why}".rstrip()


def _size(size: int) -> str:
    if abs(size) >= 10 * 1024 * MIB:
        return f"{size / 2**30:.1f} GiB"
    if abs(size) >= MIB:
        return f"{size / MIB:.1f} MiB"
    return f"{size / 1024:.1f} KiB"
