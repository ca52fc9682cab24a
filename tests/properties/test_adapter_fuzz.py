"""Whatever is uploaded as an adapter is served or refused with a reason: nothing else happens."""

import io
import json
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapter_store.archive import extract_adapter
from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE
from adapter_store.errors import AdapterFormatError
from adapter_store.peft_config import PeftConfig
from adapter_store.peft_format import InspectedAdapter, inspect_adapter
from adapter_store.safetensors_header import DTYPE_BITS
from tests.support.service import BASE, adapter_files

FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
CONFIG, WEIGHTS = adapter_files()
FIELDS = sorted(
    {
        *PeftConfig.__struct_fields__, *json.loads(CONFIG), "init_lora_weights", "auto_mapping",
        "fan_in_fan_out", "layer_replication", "target_parameters", "megatron_config", "revision",
    }
)  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(
        ["q_proj", "all-linear", "LORA", "lora_only", "pissa", "(a+)+$", "[", ".*", ""]
    )
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def edits_of(size: int) -> st.SearchStrategy[list[tuple[int, int, bytes]]]:
    """(where, how many bytes go, what comes there), anywhere in `size` bytes."""
    edit = st.tuples(st.integers(0, size), st.sampled_from([0, 1, 1, 4, 64]), st.binary(max_size=6))
    return st.lists(edit, min_size=1, max_size=4)


