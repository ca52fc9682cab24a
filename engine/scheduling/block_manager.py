"""Which KV blocks are whose: reference counts, the free list, and the prefix cache's index.

Knows block ids and hashes, never tensors. A block is free exactly when nothing references it; a
free block with a published hash stays findable until it is handed out again.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple


class PublishedBlock(NamedTuple):
    """What a block with a published hash holds. Such a block is never written."""

    hash: bytes
    adapter: str | None


class BlockManager:
    """A fixed pool of blocks of `block_size` tokens; every operation is O(blocks it touches)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        # In the order of reuse. An OrderedDict removes from the middle (a prefix hit) in O(1).
        self._free = OrderedDict[int, None].fromkeys(range(num_blocks))
        self._published: dict[int, PublishedBlock] = {}
        self._block_by_hash: dict[bytes, int] = {}
        self._pending_copies: dict[int, int] = {}  # destination -> source, both referenced

    @property
    def num_free(self) -> int:
        """Blocks that nothing references, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that something references."""
        return self.num_blocks - len(self._free)

    @property
    def num_published(self) -> int:
        """Blocks that the prefix cache can find."""
        return len(self._published)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, hashes: SequenceOf[bytes]) -> list[int]:
        """The longest run of published blocks that `hashes` starts with."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_allocate(self, num_blocks: int, cached: SequenceOf[int] = ()) -> bool:
        """Whether there are blocks for a table of `num_blocks` that starts with `cached`."""
        revived = sum(1 for block in cached if not self._references[block])
        return num_blocks - len(cached) + revived <= len(self._free)

    def allocate(self, num_blocks: int, cached: SequenceOf[int] = ()) -> list[int]:
        """A block table of `num_blocks`: the cached ones shared, the rest fresh."""
        for block in cached:
            self._reference(block)
        return [*cached, *(self._take_free() for _ in range(num_blocks - len(cached)))]

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend a table to hold `num_tokens`; False, and no change, if blocks are lacking."""
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > len(self._free):
            return False
        table.extend(self._take_free() for _ in range(missing))
        return True

    def fork(self, table: SequenceOf[int], num_tokens: int) -> list[int] | None:
        """A second table over the same `num_tokens`: full blocks shared, the partial one copied.

        The caller makes the copy before the next forward pass (see `take_copies`). None, and no
        change, if there is no block to copy into.
        """
        num_full, num_partial_tokens = divmod(num_tokens, self.block_size)
        if num_partial_tokens and not self._free:
            return None
        child = list(table[:num_full])
        for block in child:
            self._reference(block)
        if num_partial_tokens:
            source, copy = table[num_full], self._take_free()
            # The source must outlive its sequence until it has been read.
            self._reference(source)
            self._pending_copies[copy] = source
            child.append(copy)
        return child

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) pairs to copy before the next forward pass, handed out once."""
        copies = [(source, copy) for copy, source in self._pending_copies.items()]
        self._pending_copies.clear()
        for source, _ in copies:
            self._dereference(source)
        return copies

    def free(self, table: list[int]) -> None:
        """Give up a table and empty it.

        Its last blocks are reused first, so that prefixes stay findable longer.
        """
        while table:
            self._dereference(table.pop())

    def publish(self, block: int, block_hash: bytes, adapter: str | None) -> None:
        """Make a full, computed block findable; the first of two equal blocks keeps the name."""
        if block not in self._published and block_hash not in self._block_by_hash:
            self._published[block] = PublishedBlock(block_hash, adapter)
            self._block_by_hash[block_hash] = block

    def forget_adapter(self, adapter: str) -> None:
        """Drop an unloaded adapter's prefixes. O(published blocks): unloading is rare."""
        for block in [b for b, entry in self._published.items() if entry.adapter == adapter]:
            self._unpublish(block)

    def _reference(self, block: int) -> None:
        if not self._references[block]:
            del self._free[block]
        self._references[block] += 1

    def _dereference(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        self._free[block] = None
        if block not in self._published:
            self._free.move_to_end(block, last=False)  # nothing to find in it: reuse it first
        source = self._pending_copies.pop(block, None)
        if source is not None:
            self._dereference(source)

    def _take_free(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._unpublish(block)
        self._references[block] = 1
        return block

    def _unpublish(self, block: int) -> None:
        entry = self._published.pop(block, None)
        if entry is not None:
            del self._block_by_hash[entry.hash]

    def check_integrity(self, tables: Iterable[SequenceOf[int]]) -> None:
        """Raise AssertionError unless exactly `tables` hold blocks, and the hashes agree."""
        expected: Counter[int] = Counter(self._pending_copies.values())
        for table in tables:
            assert len(set(table)) == len(table), f"a block twice in {table}"
            expected.update(table)
        for block, references in enumerate(self._references):
            assert references == expected[block], f"block {block}: {references} references"
            assert (block in self._free) == (references == 0), f"block {block}: free and used"
        assert len(self._published) == len(self._block_by_hash), "two hashes for a block"
        for block_hash, block in self._block_by_hash.items():
            assert self._published[block].hash == block_hash, f"block {block}: wrong hash"
        for copy in self._pending_copies:
            assert self._references[copy] == 1, f"copy into block {copy}, which is shared"
