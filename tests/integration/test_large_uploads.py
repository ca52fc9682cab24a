"""Adapters of a gigabyte: received, checked, stored and fetched without the API process growing."""

import json
import struct
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

from loraplex.cli.api_client import ApiClient
from loraplex.demo.service import DemoService, demo_service
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import until

pytestmark = pytest.mark.slow

HIDDEN, WIDE, RANK = 64, 2**18, 512
MODULES = ("up_proj", "gate_proj")
CHUNK = 2**20
ENGINE = [
    "--dtype", "bfloat16", "--max-lora-rank", str(RANK), "--max-loras", "1", "--max-num-seqs", "2",
    "--num-kv-blocks", "64", "--threads", "1",
]  # fmt: skip
GROWTH = 48 * 2**20
"""Bytes, at most: buffers of both uploads, and what Python keeps of them."""


@dataclass(frozen=True, slots=True)
class LargeAdapter:
    """An adapter of float32 matrices that all hold one value, and never are in memory."""

    value: float

    def header(self) -> bytes:
        tensors: dict[str, Any] = {}
        end = 0
        for module in MODULES:
            for part, shape in (("lora_A", [RANK, HIDDEN]), ("lora_B", [WIDE, RANK])):
                begin, end = end, end + 4 * shape[0] * shape[1]
                key = f"base_model.model.model.layers.0.mlp.{module}.{part}.weight"
                tensors[key] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(tensors).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @property
    def num_value_bytes(self) -> int:
        return 4 * len(MODULES) * RANK * (HIDDEN + WIDE)

    def body(self, name: str, boundary: str) -> tuple[int, Iterator[bytes]]:
        """A form's length and pieces."""
        config = {
            "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(MODULES),
            "bias": "none", "task_type": "CAUSAL_LM",
        }  # fmt: skip

        def part(field: str, filename: str = "") -> bytes:
            file = f'; filename="{filename}"' if filename else ""
            head = f'--{boundary}\r\ncontent-disposition: form-data; name="{field}"{file}\r\n\r\n'
            return head.encode()

        before = (
            part("name") + name.encode() + b"\r\n"
            + part("config", "c") + json.dumps(config).encode() + b"\r\n"
            + part("weights", "w") + self.header()
        )  # fmt: skip
        after = f"\r\n--{boundary}--\r\n".encode()
        chunk = np.full(CHUNK // 4, self.value, np.float32).tobytes()

        def pieces() -> Iterator[bytes]:
            yield before
            left = self.num_value_bytes
            while left:
                yield chunk[:left]
                left -= min(left, CHUNK)
            yield after

        return len(before) + self.num_value_bytes + len(after), pieces()


@dataclass
class ApiProcess:
    """What the service's API process has in memory of its own, looked at all the while."""

    pid: int
    uploads: Path
    most_bytes: int = 0
    most_on_disk: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def own_bytes(self) -> int:
        """Without files that are mapped, whose pages are the machine's to drop."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("RssAnon:")]
        return int(line.split()[1]) * 1024

    def watch(self) -> None:
        while not self._stop.wait(0.02):
            self.most_bytes = max(self.most_bytes, self.own_bytes())
            sizes = [file.stat().st_size for file in self.uploads.rglob("*.part")]
            self.most_on_disk = max(self.most_on_disk, min(sizes) if len(sizes) == 2 else 0)

    def stop(self) -> None:
        self._stop.set()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[DemoService]:
    model_dir = make_tiny_model(
        tmp_path_factory.mktemp("wide") / "model", "llama", dtype=torch.bfloat16,
        num_hidden_layers=1, hidden_size=HIDDEN, intermediate_size=WIDE,
    )  # fmt: skip
    with demo_service(model_dir, "base", ENGINE) as running:
        with ApiClient(running.url, running.admin_key) as api:
            api.call("POST", "/admin/tenants", json={"name": "acme"})
        yield running


def upload(service: DemoService, name: str, adapter: LargeAdapter) -> int:
    length, pieces = adapter.body(name, "frontier")
    reply = httpx.post(
        f"{service.url}/t/acme/v1/adapters", content=pieces, timeout=240,
        headers={
            "authorization": f"Bearer {service.admin_key}", "content-length": str(length),
            "content-type": "multipart/form-data; boundary=frontier",
        },
    )  # fmt: skip
    return reply.status_code


def test_two_adapters_of_a_gigabyte_at_once_move_no_memory_of_the_api_process(
    service: DemoService,
):
    [pid] = [
        child.pid
        for child in psutil.Process(service.process.pid).children()
        if "loraplex.api_process" in child.cmdline()
    ]
    api = ApiProcess(pid, service.data_dir / "uploads")
    before = api.own_bytes()
    watching = threading.Thread(target=api.watch)
    watching.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            uploads: list[Future[int]] = [
                pool.submit(upload, service, f"large-{number}", LargeAdapter(0.001 * (number + 1)))
                for number in range(2)
            ]
            assert [done.result() for done in uploads] == [201, 201]
        with ApiClient(f"{service.url}/t/acme", service.admin_key, timeout=240) as client:
            asked = {"model": "large-0", "prompt": [1], "max_tokens": 1}
            assert client.call("POST", "/v1/completions", json=asked)["choices"]
    finally:
        api.stop()
        watching.join()
    assert api.most_on_disk > 2**29, "they did not come at once"
    assert api.most_bytes - before < GROWTH, f"{(api.most_bytes - before) >> 20} MiB"
    until(lambda: not any(path.is_file() for path in api.uploads.rglob("*")))
