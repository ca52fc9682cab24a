"""The block manager against a memory with contents: a table reads what its sequence wrote.

What is planned between two forward passes happens in the runner's order: copies, then writes,
then what is full is published. In between anything may be forked, freed and found.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.scheduling.block_manager import BlockManager
from engine.scheduling.prefix_hash import cache_seed, extend_hashes

SETTINGS = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
BLOCK_SIZE = 3
ADAPTERS = [None, "adapter"]
Content = tuple[str | None, tuple[int, ...]]
"""Adapter, and all tokens up to the one in the cell: what its K/V depends on."""


@dataclass(eq=False)
class Table:
    adapter: str | None
    tokens: list[int]
    blocks: list[int]
    num_written: int
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0

    def content(self, position: int) -> Content:
        return self.adapter, tuple(self.tokens[: position + 1])


class BlockMachine(RuleBasedStateMachine):
    happened: Counter[str]

    @initialize(num_blocks=st.integers(4, 16))
    def start(self, num_blocks):
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        self.cells: dict[tuple[int, int], Content] = {}
        self.tables: list[Table] = []

    @rule(
        adapter=st.sampled_from(ADAPTERS),
        prompt=st.sampled_from([[0] * 14, [0] * 6 + [1] * 8]),
        length=st.integers(1, 14),
        is_run=st.booleans(),
    )
    def allocate(self, adapter, prompt, length, is_run):
        tokens = prompt[:length]
        table = Table(adapter, tokens, [], 0)
        findable = (len(tokens) - 1) // BLOCK_SIZE
        self._extend_hashes(table, findable)
        cached = self.blocks.match(table.hashes)
        for index, block in enumerate(cached):
            end = (index + 1) * BLOCK_SIZE - 1
            assert self.cells[block, BLOCK_SIZE - 1] == table.content(end), "a false hit"
        num_blocks = self.blocks.blocks_for(len(tokens))
        num_revived = len(set(cached) & self._free_blocks())
        has_room = num_blocks - len(cached) + num_revived <= self.blocks.num_free
        assert self.blocks.can_allocate(num_blocks, cached) == has_room
        if not has_room:
            self.happened["no room"] += 1
            return
        num_published = self.blocks.num_published
        table.blocks = self.blocks.allocate(num_blocks, cached)
        table.num_written = len(cached) * BLOCK_SIZE
        table.num_published = len(cached)
        self.tables.append(table)
        self.happened["hit"] += bool(cached)
        self.happened["revived"] += bool(num_revived)
        self.happened["evicted"] += self.blocks.num_published < num_published
        if is_run:
            self.forward()

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK_SIZE))
    def grow(self, data, tokens):
        table = data.draw(st.sampled_from(self.tables))
        for token in tokens:
            num_free, size_before = self.blocks.num_free, len(table.blocks)
            if self.blocks.grow(table.blocks, len(table.tokens) + 1):
                table.tokens.append(token)
                assert len(table.blocks) == self.blocks.blocks_for(len(table.tokens))
            else:
                assert num_free == 0 and len(table.blocks) == size_before
                self.happened["cannot grow"] += 1
                break

    @precondition(lambda self: any(self._is_computed(t) for t in self.tables))
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from([t for t in self.tables if self._is_computed(t)]))
        has_partial = len(parent.tokens) % BLOCK_SIZE != 0
        forked = self.blocks.fork(parent.blocks, len(parent.tokens))
        if forked is None:
            assert has_partial and self.blocks.num_free == 0
            self.happened["cannot fork"] += 1
            return
        num_full = len(parent.tokens) // BLOCK_SIZE
        assert forked[:num_full] == parent.blocks[:num_full], "full blocks are shared"
        assert not set(forked[num_full:]) & set(parent.blocks), "the partial one is not"
        self.tables.append(
            Table(
                parent.adapter, list(parent.tokens), forked, parent.num_written,
                list(parent.hashes), parent.num_published,
            )
        )  # fmt: skip
        self.happened["copy on write" if has_partial else "fork at a boundary"] += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), others=st.booleans())
    def free(self, data, others):
        table = data.draw(st.sampled_from(self.tables))
        for freed in list(self.tables) if others else [table]:
            self._free(freed)

    def _free(self, table):
        self.tables.remove(table)
        pending = len(self.blocks._pending_copies)
        self.blocks.free(table.blocks)
        assert not table.blocks
        self.happened["copy called off"] += len(self.blocks._pending_copies) < pending

    @rule()
    def step(self):
        self.forward()

    def forward(self):
        """One step of the runner, then what the scheduler does with it."""
        copies = self.blocks.take_copies()
        read = [[self.cells.get((source, i)) for i in range(BLOCK_SIZE)] for source, _ in copies]
        for (_, destination), contents in zip(copies, read, strict=True):
            for offset, content in enumerate(contents):
                self.cells.pop((destination, offset), None)
                if content is not None:
                    self.cells[destination, offset] = content
        holders = Counter(block for table in self.tables for block in table.blocks)
        for table in self.tables:
            for position in range(table.num_written, len(table.tokens)):
                block = table.blocks[position // BLOCK_SIZE]
                assert holders[block] == 1, "a shared block is written"
                assert block not in self.blocks._published, "a published block is written"
                self.cells[block, position % BLOCK_SIZE] = table.content(position)
            table.num_written = len(table.tokens)
        for table in self.tables:
            num_full = len(table.tokens) // BLOCK_SIZE
            self._extend_hashes(table, num_full)
            for index in range(table.num_published, num_full):
                self.blocks.publish(table.blocks[index], table.hashes[index], table.adapter)
            table.num_published = num_full

    @rule(adapter=st.sampled_from(ADAPTERS[1:]))
    def forget_adapter(self, adapter):
        self.happened["forgotten"] += any(
            entry.adapter == adapter for entry in self.blocks._published.values()
        )
        self.blocks.forget_adapter(adapter)
        for table in self.tables:
            if table.adapter == adapter:
                assert self.blocks.match(table.hashes) == []

    @invariant()
    def tables_read_what_they_wrote(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity(table.blocks for table in self.tables)
        for table in self.tables:
            for position in range(table.num_written):
                block = table.blocks[position // BLOCK_SIZE]
                block = self.blocks._pending_copies.get(block, block)
                assert self.cells[block, position % BLOCK_SIZE] == table.content(position)

    def teardown(self):
        if not hasattr(self, "blocks"):
            return
        for table in self.tables:
            self.blocks.free(table.blocks)
        self.blocks.check_integrity([])
        assert self.blocks.num_free == self.blocks.num_blocks and not self.blocks.num_used
        assert self.blocks.take_copies() == []
        for adapter in ADAPTERS[1:]:
            self.blocks.forget_adapter(adapter)
        assert all(entry.adapter is None for entry in self.blocks._published.values())

    def _is_computed(self, table):
        """Only a sequence that has just been computed in full forks."""
        is_copied = not set(table.blocks) & self.blocks._pending_copies.keys()
        return table.num_written == len(table.tokens) and is_copied

    def _free_blocks(self):
        held = {block for table in self.tables for block in table.blocks}
        held |= set(self.blocks._pending_copies.values())
        return set(range(self.blocks.num_blocks)) - held

    def _extend_hashes(self, table, num_blocks):
        seed = cache_seed("t", table.adapter, "")
        extend_hashes(table.hashes, seed, table.tokens, BLOCK_SIZE, num_blocks)


def test_a_table_reads_what_its_sequence_wrote_whatever_is_shared_copied_freed_and_found():
    class Machine(BlockMachine):
        happened: ClassVar = Counter[str]()

    run_state_machine_as_test(Machine, settings=SETTINGS)
    for event in (
        "hit", "revived", "evicted", "no room", "cannot grow", "cannot fork", "copy on write",
        "fork at a boundary", "copy called off", "forgotten",
    ):  # fmt: skip
        assert Machine.happened[event] > 0, (event, Machine.happened)
