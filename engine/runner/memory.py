"""How much memory there is, and how many KV blocks to take of it."""

from pathlib import Path

import psutil

from engine.errors import ConfigError

KV_SHARE = 0.25
"""Share of the available memory that becomes KV blocks, once the model is loaded."""

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes that this process may still take: the machine's, or its control group's if fewer."""
    machine = psutil.virtual_memory().available
    limits = [
        (cgroup / "memory.max", cgroup / "memory.current"),
        (cgroup / "memory/memory.limit_in_bytes", cgroup / "memory/memory.usage_in_bytes"),
    ]
    for limit_file, used_file in limits:
        limit, used = _read_bytes(limit_file), _read_bytes(used_file)
        if limit is not None and used is not None:
            # Page cache counts as used there; the kernel gives it back under pressure.
            reclaimable = _read_stat(limit_file.with_name("memory.stat"))
            return max(min(machine, limit - used + reclaimable), 0)
    return machine


def choose_num_kv_blocks(
    bytes_per_block: int,
    *,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    available: int,
) -> int:
    """KV blocks for a quarter of `available` bytes, but no more than all sequences can ever need.

    Raises ConfigError if those are fewer than 2.
    """
    longest = -(-max_model_len // block_size)
    blocks = min(int(available * KV_SHARE) // bytes_per_block, max_num_seqs * longest)
    if blocks < 2:
        raise ConfigError(
            f"too little memory for a KV cache: {available >> 20} MiB are available, a quarter of "
            f"that is for KV blocks, and a block takes {bytes_per_block >> 10} KiB"
        )
    return blocks


def check_num_kv_blocks(num_blocks: int, bytes_per_block: int, available: int) -> None:
    """Raise ConfigError if that many blocks cannot fit."""
    wanted = num_blocks * bytes_per_block
    if wanted > available:
        raise ConfigError(
            f"num_kv_blocks {num_blocks} would take {wanted >> 20} MiB, "
            f"{available >> 20} MiB are available"
        )


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _read_stat(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("inactive_file") or values.get("total_inactive_file") or 0)
