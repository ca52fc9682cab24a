import random

import pytest

from engine.scheduling.block_manager import BlockManager
from engine.scheduling.prefix_hash import block_hash, cache_seed, extend_hashes


def _hash(number: int) -> bytes:
    return block_hash(b"", [number])


def test_free_blocks_stay_findable_until_reused_least_recently_freed_first():
    blocks = BlockManager(3, 4)
    tables = [blocks.allocate(1) for _ in range(3)]
    for number, table in enumerate(tables):
        blocks.publish(table[0], _hash(number), None)
    first, second, third = (table[0] for table in tables)
    blocks.free(tables[1])
    blocks.free(tables[0])
    assert blocks.match([_hash(1)]) == [second]
    assert blocks.allocate(1) == [second], "freed first, reused first"
    assert blocks.match([_hash(1)]) == []
    assert blocks.match([_hash(0)]) == [first] and blocks.match([_hash(2)]) == [third]


def test_blocks_without_a_published_hash_are_reused_before_cached_ones():
    blocks = BlockManager(2, 4)
    table = blocks.allocate(2)
    cached, plain = table
    blocks.publish(cached, _hash(1), None)
    blocks.free(table)
    assert blocks.allocate(1) == [plain]
    assert blocks.match([_hash(1)]) == [cached]


def test_a_prefix_hit_revives_a_free_block_and_shares_a_used_one():
    blocks = BlockManager(4, 4)
    first = blocks.allocate(2)
    blocks.publish(first[0], _hash(0), None)
    blocks.publish(first[1], _hash(1), None)
    shared = blocks.allocate(3, blocks.match([_hash(0), _hash(1)]))
    assert shared[:2] == first
    assert blocks.num_used == 3
    held = list(first)
    blocks.free(first)
    blocks.check_integrity([shared])
    blocks.free(shared)
    revived = blocks.match([_hash(0), _hash(1), _hash(2)])
    assert revived == held
    assert blocks.can_allocate(4, revived) and not blocks.can_allocate(5, revived)


def test_a_match_stops_at_the_first_block_that_is_gone():
    blocks = BlockManager(3, 4)
    table = blocks.allocate(3)
    for number in (0, 2):
        blocks.publish(table[number], _hash(number), None)
    assert blocks.match([_hash(0), _hash(1), _hash(2)]) == table[:1]


def test_the_first_of_two_equal_blocks_keeps_the_name():
    blocks = BlockManager(2, 4)
    table = blocks.allocate(2)
    blocks.publish(table[0], _hash(7), None)
    blocks.publish(table[1], _hash(7), None)
    assert blocks.match([_hash(7)]) == table[:1]
    assert blocks.num_published == 1
    blocks.check_integrity([table])


def test_a_fork_shares_full_blocks_and_copies_the_partial_one():
    blocks = BlockManager(5, 4)
    parent = blocks.allocate(2)
    child = blocks.fork(parent, 6)
    assert child is not None
    assert child[0] == parent[0] and child[1] != parent[1]
    blocks.check_integrity([parent, child])
    source = parent[1]
    blocks.free(parent)  # before the copy is made: its source must not be handed out
    assert source not in blocks.allocate(blocks.num_free)
    assert blocks.take_copies() == [(source, child[1])]
    assert blocks.take_copies() == []


def test_a_fork_at_a_block_boundary_copies_nothing():
    blocks = BlockManager(1, 4)
    parent = blocks.allocate(1)
    assert blocks.fork(parent, 4) == parent
    assert blocks.take_copies() == []


def test_a_fork_without_a_block_to_copy_into_changes_nothing():
    blocks = BlockManager(2, 4)
    parent = blocks.allocate(2)
    assert blocks.fork(parent, 6) is None
    blocks.check_integrity([parent])


def test_a_copy_is_cancelled_with_the_table_it_was_for():
    blocks = BlockManager(3, 4)
    parent = blocks.allocate(1)
    child = blocks.fork(parent, 2)
    assert child is not None
    blocks.free(child)
    assert blocks.take_copies() == []
    blocks.check_integrity([parent])


def test_growing_takes_blocks_only_when_needed_and_all_or_none():
    blocks = BlockManager(3, 4)
    table = blocks.allocate(1)
    assert blocks.grow(table, 4) and len(table) == 1
    assert blocks.grow(table, 5) and len(table) == 2
    assert not blocks.grow(table, 17) and len(table) == 2
    blocks.check_integrity([table])


def test_unloading_an_adapter_drops_its_prefixes_and_no_others():
    blocks = BlockManager(2, 4)
    table = blocks.allocate(2)
    blocks.publish(table[0], _hash(0), "a")
    blocks.publish(table[1], _hash(1), "b")
    blocks.free(table)
    blocks.forget_adapter("a")
    assert not blocks.match([_hash(0)]) and blocks.match([_hash(1)])
    blocks.check_integrity([])


def test_integrity_finds_a_leaked_and_a_doubly_held_block():
    blocks = BlockManager(2, 4)
    table = blocks.allocate(1)
    with pytest.raises(AssertionError):
        blocks.check_integrity([])
    with pytest.raises(AssertionError):
        blocks.check_integrity([table, table])


def test_random_tables_never_lose_or_share_a_block_by_mistake():
    rng = random.Random(0)
    blocks = BlockManager(20, 4)
    tables: list[list[int]] = []
    names = 0
    for _ in range(3000):
        action = rng.choice(["allocate", "grow", "fork", "publish", "free", "copies"])
        table = rng.choice(tables) if tables else None
        if action == "allocate":
            cached = blocks.match([_hash(rng.randrange(max(1, names)))])
            if blocks.can_allocate(len(cached) + 2, cached):
                tables.append(blocks.allocate(len(cached) + 2, cached))
        elif action == "copies":
            blocks.take_copies()
        elif table is None:
            continue
        elif action == "grow":
            blocks.grow(table, 4 * len(table) + rng.randrange(6))
        elif action == "fork":
            blocks.take_copies()  # only computed tables are forked
            child = blocks.fork(table, 4 * len(table) - 3)
            tables += [] if child is None else [child]
        elif action == "publish":
            names += 1
            blocks.publish(table[0], _hash(names), None)
        elif action == "free":
            tables.remove(table)
            blocks.free(table)
        blocks.check_integrity(tables)
    assert names > 100
    for table in tables:
        blocks.free(table)
    blocks.check_integrity([])
    assert blocks.num_free == 20


def test_seeds_differ_by_every_part_and_by_where_the_parts_end():
    parts = [
        ("t", None, ""), ("t", "a", ""), ("t", None, "a"), ("ta", None, ""), ("t", "b", ""),
        ("u", "a", ""), ("", "ta", ""), ("t", "a", "s"), ("t", "as", ""),
    ]  # fmt: skip
    assert len({cache_seed(*part) for part in parts}) == len(parts)


def test_a_block_hash_names_all_tokens_before_it_too():
    seed = cache_seed("t", None, "")

    def hashes(tokens: list[int], num_blocks: int) -> list[bytes]:
        chain: list[bytes] = []
        extend_hashes(chain, seed, tokens, 2, num_blocks)
        return chain

    assert hashes([1, 2, 3, 4], 2) == hashes([1, 2, 3, 4, 5], 2)
    assert hashes([1, 2, 3, 4], 2)[1] != hashes([1, 9, 3, 4], 2)[1]
    partial = hashes([1, 2, 3, 4], 1)
    extend_hashes(partial, seed, [1, 2, 3, 4], 2, 2)
    assert partial == hashes([1, 2, 3, 4], 2)