def edited(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    for where, count, new in edits:
        data = data[:where] + new + data[where + count :]
    return data


def inspect(config: bytes, weights: bytes) -> InspectedAdapter | None:
    """None for one that is refused, with a code and a message."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        path.write_bytes(weights)
        try:
            return inspect_adapter(config, path, BASE, max_rank=8)
        except AdapterFormatError as error:
            assert error.code.isidentifier() and error.message.isprintable()
            assert len(error.message) < 2000
            return None


def test_the_adapter_that_all_others_are_made_of_is_served() -> None:
    assert inspect(CONFIG, WEIGHTS) is not None


@FUZZ
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), values, max_size=4))
@example({"rank_pattern": {"\ud800": 4}})
@example({"lora_alpha": 10**400})
@example({"layers_to_transform": [10**30], "layers_pattern": "layers"})
def test_any_field_of_a_config_may_hold_anything(changes: dict[str, Any]) -> None:
    inspect(json.dumps({**json.loads(CONFIG), **changes}).encode(), WEIGHTS)


@FUZZ
@given(edits_of(len(CONFIG)))
def test_any_bytes_of_a_config_may_be_other_ones(edits: list[tuple[int, int, bytes]]) -> None:
    inspect(edited(CONFIG, edits), WEIGHTS)


def with_header(change: Callable[[dict[str, Any]], None]) -> bytes:
    length = int.from_bytes(WEIGHTS[:8], "little")
    header: dict[str, Any] = json.loads(WEIGHTS[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + WEIGHTS[8 + length :]


names = st.text(max_size=12) | st.builds(
    "base_model.model.model.layers.{}.self_attn.{}.{}".format,
    st.sampled_from(["0", "1", "-1", "00", "9" * 30, "\u0663", "x"]),
    st.sampled_from(["q_proj", "k_proj", "rotary", ""]),
    st.sampled_from(
        [
            "lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_A.default.weight", "weight",
            "lora_magnitude_vector", "lora_embedding_A", "base_layer.weight",
        ]
    ),
)  # fmt: skip
shapes = st.lists(st.integers(-2, 2**50) | st.integers(0, 16), max_size=18)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "F99"]) | scalars,
        "shape": shapes | scalars,
        "data_offsets": st.lists(st.integers(-1, 600) | st.integers(), max_size=3) | scalars,
    }
)


@FUZZ
@given(st.dictionaries(names, entries | values, max_size=3), st.integers(0, 2))
def test_any_entry_of_a_safetensors_header_may_be_another(changes: Any, num_kept: int) -> None:
    def change(header: dict[str, Any]) -> None:
        for name in list(header)[num_kept:]:
            del header[name]
        header.update(changes)

    inspect(CONFIG, with_header(change))


@FUZZ
@given(
    st.sampled_from(["lora_A", "lora_B"]),
    st.sampled_from(["dtype", "shape", "data_offsets"]),
    st.sampled_from([*DTYPE_BITS]) | shapes | st.lists(st.integers(0, 600), max_size=3) | values,
)
def test_any_field_of_a_tensor_may_be_another(part: str, field: str, value: Any) -> None:
    def change(header: dict[str, Any]) -> None:
        name = next(name for name in header if part in name)
        header[name] = {**header[name], field: value}

    inspect(CONFIG, with_header(change))


@FUZZ
@given(edits_of(400) | edits_of(len(WEIGHTS)))
@example([(0, 8, b"\xff" * 8)])
@example([(0, 8, b"\0" * 8)])
def test_any_bytes_of_the_weights_may_be_other_ones(edits: list[tuple[int, int, bytes]]) -> None:
    inspect(CONFIG, edited(WEIGHTS, edits))


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


GOOD_ZIP = zipped({f"a/{CONFIG_FILE}": CONFIG, f"a/{WEIGHTS_FILE}": WEIGHTS, "README.md": b"text"})
DIRECTORY = GOOD_ZIP.index(b"PK\x01\x02")


def extract(archive: bytes) -> bool:
    """Whether it was taken; if not, nothing is left, and in any case nothing but the two files."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "in.zip").write_bytes(archive)
        (into := root / "out" / "deep").mkdir(parents=True)
        try:
            extract_adapter(root / "in.zip", into, max_bytes=1 << 20)
        except AdapterFormatError as error:
            assert error.code.isidentifier() and error.message.isprintable()
            assert not list(into.iterdir())
            taken = False
        else:
            assert {file.name for file in into.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
            taken = True
        assert sorted(p.name for p in root.iterdir()) == ["in.zip", "out"]
        assert [p.name for p in (root / "out").iterdir()] == ["deep"]
        return taken


def test_the_zip_that_all_others_are_made_of_is_taken() -> None:
    assert extract(GOOD_ZIP)


@FUZZ
@given(edits_of(len(GOOD_ZIP)))
def test_any_bytes_of_a_zip_may_be_other_ones(edits: list[tuple[int, int, bytes]]) -> None:
    extract(edited(GOOD_ZIP, edits))


@FUZZ
@given(edits_of(len(GOOD_ZIP) - DIRECTORY))
def test_any_bytes_of_its_list_of_members_may_be_other_ones(
    edits: list[tuple[int, int, bytes]],
) -> None:
    extract(GOOD_ZIP[:DIRECTORY] + edited(GOOD_ZIP[DIRECTORY:], edits))


@FUZZ
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
        | st.sampled_from(
            ["../x", "/etc/x", "a\\b", "c:x", "a//b", ".", CONFIG_FILE, f"b/{WEIGHTS_FILE}"]
        ),
        max_size=4,
        unique=True,
    ),
    st.sampled_from(
        [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
    ),
)
def test_a_zip_may_name_its_members_anything(others: list[str], method: int) -> None:
    members = {CONFIG_FILE: CONFIG, WEIGHTS_FILE: WEIGHTS}
    extract(zipped({**members, **{name: members.get(name, b"x") for name in others}}, method))


@FUZZ
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_anything_may_come_in_place_of_the_files(config: bytes, weights: bytes) -> None:
    assert inspect(config, weights) is None
    assert not extract(weights)


@FUZZ
@given(st.integers(0, GOOD_ZIP.index(b"PK\x05\x06")), st.binary(min_size=1, max_size=64))
@example(0, GOOD_ZIP)
@example(DIRECTORY, GOOD_ZIP)
def test_no_bytes_can_be_put_before_or_into_a_zip(where: int, more: bytes) -> None:
    assert not extract(GOOD_ZIP[:where] + more + GOOD_ZIP[where:])
