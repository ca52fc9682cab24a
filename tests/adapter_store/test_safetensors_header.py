import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from adapter_store.errors import AdapterFormatError
from adapter_store.safetensors_header import DTYPE_BITS, read_header


def write(path: Path, header: Any, body: bytes = b"", *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + raw + body)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(path: Path, **kwargs: Any) -> AdapterFormatError:
    with pytest.raises(AdapterFormatError) as caught:
        read_header(path, **kwargs)
    return caught.value


def test_header_agrees_with_the_safetensors_package(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "a": torch.arange(4, dtype=torch.float32),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    data = path.read_bytes()
    assert header.file_size == len(data)
    assert header.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info = header.tensors[name]
        assert info.shape == tuple(tensor.shape)
        assert info.nbytes == tensor.numel() * DTYPE_BITS[info.dtype] // 8
        if tensor.numel():
            stored = torch.frombuffer(bytearray(data[info.begin : info.end]), dtype=tensor.dtype)
            assert torch.equal(stored, tensor.flatten())


@pytest.mark.parametrize(
    ("header", "body", "code", "field"),
    [
        ({"a": entry([2], 0, 8)}, b"\0" * 7, "truncated_file", "a"),
        ({"a": entry([2], 0, 8)}, b"\0" * 9, "invalid_header", None),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12, "invalid_header", "b"),
        ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"\0" * 12, "invalid_header", "b"),
        ({"a": entry([1], 4, 8)}, b"\0" * 8, "invalid_header", "a"),
        ({"a": entry([3], 0, 8)}, b"\0" * 8, "invalid_header", "a"),
        ({"a": entry([2], 8, 0)}, b"\0" * 8, "invalid_header", "a"),
        ({"a": entry([-2], 0, 8)}, b"\0" * 8, "invalid_header", "a"),
        ({"a": entry([2**47] * 16, 0, 8)}, b"\0" * 8, "invalid_header", "a"),
        ({"a": entry([1] * 17, 0, 4)}, b"\0" * 4, "invalid_header", "a"),
        ({"a": entry([10**60], 0, 8)}, b"\0" * 8, "invalid_header", "a"),
        ({"a": entry([2], 0, 8, "Q7")}, b"\0" * 8, "invalid_header", "a"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "invalid_header", "a"),
        ({"a": [1, 2]}, b"", "invalid_header", "a"),
        ({"a": entry([True], 0, 4)}, b"\0" * 4, "invalid_header", "a"),
        ({"__metadata__": {"a": 1}}, b"", "invalid_header", None),
        (b'{"a":{},"a":{}}', b"", "invalid_header", "a"),
        (b'{"a": NaN}', b"", "invalid_header", "a"),
        (b'{"\\ud800": {}}', b"", "invalid_header", "\\ud800"),
        (b"[]", b"", "invalid_header", None),
        (b"", b"", "invalid_header", None),
        (b"{" * 3, b"", "invalid_header", None),
        (b'{"a":' + b"[" * 100_000, b"", "invalid_header", None),
        (b"{\xff}", b"", "invalid_header", None),
        (b'{"a":' + b"9" * 5000 + b"}", b"", "invalid_header", None),
    ],
)
def test_a_faulty_header_is_refused_by_the_tensors_name(
    tmp_path: Path, header: Any, body: bytes, code: str, field: str | None
) -> None:
    error = refusal(write(tmp_path / "x", header, body))
    assert (error.code, error.field) == (code, field)


@pytest.mark.parametrize("content", [b"", b"\1\0\0", b"\0\0\0\0\0\0\0"])
def test_a_file_shorter_than_the_length_field_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    assert refusal(path).code == "truncated_file"


def test_a_header_longer_than_the_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "x", {}, length=2**63)).code == "truncated_file"


def test_a_header_over_the_cap_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x", b"{" + b" " * 5000 + b"}")
    assert refusal(path, max_header_bytes=5000).code == "header_too_large"
    assert read_header(path, max_header_bytes=5002).tensors == {}


def test_a_pickle_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    torch.save({"a": torch.zeros(3)}, path)
    assert refusal(path).code == "not_safetensors"
    torch.save({"a": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    assert refusal(path).code == "not_safetensors"


@pytest.mark.parametrize("length", [0x0280, 0x0480])
def test_a_length_that_begins_like_a_pickle_is_still_a_length(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "x", b"{}".ljust(length))
    assert path.read_bytes()[:2] in (b"\x80\x02", b"\x80\x04")
    assert read_header(path).tensors == {}


def test_names_in_messages_are_short_and_printable(tmp_path: Path) -> None:
    name = "\x1b[31m" + "n" * 10_000
    error = refusal(write(tmp_path / "x", {name: entry([1], 0, 3)}, b"\0" * 3))
    assert error.message.isprintable()
    assert error.field is not None
    assert len(error.field) < 250


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(data=st.data())
def test_any_damage_to_the_bytes_is_refused_or_harmless(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Random edits of a good file: a header as valid as before, or an AdapterFormatError."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(content) - 1))
        edit = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if edit == "set":
            content[where] = data.draw(st.integers(0, 255))
        elif edit == "cut":
            del content[where : where + data.draw(st.integers(1, 40))]
        else:
            content[where:where] = data.draw(st.binary(min_size=1, max_size=8))
        if not content:
            break
    path.write_bytes(content)
    try:
        header = read_header(path)
    except AdapterFormatError:
        return
    used = sum(info.nbytes for info in header.tensors.values())
    assert 8 + int.from_bytes(content[:8], "little") + used == header.file_size == len(content)
