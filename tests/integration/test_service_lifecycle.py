"""`loraplex serve` as an operator meets it: processes that die, stops, and settings that clash."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from loraplex.cli.api_client import ApiClient
from loraplex.demo.service import DemoService, demo_service, free_port
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

ENGINE = ["--dtype", "float32", "--max-num-seqs", "4", "--threads", "1", "--num-kv-blocks", "256"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A long context: a stream of the base model lasts while something happens to it.
    return make_tiny_model(tmp_path_factory.mktemp("model"), "smollm", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def service(model_dir: Path) -> Generator[DemoService]:
    """One for every test that leaves it running, and for the last, which stops it."""
    with demo_service(model_dir, "base", ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def key(service: DemoService) -> str:
    return tenant_key(service)


def child(service: DemoService, module: str) -> psutil.Process:
    [found] = [
        process
        for process in psutil.Process(service.process.pid).children()
        if module in process.cmdline()
    ]
    return found


def tenant_key(service: DemoService) -> str:
    headers = {"authorization": f"Bearer {service.admin_key}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as http:
        http.post("/admin/tenants", json={"name": "acme"}).raise_for_status()
        created = http.post("/admin/tenants/acme/keys", json={}).raise_for_status()
    key: str = created.json()["key"]
    return key


class Stream(threading.Thread):
    """One streamed completion, read to its end on a thread."""

    def __init__(self, service: DemoService, key: str, max_tokens: int) -> None:
        super().__init__()
        self._request = {
            "url": f"{service.url}/v1/completions",
            "headers": {"authorization": f"Bearer {key}"},
            "json": {
                "model": "base", "prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True,
                "temperature": 0, "stream": True,
            },
        }  # fmt: skip
        self.has_begun = threading.Event()
        self.events: list[str] = []
        self.broke: httpx.TransportError | None = None

    def run(self) -> None:
        try:
            with httpx.stream("POST", **self._request, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.has_begun.set()
        except httpx.TransportError as error:
            self.broke = error

    def begin(self) -> "Stream":
        self.start()
        assert self.has_begun.wait(60)
        return self

    def end(self) -> list[str]:
        self.join(60)
        assert not self.is_alive()
        return self.events


def wait_ready(service: DemoService) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{service.url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(service.log.read_text())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_engine_ends_streams_with_an_error_and_is_started_again(
    service: DemoService, key: str
):
    stream = Stream(service, key, 3000).begin()
    child(service, "engine.process").kill()
    events = stream.end()
    assert json.loads(events[-1])["error"]["code"] == "engine_unavailable"
    assert "[DONE]" not in events
    wait_ready(service)
    assert Stream(service, key, 5).begin().end()[-1] == "[DONE]"
    assert '"child_died"' in service.log.read_text()


def test_a_killed_api_process_is_started_again_on_the_same_port(service: DemoService, key: str):
    stream = Stream(service, key, 3000).begin()
    child(service, "loraplex.api_process").kill()
    stream.end()
    assert stream.broke is not None
    wait_ready(service)
    assert Stream(service, key, 5).begin().end()[-1] == "[DONE]"


def test_a_stop_answers_what_is_past_the_drain_limit_or_queued_or_half_uploaded(model_dir: Path):
    with demo_service(model_dir, "base", [*ENGINE, "--drain-seconds", "2"]) as service:
        stop_with_work_at_hand(service, tenant_key(service))


def test_a_second_ctrl_c_gives_what_runs_its_last_frame_at_once(model_dir: Path):
    """Nobody would live to see the drain limit; a terminal is told both."""
    arguments = [*ENGINE, "--drain-seconds", "3600"]
    with demo_service(model_dir, "base", arguments, {"FORCE_COLOR": "1"}) as service:
        stream = Stream(service, tenant_key(service), 4000).begin()
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "may go on for 3600 s; Ctrl-C again" in service.log.read_text())
        service.process.send_signal(signal.SIGTERM)  # not what hurries
        begun = len(stream.events)
        wait_until(lambda: len(stream.events) > begun + 2)
        service.process.send_signal(signal.SIGINT)
        assert json.loads(stream.end()[-1])["error"]["code"] == "shutting_down"
        assert service.process.wait(60) == 0
        log = service.log.read_text()
        assert "killing" not in log and "engine_lost" not in log


def stop_with_work_at_hand(service: DemoService, key: str) -> None:
    """A stop of a service whose seats are taken; it is not ready meanwhile."""
    running = [Stream(service, key, 4000).begin() for _ in range(4)]  # every seat
    queued = Stream(service, key, 5)
    queued.start()
    headers = {"authorization": f"Bearer {service.admin_key}"}
    with (
        httpx.Client(base_url=service.url, headers=headers, timeout=60) as http,
        socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2]))) as upload,
    ):
        wait_until(lambda: http.get("/admin/engine").json()["waiting"] == 1)
        assert http.get("/health/ready").status_code == 200
        upload.sendall(
            b"POST /t/acme/v1/adapters HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n"
            b"content-type: multipart/form-data; boundary=b\r\n"
            b"authorization: Bearer " + service.admin_key.encode() + b"\r\n\r\n--b\r\n"
            b'content-disposition: form-data; name="weights"; filename="w"\r\n\r\nhalf'
        )
        uploads = service.data_dir / "uploads"
        wait_until(lambda: any(path.is_file() for path in uploads.rglob("*")))
        service.process.send_signal(signal.SIGTERM)
        is_ready = True
        while is_ready and running[0].is_alive():
            try:
                is_ready = http.get("/health/ready").status_code == 200
            except httpx.TransportError:
                is_ready = False
        assert not is_ready
        upload.settimeout(60)
        reply = upload.makefile("rb").read()
    assert reply.startswith(b"HTTP/1.1 503 ") and b'"shutting_down"' in reply
    assert json.loads(queued.end()[-1])["error"]["code"] == "shutting_down"
    for stream in running:
        assert json.loads(stream.end()[-1])["error"]["code"] == "shutting_down"
        assert stream.broke is None
    assert service.process.wait(30) == 0
    assert not any(path.is_file() for path in uploads.rglob("*"))


@dataclass(frozen=True, slots=True)
class Killed:
    """What a service left whose supervisor was killed, a tenant's adapter `intents` in it."""

    data_dir: Path
    alive: list[psutil.Process]


