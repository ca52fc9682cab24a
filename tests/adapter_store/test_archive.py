import io
import stat
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store.archive import extract_adapter
from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE
from adapter_store.errors import AdapterFormatError
from adapter_store.zip_layout import MAX_MEMBERS

CONFIG = b'{"peft_type": "LORA"}'
WEIGHTS = torch.randn(5000, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
MAX_BYTES = 50_000_000

Fill = Callable[[zipfile.ZipFile], None]


def make_zip(path: Path, fill: Fill, *, files: bool = True, folder: str = "") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        if files:
            archive.writestr(folder + CONFIG_FILE, CONFIG)
            archive.writestr(folder + WEIGHTS_FILE, WEIGHTS)
        fill(archive)
    return path


def nothing(_: zipfile.ZipFile) -> None:
    return


def writing(name: str, data: bytes = b"x") -> Fill:
    return lambda archive: archive.writestr(name, data)


def refusal(archive: Path, *, max_bytes: int = MAX_BYTES) -> AdapterFormatError:
    """The error, after a check that it came soon and left no file."""
    into = archive.parent / "into"
    into.mkdir()
    start = time.thread_time()
    with pytest.raises(AdapterFormatError) as caught:
        extract_adapter(archive, into, max_bytes=max_bytes)
    assert time.thread_time() - start < 2
    assert list(into.iterdir()) == []
    assert sorted(path.name for path in archive.parent.iterdir()) == [archive.name, "into"]
    return caught.value


@pytest.mark.parametrize("folder", ["", "my-adapter/"])
def test_the_two_files_come_out_as_they_went_in(folder: str, tmp_path: Path) -> None:
    def harmless(archive: zipfile.ZipFile) -> None:
        archive.writestr(f"{folder}README.md", "hello")
        archive.writestr(f"{folder}tokenizer.json", "{}")
        archive.writestr(f"__MACOSX/{folder}._{CONFIG_FILE}", "x")
        archive.writestr(f"{folder}adapter_model.bin", "never opened")
        archive.writestr(f"{folder}runs/1/events", "x")

    archive = make_zip(tmp_path / "a.zip", harmless, folder=folder)
    into = tmp_path / "into"
    into.mkdir()
    extracted = extract_adapter(archive, into, max_bytes=MAX_BYTES)
    assert extracted.config.read_bytes() == CONFIG
    assert extracted.weights.read_bytes() == WEIGHTS
    assert {path.name for path in into.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "a/../../evil",
        "/etc/passwd",
        "..",
        "C:\\evil",
        "C:evil",
        "..\\evil",
        "a\\b",
        "a//b",
        "./a",
        "a\0b",
        "a\nb",
        "a\u202eb",
        "n" * 300,
        CONFIG_FILE,
        CONFIG_FILE.upper(),
        "adapter_model.safetensor\u017f",
        "ADAPTER_model.safetensors",
        f"{WEIGHTS_FILE}/",
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_with_a_bad_or_a_twin_name_is_refused(name: str, tmp_path: Path) -> None:
    # ZipInfo would clean a name that writestr gets; what counts is what the file says.
    placeholder = "p" * len(name.encode())
    archive = make_zip(tmp_path / "a.zip", writing(placeholder))
    flagged = archive.read_bytes().replace(placeholder.encode(), name.encode())
    archive.write_bytes(_mark_utf8(flagged, name.encode()))
    error = refusal(archive)
    assert error.code == "unsafe_member"
    assert error.message.isprintable()


def _mark_utf8(content: bytes, name: bytes) -> bytes:
    """Set the flag `name is UTF-8` in the local header and the list entry of one member."""
    data = bytearray(content)
    for signature, flags_at, name_at in ((b"PK\3\4", 6, 30), (b"PK\1\2", 8, 46)):
        position = -1
        while (position := data.find(signature, position + 1)) >= 0:
            if data[position + name_at :].startswith(name):
                data[position + flags_at + 1] |= 0x08
    return bytes(data)


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK])
@pytest.mark.parametrize("name", ["link", WEIGHTS_FILE])
def test_links_and_devices_are_refused(kind: int, name: str, tmp_path: Path) -> None:
    info = zipfile.ZipInfo(name)
    info.external_attr = (kind | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(CONFIG_FILE, CONFIG)
        archive.writestr(info, "/etc/passwd")
    error = refusal(tmp_path / "a.zip")
    assert (error.code, error.field) == ("unsafe_member", name)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, "other"])
