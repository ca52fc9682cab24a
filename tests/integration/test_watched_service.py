"""Metrics on their own port and traces, of a whole service with a real engine."""

import re
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from loraplex.cli.api_client import ApiClient
from loraplex.demo.service import DemoService, demo_service, free_port
from tests.support.otlp_receiver import otlp_receiver
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

ENGINE = ["--dtype", "float32", "--max-num-seqs", "4", "--threads", "1", "--num-kv-blocks", "256"]


def value(page: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)
    assert found is not None, f"no {series} in:\n{page[:3000]}"
    return float(found[1])


def scrape_until(url: str, series: str, wanted: float, seconds: float = 60.0) -> str:
    """The first page on which a series has this value."""
    ends = time.monotonic() + seconds
    while True:
        page = httpx.get(url, trust_env=False, timeout=60).raise_for_status().text
        if re.search(rf"^{re.escape(series)} {wanted}$", page, re.MULTILINE):
            return page
        assert time.monotonic() < ends, f"{series} never became {wanted}:\n{page[:3000]}"
        time.sleep(0.05)


def engine_of(service: DemoService) -> psutil.Process:
    children = psutil.Process(service.process.pid).children()
    [engine] = [child for child in children if "engine.process" in child.cmdline()]
    return engine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "smollm")


def test_a_service_is_watched_on_its_port_and_sends_its_traces(model_dir: Path, tmp_path: Path):
    port = free_port()
    adapter = make_tiny_adapter(tmp_path / "legal", model_dir)
    with otlp_receiver() as receiver:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
        arguments = [*ENGINE, "--metrics-port", str(port), "--slo-ttft-ms", "60000",
                     "--slo-tpot-ms", "60000"]  # fmt: skip
        with demo_service(model_dir, "base", arguments, variables) as service:
            metrics = f"http://127.0.0.1:{port}/metrics"
            with ApiClient(service.url, service.admin_key) as admin:
                admin.call("POST", "/admin/tenants", json={"name": "acme"})
                scopes = {"scopes": ["tenant", "inference"]}
                key = admin.call("POST", "/admin/tenants/acme/keys", json=scopes)["key"]
            with ApiClient(service.url, key) as api:
                api.push_adapter("legal", adapter)
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": "legal", "prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True}
            answer = httpx.post(
                f"{service.url}/v1/completions",
                headers=headers,
                json=body,
                trust_env=False,
                timeout=60,
            ).raise_for_status()
            trace_id = answer.headers["x-loraplex-trace-id"]
            ended = 'loraplex_requests_total{adapter="acme/legal",finish_reason="length"}'
            page = scrape_until(metrics, ended, 1.0)
            assert value(page, 'loraplex_output_tokens_total{adapter="acme/legal"}') == 40
            assert value(page, 'loraplex_good_requests_total{adapter="acme/legal"}') == 1
            assert value(page, "loraplex_slo_time_to_first_token_seconds") == 60
            parts = {
                part: value(page, f'loraplex_step_part_seconds_total{{part="{part}"}}')
                for part in ("schedule", "prepare", "forward", "lora", "sample", "post")
            }
            assert all(seconds > 0 for seconds in parts.values()), parts
            whole = value(page, "loraplex_step_seconds_sum")
            assert sum(parts.values()) == pytest.approx(whole) and parts["lora"] < whole
            assert value(page, "loraplex_step_seconds_count") >= 40

            with ApiClient(service.url, key) as api:
                api.call("DELETE", "/v1/adapters/legal")
            other = ended.replace("acme/legal", "other")
            assert "acme/legal" not in scrape_until(metrics, other, 1.0)

            started = value(page, "loraplex_engine_start_time_seconds")
            engine_of(service).send_signal(signal.SIGKILL)
            scrape_until(metrics, "loraplex_engine_up", 0.0)
            page = scrape_until(metrics, "loraplex_engine_up", 1.0, 60.0)
            assert value(page, "loraplex_engine_start_time_seconds") > started
        (span,) = [s for s in receiver.spans if s.trace_id == trace_id and s.kind == 2]
    assert span.attributes["loraplex.adapter"] == "legal@1"
    assert span.attributes["gen_ai.usage.output_tokens"] == 40
    parts = {s.name for s in receiver.spans if s.parent_id == span.span_id}
    assert parts == {"engine queue", "engine prefill", "engine decode"}
