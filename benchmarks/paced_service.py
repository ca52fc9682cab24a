"""The service as `loraplex serve` runs it, with `benchmarks.paced_engine` in the engine's place."""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import anyio
import httpx
import msgspec
import psutil

from loraplex.database import upgrade
from loraplex.settings import AuthSettings, EngineSettings, Settings, StorageSettings
from loraplex.supervisor.listeners import listen

ROOT = Path(__file__).parents[1]
ADAPTER = ROOT / "examples" / "adapters" / "intents"
START_SECONDS = 60.0


@dataclass(frozen=True)
class PacedService:
    """One engine process and one API process; a tenant with a key and the adapter `intents`."""

    port: int
    key: str
    digest: str
    """The adapter's."""
    engine_socket: Path
    engine: psutil.Process
    api: psutil.Process


@contextlib.contextmanager
def paced_service(
    model_dir: Path, step_seconds: float, *, has_whole_steps: bool = False
) -> Generator[PacedService]:
    """See `benchmarks.paced_engine` for its steps."""
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="lp-", dir="/tmp"))
        root = Path(name)
        admin_key = secrets.token_urlsafe(32)
        settings = _settings(root, model_dir, admin_key)
        anyio.run(upgrade, settings.storage.database_url)
        listener = stack.enter_context(listen("127.0.0.1", 0))
        log = stack.enter_context((root / "log").open("wb"))
        engine_args = msgspec.json.encode(
            {
                "model_dir": str(model_dir),
                "socket_path": settings.engine.engine_socket,
                "cache_dir": settings.storage.cache_dir,
                "generation": 1,
            }
        )
        pace = [str(step_seconds), *["whole"] * has_whole_steps]
        engine = stack.enter_context(_process(["benchmarks.paced_engine", *pace], engine_args, log))
        descriptor = listener.fileno()
        pulse = stack.enter_context(open(os.devnull, "wb"))  # nobody watches for signs of life
        api = stack.enter_context(
            _process(
                ["loraplex.api_process", str(descriptor), "1", str(pulse.fileno())],
                msgspec.json.encode(settings),
                log,
                descriptor,
                pulse.fileno(),
            )
        )
        port = int(listener.getsockname()[1])
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            _wait_ready(http, root / "log")
            http.headers["authorization"] = f"Bearer {admin_key}"
            key, digest = _register(http)
        yield PacedService(
            port, key, digest, Path(settings.engine.engine_socket), psutil.Process(engine.pid),
            psutil.Process(api.pid),
        )  # fmt: skip


def _settings(root: Path, model_dir: Path, admin_key: str) -> Settings:
    for name in ("blobs", "cache", "uploads", "usage"):
        (root / name).mkdir(mode=0o700)
    return Settings(
        storage=StorageSettings(
            database_url=f"sqlite+aiosqlite:///{root / 'registry.db'}",
            blobs_dir=str(root / "blobs"),
            cache_dir=str(root / "cache"),
            uploads_dir=str(root / "uploads"),
            usage_dir=str(root / "usage"),
        ),
        engine=EngineSettings(engine_socket=str(root / "engine.sock"), model_dir=str(model_dir)),
        auth=AuthSettings(admin_key=admin_key),
    )


@contextlib.contextmanager
def _process(
    arguments: list[str], document: bytes, log: IO[bytes], *descriptors: int
) -> "Generator[subprocess.Popen[bytes]]":
    paths = os.pathsep.join((str(ROOT), str(ROOT / "platform")))
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=log, stderr=log,
        pass_fds=descriptors, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    try:
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(document)
        yield process
    finally:
        process.terminate()
        process.wait()


def _wait_ready(http: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/health/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the service did not start:\n{log.read_text(errors='replace')}")


def _register(http: httpx.Client) -> tuple[str, str]:
    http.post("/admin/tenants", json={"name": "acme"}).raise_for_status()
    key = http.post("/admin/tenants/acme/keys", json={}).raise_for_status().json()["key"]
    uploaded = http.post(
        "/t/acme/v1/adapters",
        data={"name": ADAPTER.name},
        files={
            "config": (ADAPTER / "adapter_config.json").read_bytes(),
            "weights": (ADAPTER / "adapter_model.safetensors").read_bytes(),
        },
    ).raise_for_status()
    return str(key), str(uploaded.json()["digest"])
