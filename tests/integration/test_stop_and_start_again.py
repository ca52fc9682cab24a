"""A service that is stopped while an adapter loads, and one that starts again with less.

The file system plays a slow disk: an adapter's config in the blob store is a pipe, which whoever
reads it waits for.
"""

import json
import signal
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loraplex.cli.api_client import ApiClient
from loraplex.demo.service import DemoService, demo_service
from tests.support.pipes import Pipe
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ENGINE = [
    "--dtype", "float32", "--max-num-seqs", "4", "--max-loras", "4", "--threads", "1",
    "--num-kv-blocks", "256", "--drain-seconds", "1",
]  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "late": {"seed": 1},
    "never": {"seed": 2},
    "with-a-head": {"modules_to_save": ["lm_head"]},
    "of-high-rank": {"r": 16},
}


@dataclass(frozen=True, slots=True)
class Tenant:
    """Calls of the tenant `acme`, made by the admin."""

    service: DemoService

    def http(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.service.url, timeout=60,
            headers={"authorization": f"Bearer {self.service.admin_key}"},
        )  # fmt: skip

    def ask(self, model: str, **fields: Any) -> tuple[int, str | None]:
        """The status; and the code of an error, also of one that ends a stream."""
        asked = {"model": model, "prompt": [1, 2, 3], "max_tokens": 2, **fields}
        with self.http() as http:
            reply = http.post("/t/acme/v1/completions", json=asked)
        if not fields.get("stream"):
            return reply.status_code, reply.json().get("error", {}).get("code")
        events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        code = None if events[-1] == "[DONE]" else json.loads(events[-1])["error"]["code"]
        return reply.status_code, code

    def versions(self) -> dict[str, str]:
        """The state of each adapter's only version."""
        with self.http() as http:
            return {
                name: http.get(f"/t/acme/v1/adapters/{name}/versions").json()["data"][0]["state"]
                for name in ADAPTERS
            }


@dataclass(frozen=True, slots=True)
class Stop:
    """How a stop went that came while two calls waited for an adapter to load."""

    streamed: tuple[int, str | None]
    plain: tuple[int, str | None]
    exit_code: int
    alive: list[psutil.Process]
    log: str


def stop_while_it_loads(
    service: DemoService, name: str, meanwhile: Callable[[], None] = lambda: None
) -> Stop:
    tenant = Tenant(service)
    children = psutil.Process(service.process.pid).children(recursive=True)
    with ThreadPoolExecutor(2) as pool:
        calls: list[Future[tuple[int, str | None]]] = [
            pool.submit(tenant.ask, name, stream=stream) for stream in (True, False)
        ]
        with tenant.http() as http:

            def is_loading() -> bool:
                stats = http.get("/admin/engine").json()
                causes = {queue["cause"] for queue in stats["queues"]}
                return stats["waiting"] == 2 and causes == {"load"}

            until(is_loading)
        service.process.send_signal(signal.SIGTERM)
        streamed, plain = (call.result(60) for call in calls)
    meanwhile()
    exit_code = service.process.wait(30)
    _, alive = psutil.wait_procs(children, timeout=30)
    return Stop(streamed, plain, exit_code, alive, service.log.read_text())


@dataclass(frozen=True, slots=True)
class Stopped:
    """A service that was stopped while `late` loaded, and what it left."""

    model_dir: Path
    data_dir: Path
    digests: dict[str, str]
    stop: Stop

    def config_of(self, name: str) -> Path:
        return config_of(self.data_dir, self.digests[name])


def config_of(data_dir: Path, digest: str) -> Path:
    return data_dir / "blobs" / digest[:2] / digest / "adapter_config.json"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Generator[Stopped]:
    folder = tmp_path_factory.mktemp("stopped")
    model_dir, data_dir = make_tiny_model(folder / "model", "llama"), folder / "data"
    with demo_service(model_dir, "base", [*ENGINE, "--data-dir", str(data_dir)]) as service:
        with ApiClient(service.url, service.admin_key) as api:
            api.call("POST", "/admin/tenants", json={"name": "acme"})
        with ApiClient(f"{service.url}/t/acme", service.admin_key) as api:
            digests = {
                name: api.push_adapter(
                    name, make_tiny_adapter(folder / name, model_dir, **settings)
                )["digest"]
                for name, settings in ADAPTERS.items()
            }
            kept = {"residency": "warm"}
            api.call("PUT", "/v1/adapters/with-a-head/residency", json=kept)
        tenant = Tenant(service)
        for name in ("plain", "with-a-head", "of-high-rank"):
            assert tenant.ask(name) == (200, None)
        assert set(tenant.versions().values()) == {"ready"}
        pipe = Pipe.in_place_of(config_of(data_dir, digests["late"]))
        stop = stop_while_it_loads(service, "late", pipe.answer)
        pipe.path.unlink()
        pipe.path.write_bytes(pipe.content)
    yield Stopped(model_dir, data_dir, digests, stop)


def test_a_stop_ends_the_calls_that_wait_for_a_load_and_leaves_nothing_half_loaded(
    stopped: Stopped,
):
    stop = stopped.stop
    assert stop.streamed == (200, "shutting_down")
    assert stop.plain == (503, "shutting_down")
    assert (stop.exit_code, stop.alive) == (0, [])
    assert '"killing"' not in stop.log and '"engine_lost"' not in stop.log
    cached = {path.name for path in (stopped.data_dir / "cache").iterdir()}
    asked = ("plain", "with-a-head", "of-high-rank", "late")
    assert cached == {stopped.digests[name] for name in asked}
    assert not any(path.is_file() for path in (stopped.data_dir / "uploads").rglob("*"))


def test_a_service_with_less_than_before_refuses_what_is_too_large_and_a_stuck_disk_holds_no_stop(
    stopped: Stopped,
):
    less = ["--max-lora-rank", "8", "--cpu-lora-bytes", "200000"]
    options = [*ENGINE, *less, "--data-dir", str(stopped.data_dir)]
    with demo_service(stopped.model_dir, "base", options) as service:
        tenant = Tenant(service)
        too_large = {
            "with-a-head": "full_weight_too_large", "of-high-rank": "rank_too_large"
        }  # fmt: skip
        for _ in range(2):
            for name, code in too_large.items():
                for stream in (False, True):
                    with tenant.http() as http:
                        asked = {"model": name, "prompt": [1], "stream": stream}
                        refused = http.post("/t/acme/v1/completions", json=asked)
                    error = refused.json()["error"]
                    assert (refused.status_code, error["code"]) == (409, code)
                    assert error["param"] == "model"
            for name in ("plain", "late"):
                assert tenant.ask(name) == (200, None)
        assert tenant.versions() == {name: too_large.get(name, "ready") for name in ADAPTERS}
        log = service.log.read_text()
        assert '"adapter_damaged"' not in log and '"adapter_failed"' not in log
        Pipe.in_place_of(stopped.config_of("never"))
        stop = stop_while_it_loads(service, "never")
    assert (stop.streamed, stop.plain) == ((200, "shutting_down"), (503, "shutting_down"))
    assert (stop.exit_code, stop.alive) == (0, [])
