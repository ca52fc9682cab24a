import psutil
import pytest

from engine.errors import ConfigError
from engine.runner.memory import available_bytes, check_num_kv_blocks, choose_num_kv_blocks

GIB = 1 << 30


def test_without_a_control_group_the_machine_counts(tmp_path):
    machine = psutil.virtual_memory()
    assert 0 < available_bytes(tmp_path) <= machine.total


@pytest.mark.parametrize(
    ("limit", "used", "stat"),
    [
        ("memory.max", "memory.current", "inactive_file 3000"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "inactive_file 1\ntotal_inactive_file 3000",
        ),
    ],
    ids=["v2", "v1"],
)
def test_a_control_groups_limit_counts_where_it_is_less(tmp_path, limit, used, stat):
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("10000\n")
    (tmp_path / used).write_text("9000\n")
    assert available_bytes(tmp_path) == 1000
    (tmp_path / limit).with_name("memory.stat").write_text(stat.replace("inactive_file 1\n", ""))
    assert available_bytes(tmp_path) == 4000
    (tmp_path / used).write_text("20000\n")
    assert available_bytes(tmp_path) == 0


def test_a_control_group_without_limit_does_not_count(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("9000\n")
    assert available_bytes(tmp_path) > GIB // 64


def choose(available: int, **changes: int) -> int:
    settings = {"block_size": 16, "max_num_seqs": 4, "max_model_len": 100} | changes
    return choose_num_kv_blocks(1 << 20, available=available, **settings)


def test_kv_blocks_take_a_quarter_of_the_memory_and_no_more_than_is_useful():
    assert choose(80 << 20) == 20
    assert choose(64 * GIB) == 4 * 7


def test_too_little_memory_for_any_cache_is_refused():
    with pytest.raises(ConfigError, match="too little memory for a KV cache: 7 MiB"):
        choose(7 << 20)


def test_more_blocks_than_memory_are_refused():
    check_num_kv_blocks(10, 1 << 20, 10 << 20)
    with pytest.raises(ConfigError, match="num_kv_blocks 11 would take 11 MiB, 10 MiB"):
        check_num_kv_blocks(11, 1 << 20, 10 << 20)
