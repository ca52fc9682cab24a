"""The data directory as one start leaves it to the next."""

from pathlib import Path

from loraplex.supervisor.data_dir import open_data_dir


def test_what_killed_processes_left_half_made_goes_at_the_next_start(tmp_path: Path):
    with open_data_dir(tmp_path) as data:
        whole = data.cache / ("a" * 64)
        for folder in (
            whole,
            data.cache / ".placing-x1" / ("b" * 64),
            data.cache / ".removing-x2",
            data.uploads / "api-0" / "half",
        ):
            folder.mkdir(parents=True)
            (folder / "adapter_model.safetensors").write_bytes(b"weights")
    with open_data_dir(tmp_path) as data:
        assert list(data.cache.iterdir()) == [whole]
        assert (whole / "adapter_model.safetensors").read_bytes() == b"weights"
        assert list(data.uploads.iterdir()) == []
