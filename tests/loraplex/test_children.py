from pathlib import Path

import msgspec

from engine.engine_args import EngineArgs
from loraplex.settings import EngineSettings, Settings, StorageSettings
from loraplex.supervisor.children import Service, api_payload
from loraplex.supervisor.listeners import listen


def test_an_api_process_starts_without_the_uploads_of_the_one_before(tmp_path: Path):
    settings = Settings(
        storage=StorageSettings(
            database_url="sqlite:////x.db",
            blobs_dir="b",
            cache_dir="c",
            uploads_dir=str(tmp_path),
            usage_dir="s",
        ),
        engine=EngineSettings(engine_socket="s", model_dir="m"),
    )
    args = EngineArgs(model_dir="m", socket_path="/s", cache_dir="c", generation=1)
    with listen("127.0.0.1", 0) as listener:
        payload = api_payload(Service(engine=args, api=settings, listener=listener), 0)
        first = msgspec.json.decode(payload(1), type=Settings)
        folder = Path(first.storage.uploads_dir)
        assert folder == tmp_path / "api-0"
        (folder / "tmp123").mkdir()
        (folder / "tmp123" / "weights.part").write_bytes(b"half an upload")
        (tmp_path / "api-1").mkdir()
        second = msgspec.json.decode(payload(2), type=Settings)
        assert second == first
        assert list(folder.iterdir()) == []
        assert (tmp_path / "api-1").is_dir()