@pytest.fixture(scope="module")
def killed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    adapter = make_tiny_adapter(folder / "adapter", model_dir)
    arguments = [*ENGINE, "--data-dir", str(folder / "data")]
    with demo_service(model_dir, "base", arguments) as service:
        tenant_key(service)
        with ApiClient(f"{service.url}/t/acme", service.admin_key) as api:
            api.push_adapter("intents", adapter)
        children = psutil.Process(service.process.pid).children(recursive=True)
        assert len(children) >= 2
        service.process.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
    return Killed(folder / "data", alive)


def test_nothing_outlives_a_killed_supervisor(killed: Killed):
    assert killed.alive == []


def serve(model: Path | str, data_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a service that is expected to refuse to start."""
    command = [sys.executable, "-m", "loraplex", "serve", "--model", str(model)]
    return subprocess.run(
        [*command, "--data-dir", str(data_dir), *arguments],
        capture_output=True, text=True, timeout=120,
        env={k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")},
    )  # fmt: skip


def test_a_data_directory_in_use_is_refused_by_name(service: DemoService, model_dir: Path):
    refused = serve(model_dir, service.data_dir, "--port", str(free_port()))
    assert refused.returncode == 1
    assert f"{service.data_dir} is in use" in refused.stderr


def test_a_port_in_use_is_refused_by_name(service: DemoService, model_dir: Path, tmp_path: Path):
    port = service.url.rpartition(":")[2]
    refused = serve(model_dir, tmp_path / "other", "--port", port)
    assert refused.returncode == 1
    assert f"127.0.0.1:{port}" in refused.stderr
    assert "--port" in refused.stderr
    assert not (tmp_path / "other").exists()
    refused = serve(model_dir, tmp_path / "other", "--port", "0", "--metrics-port", port)
    assert refused.returncode == 1 and "--metrics-port" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_a_setting_that_can_never_work_ends_the_service_with_its_name(
    model_dir: Path, tmp_path: Path
):
    refused = serve(
        model_dir, tmp_path, "--port", str(free_port()), "--max-num-seqs", "64",
        "--max-num-batched-tokens", "32",
    )  # fmt: skip
    assert refused.returncode == 1
    assert "max_num_batched_tokens (32) must be at least max_num_seqs (64)" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_model_that_does_not_exist_is_refused_by_name(tmp_path: Path):
    refused = serve(tmp_path / "nowhere", tmp_path / "data")
    assert refused.returncode == 1
    assert f"{tmp_path / 'nowhere'}: there is no such folder" in refused.stderr


def test_the_base_model_cannot_take_an_adapters_name(killed: Killed, model_dir: Path):
    port = ("--port", "0")
    refused = serve(model_dir, killed.data_dir, *port, "--served-model-name", "intents")
    assert refused.returncode == 1
    assert "an adapter of a tenant has that name" in refused.stderr
    refused = serve(model_dir, killed.data_dir, *port, "--served-model-name", "intents@1")
    assert refused.returncode == 1
    assert "without spaces, @ and :" in refused.stderr


def test_a_stop_lets_a_running_stream_end_well(service: DemoService, key: str):
    """The last of this file: the service of the others is gone after it."""
    stream = Stream(service, key, 60).begin()
    service.process.send_signal(signal.SIGTERM)
    assert stream.end()[-1] == "[DONE]"
    assert service.process.wait(30) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{service.url}/health/live")
