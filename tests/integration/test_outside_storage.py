"""The real service with its files in a bucket and its cache in Redis, and what a crash leaves."""

import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from subprocess import run
from typing import Any

import httpx
import psutil
import pytest

from loraplex.demo.service import DemoService, demo_service
from tests.support.redis_server import RedisServer
from tests.support.s3 import S3Server
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

ENGINE = ["--dtype", "float32", "--max-num-seqs", "4", "--threads", "1", "--num-kv-blocks", "256"]


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.make_bucket()


@pytest.fixture
def service(
    tmp_path: Path, s3_server: S3Server, redis_server: RedisServer, bucket: str,
    aws_credentials: None, monkeypatch: pytest.MonkeyPatch,
) -> Generator[DemoService]:  # fmt: skip
    model_dir = make_tiny_model(tmp_path / "model", "smollm")
    make_tiny_adapter(tmp_path / "shared" / "one", model_dir)
    monkeypatch.setenv("LORAPLEX_BLOB_URL", f"s3://{bucket}/a?endpoint={s3_server.endpoint}")
    monkeypatch.setenv("LORAPLEX_REDIS_URL", redis_server.url)
    variables = {name: value for name, value in os.environ.items() if name.startswith("LORAPLEX_")}
    options = [*ENGINE, "--adapter-root", str(tmp_path / "shared")]
    with demo_service(model_dir, "base", options, variables) as running:
        yield running


def test_an_adapter_from_a_folder_is_served_from_a_bucket_also_after_a_crash(
    service: DemoService, s3_server: S3Server, redis_server: RedisServer, bucket: str,
    tmp_path: Path,
):  # fmt: skip
    headers = {"authorization": f"Bearer {service.admin_key}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as http:
        http.post("/admin/tenants", json={"name": "acme"}).raise_for_status()

        def register() -> dict[str, Any]:
            order = {"name": "legal", "source": f"file://{tmp_path}/shared/one"}
            begun = http.post("/t/acme/v1/adapters", json=order).raise_for_status().json()
            deadline = time.monotonic() + 60
            while begun["state"] not in ("ready", "failed") and time.monotonic() < deadline:
                time.sleep(0.05)
                begun = http.get(begun["url"]).json()
            return begun

        def answer() -> str:
            asked = {"model": "legal", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
            reply = http.post("/t/acme/v1/completions", json=asked)
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0]["text"]

        ready = register()
        assert ready["state"] == "ready", ready
        digest = ready["digest"]
        assert len([key for key in s3_server.keys(bucket) if digest in key]) == 2
        first = answer()
        assert [name for name in redis_server.names() if "routes:acme" in name]

        [api] = [
            process
            for process in psutil.Process(service.process.pid).children()
            if "loraplex.api_process" in process.cmdline()
        ]
        api.kill()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if http.get("/health/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        assert answer() == first
        assert register()["unchanged"] is True

        command = [sys.executable, "-m", "loraplex", "blobs", "sweep", "--dry-run", "--json"]
        swept = run(
            [*command, "--min-age", "0", "--data-dir", str(service.data_dir)],
            capture_output=True, check=True, env=os.environ,
        )  # fmt: skip
        report = json.loads(swept.stdout)
        assert (report["orphans"], report["missing"]) == ([], [])
