"""Traces: off by default; with the standard variables, spans at a receiver that hold no text."""

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from loraplex.settings import SettingsError
from loraplex.tracing.choose import is_traced, open_tracing
from loraplex.tracing.tracing import NoTracing
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.scripted_engine import EOS, ScriptedRunner
from tests.support.service import TestService
from tests.support.service_on_engine import service_on_engine

pytestmark = pytest.mark.anyio

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
SERVER, INTERNAL = 2, 1


def reply(prompt: Sequence[int], adapter: str | None) -> Sequence[int]:
    return [7, 7, EOS]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with otlp_receiver() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


@asynccontextmanager
async def traced_service(tmp_path) -> AsyncIterator[TestService]:
    """Leaving it sends what is left."""
    tracing = open_tracing(os.environ)
    runner = ScriptedRunner(reply)
    try:
        async with service_on_engine(tmp_path, runner, tracing=tracing) as (service, _, _):
            yield service
    finally:
        await tracing.close()


def test_there_are_no_traces_unless_the_variables_ask_for_them():
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    assert isinstance(open_tracing({}), NoTracing)
    assert is_traced(endpoint) and is_traced({"OTEL_TRACES_EXPORTER": "otlp"})
    assert not is_traced({**endpoint, "OTEL_SDK_DISABLED": "true"})
    assert not is_traced({**endpoint, "OTEL_TRACES_EXPORTER": "none"})
    assert not is_traced({"OTEL_SERVICE_NAME": "mine"})


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_by_the_variables_name(variables, named):
    with pytest.raises(SettingsError, match=named):
        is_traced(variables)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_a_span_of_the_clients_trace_with_the_engines_parts_beneath(
    tmp_path, receiver: OtlpReceiver, stream: bool
):
    async with traced_service(tmp_path) as service:
        await service.upload("legal")
        async with service.client() as client:
            body = {"model": "legal", "prompt": "sesame opens", "stream": stream}
            answer = await client.post("/v1/completions", json=body, headers=TRACEPARENT)
        assert answer.status_code == 200
        assert answer.headers["x-loraplex-trace-id"] == TRACE
        (row,) = await service.usage()
        keys = list(service.keys.values())
    (span,) = [s for s in receiver.named("POST /v1/completions") if s.trace_id == TRACE]
    assert (span.parent_id, span.kind, span.is_error) == (PARENT, SERVER, False)
    told = span.attributes
    assert told["http.route"] == "/v1/completions" and told["http.response.status_code"] == 200
    assert (told["loraplex.tenant"], told["loraplex.adapter"]) == ("acme", "legal@1")
    assert told["gen_ai.usage.input_tokens"] == row.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == row.output_tokens == 3
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["gen_ai.response.id"] == row.request_id
    causes = {
        name.removeprefix("loraplex.queue."): seconds
        for name, seconds in told.items()
        if name.startswith("loraplex.queue.")
    }
    assert sum(causes.values()) == pytest.approx(row.queue_seconds) and causes["load"] > 0  # type: ignore[arg-type]
    parts = [s for s in receiver.spans if s.parent_id == span.span_id]
    assert [s.name for s in parts] == ["engine queue", "engine prefill", "engine decode"]
    assert {s.kind for s in parts} == {INTERNAL} and {s.trace_id for s in parts} == {TRACE}
    queue, prefill, decode = parts
    assert queue.end - queue.start == pytest.approx(row.queue_seconds * 1e9, abs=2000)
    assert prefill.start == queue.end and decode.start == prefill.end
    assert span.start <= queue.start <= decode.end
    assert {f"loraplex.queue.{cause}": s for cause, s in causes.items()} == queue.attributes
    sent = b"".join(receiver.bodies)
    assert b"sesame" not in sent and not any(key.encode() in sent for key in keys)
    assert all(resource["service.name"] == "loraplex" for resource in receiver.resources)


async def test_a_request_without_a_trace_gets_one_and_its_logs_name_it(
    tmp_path, receiver: OtlpReceiver, capfd
):
    async with traced_service(tmp_path) as service, service.client() as client:
        missing = await client.get("/v1/models/nobody")
        assert missing.status_code == 404
        trace_id = missing.headers["x-loraplex-trace-id"]
        healthy = await client.get("/health/live")
        assert "x-loraplex-trace-id" not in healthy.headers
    (span,) = [s for s in receiver.spans if s.trace_id == trace_id]
    assert span.parent_id == "" and not span.is_error
    assert span.attributes["http.response.status_code"] == 404
    assert not receiver.named("GET /health/live")
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line[:1] == "{"]
    (line,) = [line for line in lines if line.get("path") == "/v1/models/nobody"]
    assert line["trace_id"] == trace_id


async def test_a_receiver_that_is_away_costs_a_call_nothing(tmp_path, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with traced_service(tmp_path) as service, service.client() as client:
        answer = await client.post("/v1/completions", json={"model": "base", "prompt": "x"})
        assert answer.status_code == 200 and len(answer.headers["x-loraplex-trace-id"]) == 32
    assert receiver.spans == []


async def test_untraced_replies_say_nothing_of_traces(tmp_path):
    runner = ScriptedRunner(reply)
    async with (
        service_on_engine(tmp_path, runner) as (service, _, _),
        service.client() as client,
    ):
        answer = await client.post(
            "/v1/completions", json={"model": "base", "prompt": "x"}, headers=TRACEPARENT
        )
    assert answer.status_code == 200 and "x-loraplex-trace-id" not in answer.headers
