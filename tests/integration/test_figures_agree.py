"""Replies, usage rows, metrics and the dashboard's pages say the same of each request.

A whole service on a real engine: an API process, a recorder and SQL.
"""

import re
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.cli.api_client import ApiClient
from loraplex.demo.service import DemoService, demo_service, free_port
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

pytestmark = pytest.mark.slow

NUM_REQUESTS = 500
ENGINE = [
    "--dtype", "float32", "--max-num-seqs", "6", "--threads", "1", "--num-kv-blocks", "32",
    "--max-loras", "2", "--max-model-len", "256", "--slo-ttft-ms", "60000",
]  # fmt: skip
ADAPTERS = ("a", "b", "c")
CAUSES = {"quota", "load", "slot", "kv", "budget", "turn"}
ROUNDING = 1e-5
"""Replies tell each cause in whole microseconds."""


def test_causes_are_the_queue_time_of_every_request_and_all_tell_the_same(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", "smollm")
    port = free_port()
    with demo_service(model, "base", [*ENGINE, "--metrics-port", str(port)]) as service:
        key = _tenant_with_adapters(service, model, tmp_path)
        told = _ask_all(service.url, key)
        rows = _usage_rows(service)
        assert len(told) == NUM_REQUESTS and rows.keys() == told.keys()
        for call, causes in told.items():
            assert causes.keys() <= CAUSES
            waited = rows[call]["queue_seconds"]
            assert sum(causes.values()) == pytest.approx(waited, abs=ROUNDING), call
        seen = set[str]().union(*told.values())
        assert {"load", "slot"} < seen
        page = _metrics(port)
        with httpx.Client(base_url=service.url, trust_env=False, timeout=30) as browser:
            origin = {"origin": service.url}
            body = {"key": service.admin_key}
            browser.post("/dashboard/api/session", json=body, headers=origin).raise_for_status()
            view = _when(browser, "overview", lambda v: v["totals"]["requests"] == NUM_REQUESTS)
            all_rows = list(rows.values())
            assert sum(view["totals"]["causes"].values()) == pytest.approx(_sum(all_rows))
            for adapter in (*ADAPTERS, "base"):
                mine = [row for row in all_rows if (row["adapter"] or "base") == adapter]
                shown = browser.get(f"/dashboard/api/adapters/acme/{adapter}?range=1h").json()
                _assert_same(mine, f"acme/{adapter}", page, shown["row"])


def _tenant_with_adapters(service: DemoService, model: Path, folder: Path) -> str:
    with ApiClient(service.url, service.admin_key) as admin:
        admin.call("POST", "/admin/tenants", json={"name": "acme"})
        scopes = {"scopes": ["tenant", "inference"]}
        key: str = admin.call("POST", "/admin/tenants/acme/keys", json=scopes)["key"]
    with ApiClient(service.url, key) as api:
        for seed, name in enumerate(ADAPTERS):
            api.push_adapter(name, make_tiny_adapter(folder / name, model, seed=seed))
    return key


def _ask_all(url: str, key: str) -> dict[str, dict[str, float]]:
    """Seconds by cause, as each reply told them, by the reply's id."""
    models = (*ADAPTERS, "base")

    def ask(number: int) -> tuple[str, dict[str, float]]:
        body = {
            "model": models[number % len(models)], "prompt": [5 + number % 50] * (1 + number % 40),
            "max_tokens": 1 + number % 24, "temperature": 0,
        }  # fmt: skip
        reply = http.post("/v1/completions", json=body).raise_for_status()
        parts = (part.split("=") for part in reply.headers["x-loraplex-queue"].split("; ") if part)
        return reply.json()["id"], {cause: float(ms) / 1000 for cause, ms in parts}

    headers = {"authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=120) as http,
        ThreadPoolExecutor(20) as pool,
    ):
        return dict(pool.map(ask, range(NUM_REQUESTS)))


def _usage_rows(service: DemoService) -> dict[str, dict[str, Any]]:
    [path] = service.data_dir.glob("*.db")
    with sqlite3.connect(path) as database:
        database.row_factory = sqlite3.Row
        return {row["request_id"]: dict(row) for row in database.execute("SELECT * FROM usage")}


def _metrics(port: int) -> str:
    """The page once the engine has told the end of all of them."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        ended = re.findall(r"^loraplex_requests_total\{.*\} (\S+)$", page, re.MULTILINE)
        if sum(map(float, ended)) == NUM_REQUESTS:
            return page
        time.sleep(0.1)


def _when(browser: httpx.Client, path: str, is_there: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + 60
    while True:
        view = browser.get(f"/dashboard/api/{path}?range=1h").raise_for_status().json()
        if is_there(view):
            return view
        assert time.monotonic() < deadline, view
        time.sleep(0.1)


def _sum(rows: list[dict[str, Any]], column: str = "queue_seconds") -> float:
    return sum(row[column] for row in rows)


def _assert_same(rows: list[dict[str, Any]], label: str, page: str, shown: Any) -> None:
    def metric(name: str) -> float:
        series = rf'^loraplex_{name}\{{adapter="{re.escape(label)}".*\}} (\S+)$'
        return sum(map(float, re.findall(series, page, re.MULTILINE)))

    assert shown["requests"] == metric("requests_total") == len(rows) == NUM_REQUESTS / 4
    for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
        assert shown[name] == metric(f"{name}_total") == _sum(rows, name), name
    waited = pytest.approx(_sum(rows), abs=1e-6)
    assert metric("queue_total_seconds_sum") == waited
    assert metric("queue_seconds_sum") == waited
    assert sum(shown["causes"].values()) == waited
