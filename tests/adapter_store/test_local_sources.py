"""References to folders of the service's own machine."""

import os
from pathlib import Path

import pytest

from adapter_store.references.policy import SourcePolicy
from adapter_store.references.sources import AdapterSources
from tests.support.source_calls import CONFIG, WEIGHTS, fetch, refused

pytestmark = pytest.mark.anyio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root" / "one"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_bytes(CONFIG)
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (folder / "adapter_model.bin").write_bytes(b"a pickle")
    return tmp_path / "root"


async def test_files_under_a_root_are_copied_for_admins_only(root: Path, tmp_path: Path):
    sources = AdapterSources(SourcePolicy(), roots=[root])
    text = f"file://{root}/one"
    fetched = await fetch(sources, text, tmp_path / "a", is_admin=True)
    assert (fetched.config, fetched.weights.read_bytes()) == (CONFIG, WEIGHTS)
    assert fetched.weights.parent == tmp_path / "a"
    assert sorted(os.listdir(tmp_path / "a")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (await refused(sources, text, tmp_path / "b")).code == "source_not_allowed"
    without = AdapterSources(SourcePolicy())
    error = await refused(without, text, tmp_path / "b", is_admin=True)
    assert error.code == "source_not_allowed"
    error = await refused(sources, text, tmp_path / "b", is_admin=True, max_bytes=len(WEIGHTS))
    assert error.code == "source_too_large"


async def test_links_are_followed_within_the_root_and_never_out_of_it(root: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "adapter_config.json").write_bytes(CONFIG)
    (outside / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (root / "inner-link").symlink_to(root / "one")
    (root / "outer-link").symlink_to(outside)
    (root / "file-link").mkdir()
    (root / "file-link" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (root / "circle").symlink_to(root / "circle")
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / "adapter_config.json")
    (root / "folder").mkdir()
    (root / "folder" / "adapter_config.json").mkdir()
    (tmp_path / "root2").symlink_to(outside)  # shares the root's name as a prefix
    sources = AdapterSources(SourcePolicy(), roots=[root])
    await fetch(sources, f"file://{root}/inner-link", tmp_path / "a", is_admin=True)
    for number, (folder, code) in enumerate(
        {
            f"{root}/outer-link": "source_not_allowed",
            f"{root}/file-link": "source_not_allowed",
            f"{root}2": "source_not_allowed",
            str(outside): "source_not_allowed",
            f"{root}/circle": "source_not_found",
            f"{root}/pipe": "source_not_found",
            f"{root}/folder": "source_not_found",
            f"{root}/none": "source_not_found",
            "/etc": "source_not_allowed",
            "/no-such-folder": "source_not_allowed",  # nothing tells what there is elsewhere
        }.items()
    ):
        error = await refused(sources, f"file://{folder}", tmp_path / f"b{number}", is_admin=True)
        assert error.code == code, folder
        assert "adapter_model" not in str(error)


async def test_a_link_that_is_put_in_the_way_meanwhile_is_not_followed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "adapter_config.json").write_bytes(b"a secret")
    real = Path.resolve

    def resolve_then_swap(self: Path, strict: bool = False) -> Path:
        found = real(self, strict=strict)
        if self.name == "adapter_config.json":
            (root / "one").rename(root / "moved")
            (root / "one").symlink_to(outside)
        return found

    monkeypatch.setattr(Path, "resolve", resolve_then_swap)
    sources = AdapterSources(SourcePolicy(), roots=[root])
    error = await refused(sources, f"file://{root}/one", tmp_path / "a", is_admin=True)
    assert error.code == "source_not_found"
