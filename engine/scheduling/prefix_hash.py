"""Names of KV blocks by content: what may be shared has the same hash, and nothing else has.

K and V depend on every token before them and on the adapter, so a block's hash is chained to its
predecessor's and the chain starts at a seed of tenant and adapter. Python's `hash` would not do:
tenants choose the tokens, and 64 bits can be made to collide.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from hashlib import sha256


def cache_seed(tenant: str, adapter: str | None, cache_salt: str) -> bytes:
    """Start of a hash chain: SHA-256 over the length-prefixed parts; `base` for no adapter."""
    seed = sha256()
    for part in (tenant, adapter or "base", cache_salt):
        encoded = part.encode()
        seed.update(len(encoded).to_bytes(8, "little"))
        seed.update(encoded)
    return seed.digest()


def block_hash(parent: bytes, token_ids: SequenceOf[int]) -> bytes:
    """Hash of a full block: SHA-256 over its predecessor's hash and its token ids."""
    return sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_hashes(
    hashes: list[bytes], seed: bytes, token_ids: SequenceOf[int], block_size: int, num_blocks: int
) -> None:
    """Append to `hashes` until it names the first `num_blocks` full blocks of `token_ids`."""
    for index in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else seed
        start = index * block_size
        hashes.append(block_hash(parent, token_ids[start : start + block_size]))