def test_encrypted_members_are_refused(name: str, tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", writing("other"))
    data = bytearray(archive.read_bytes())
    for signature, flags_at, name_at in ((b"PK\3\4", 6, 30), (b"PK\1\2", 8, 46)):
        position = -1
        while (position := data.find(signature, position + 1)) >= 0:
            if data[position + name_at :].startswith(name.encode()):
                data[position + flags_at] |= 1
    archive.write_bytes(data)
    error = refusal(archive)
    assert (error.code, error.field) == ("unsafe_member", name)


def test_a_thousandfold_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    bomb = bytes(40_000_000)
    archive = make_zip(tmp_path / "a.zip", writing(WEIGHTS_FILE, bomb), files=False)
    with zipfile.ZipFile(archive, "a") as more:
        more.writestr(CONFIG_FILE, CONFIG)
    assert archive.stat().st_size * 500 < len(bomb)
    error = refusal(archive)
    assert (error.code, error.field) == ("zip_bomb", WEIGHTS_FILE)


def test_a_nested_bomb_is_not_looked_into(tmp_path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(WEIGHTS_FILE, bytes(40_000_000))
        archive.writestr(CONFIG_FILE, CONFIG)
    outer = make_zip(tmp_path / "a.zip", writing("inner.zip", inner.getvalue()), files=False)
    assert refusal(outer).code == "missing_member"


def test_memory_stays_flat_while_a_large_member_is_unpacked(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=generator)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(CONFIG_FILE, CONFIG)
        with archive.open(WEIGHTS_FILE, "w") as member:
            for _ in range(40):
                member.write(noise.numpy().tobytes())
    into = tmp_path / "into"
    into.mkdir()
    tracemalloc.start()
    try:
        extract_adapter(tmp_path / "a.zip", into, max_bytes=200 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (into / WEIGHTS_FILE).stat().st_size == 40 << 20
    assert peak < 8 << 20


def test_files_over_the_cap_are_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", nothing)
    error = refusal(archive, max_bytes=len(WEIGHTS) + len(CONFIG) - 1)
    assert (error.code, error.field) == ("archive_too_large", WEIGHTS_FILE)
    (tmp_path / "exact").mkdir()
    extract_adapter(archive, tmp_path / "exact", max_bytes=len(WEIGHTS) + len(CONFIG))


def test_a_hundred_thousand_members_are_refused_at_once(tmp_path: Path) -> None:
    def fill(archive: zipfile.ZipFile) -> None:
        for number in range(MAX_MEMBERS):
            archive.writestr(f"f{number}", b"")

    archive = make_zip(tmp_path / "a.zip", fill)
    assert refusal(archive).code == "too_many_members"


@pytest.mark.parametrize("declared", [100_000 % 65536, 3])
def test_a_long_list_of_members_is_not_read_whatever_its_count_says(
    declared: int, tmp_path: Path
) -> None:
    """The size of the list is what `zipfile` goes by; the count of members may be any."""
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", *[0] * 9, 5, *[0] * 6) + b"a" * 5
    listing = entry * 100_000
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, declared, declared, len(listing), 0, 0)
    (tmp_path / "a.zip").write_bytes(listing + end)
    assert refusal(tmp_path / "a.zip").code == "too_many_members"


def test_zip64_lists_are_refused(tmp_path: Path) -> None:
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 46, 0, 0)
    locator = b"PK\6\7" + bytes(16)
    (tmp_path / "a.zip").write_bytes(bytes(100) + locator + end)
    assert refusal(tmp_path / "a.zip").code == "unsupported_archive"


@pytest.mark.parametrize(("field_at", "change"), [(24, -7), (24, 7), (20, -7), (20, 90_000)])
def test_false_sizes_are_refused(field_at: int, change: int, tmp_path: Path) -> None:
    """The list's uncompressed (24) and compressed (20) size of the weights, off by a little."""
    archive = make_zip(tmp_path / "a.zip", nothing)
    data = bytearray(archive.read_bytes())
    position = data.rfind(b"PK\1\2")
    (size,) = struct.unpack_from("<L", data, position + field_at)
    struct.pack_into("<L", data, position + field_at, size + change)
    archive.write_bytes(data)
    assert refusal(archive).code == "invalid_archive"


def test_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", nothing)
    data = bytearray(archive.read_bytes())
    data[data.rfind(b"PK\1\2") + 16] ^= 1
    archive.write_bytes(data)
    assert refusal(archive).code == "invalid_archive"


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(method: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr(CONFIG_FILE, CONFIG)
        archive.writestr(WEIGHTS_FILE, WEIGHTS)
    assert refusal(tmp_path / "a.zip").code == "unsupported_archive"


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    def fill(archive: zipfile.ZipFile) -> None:
        archive.writestr(CONFIG_FILE, CONFIG)
        archive.writestr("adapter_model.bin", b"\x80\x04")

    error = refusal(make_zip(tmp_path / "a.zip", fill, files=False))
    assert (error.code, error.field) == ("not_safetensors", "adapter_model.bin")


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ([], "missing_member"),
        ([CONFIG_FILE], "missing_member"),
        ([WEIGHTS_FILE], "missing_member"),
        ([f"a/b/{CONFIG_FILE}", f"a/b/{WEIGHTS_FILE}"], "missing_member"),
        ([f"a/{CONFIG_FILE}", WEIGHTS_FILE], "ambiguous_archive"),
        ([f"a/{CONFIG_FILE}", f"b/{WEIGHTS_FILE}"], "ambiguous_archive"),
        ([CONFIG_FILE, WEIGHTS_FILE, f"checkpoint-1/{CONFIG_FILE}"], "ambiguous_archive"),
    ],
)
def test_the_two_files_must_lie_together_and_once(
    members: list[str], code: str, tmp_path: Path
) -> None:
    def fill(archive: zipfile.ZipFile) -> None:
        for name in members:
            archive.writestr(name, CONFIG)

    assert refusal(make_zip(tmp_path / "a.zip", fill, files=False)).code == code


@pytest.mark.parametrize("content", [b"", b"PK", b"\x1f\x8b" + bytes(100), b"PK\3\4" + bytes(500)])
def test_what_is_no_zip_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(content)
    assert refusal(tmp_path / "a.zip").code == "not_a_zip"


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_damage_is_refused_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random edits: the two files as they went in, or an AdapterFormatError and no leftovers."""
    folder = tmp_path_factory.mktemp("damage")
    archive = make_zip(folder / "a.zip", writing("README.md", b"hello"))
    content = bytearray(archive.read_bytes())
    lists_from = content.find(b"PK\1\2")
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.sampled_from([0, lists_from, len(content) - 22]))
        where = data.draw(st.integers(start, min(start + 200, len(content) - 1)))
        content[where : where + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    archive.write_bytes(content)
    into = folder / "into"
    into.mkdir()
    try:
        extracted = extract_adapter(archive, into, max_bytes=MAX_BYTES)
    except AdapterFormatError:
        assert list(into.iterdir()) == []
    else:
        assert extracted.weights.read_bytes() == WEIGHTS
        assert extracted.config.read_bytes() == CONFIG
