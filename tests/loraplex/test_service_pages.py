"""Health, OpenAPI, request ids, logs: what surrounds the API."""

import asyncio
import dataclasses
import json
import re

import pytest

from adapter_store.errors import RegistryUnavailable
from engine.messages import EngineRequest
from tests.support.fake_engine import info
from tests.support.registry import open_registry
from tests.support.service import ADMIN_KEY, running_service
from tests.support.waiting import SECONDS

pytestmark = pytest.mark.anyio

SECRET = "the-very-secret-prompt"


async def test_health_follows_the_engine_and_the_registry(tmp_path, monkeypatch):
    async with running_service(tmp_path) as service, service.client(None) as client:

        async def statuses() -> list[int]:
            paths = ("/health/live", "/health/ready", "/health")
            return [(await client.get(path)).status_code for path in paths]

        assert await statuses() == [200, 200, 200]
        service.engine.is_ready = False
        assert await statuses() == [200, 503, 503]
        service.engine.is_ready = True

        async def unavailable() -> None:
            raise RegistryUnavailable("gone")

        monkeypatch.setattr(service.registry, "ping", unavailable)
        assert await statuses() == [200, 200, 200]
        monkeypatch.setattr("loraplex.registry_watch.GRACE_SECONDS", 0.0)
        assert await statuses() == [200, 503, 503]
        assert (await client.get("/health")).json() == {
            "status": "unavailable", "engine": "ok", "registry": "unavailable",
        }  # fmt: skip
        monkeypatch.undo()
        assert await statuses() == [200, 200, 200]


async def test_the_registry_gone_is_a_503_on_the_api(tmp_path, monkeypatch):
    async with running_service(tmp_path) as service, service.client() as client:

        async def unavailable(*args: object) -> None:
            raise RegistryUnavailable("gone")

        assert (await client.get("/v1/models")).status_code == 200
        monkeypatch.setattr(service.registry, "list_adapters", unavailable)
        reply = await client.get("/v1/models")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "registry_unavailable")


async def test_the_openapi_document_describes_every_call(tmp_path):
    async with running_service(tmp_path) as service, service.client(None) as client:
        document = (await client.get("/docs/openapi.json")).json()
        operations = {
            (method, path): operation
            for path, item in document["paths"].items()
            for method, operation in item.items()
        }
        for method, path in [
            ("post", "/v1/chat/completions"), ("post", "/v1/completions"), ("get", "/v1/models"),
            ("post", "/v1/adapters"), ("put", "/v1/adapters/{name}/aliases/{alias}"),
            ("post", "/admin/tenants"), ("post", "/admin/tenants/{tenant_name}/keys"),
            ("post", "/t/{tenant_name}/v1/chat/completions"), ("get", "/health/ready"),
        ]:  # fmt: skip
            assert (method, path) in operations
        ids = [operation["operationId"] for operation in operations.values()]
        assert len(ids) == len(set(ids))
        chat = operations["post", "/v1/chat/completions"]
        schema = chat["requestBody"]["content"]["application/json"]["schema"]
        assert {"messages", "model", "temperature", "top_k"} <= set(schema["properties"])
        assert schema["required"] == ["model", "messages"]
        upload = operations["post", "/v1/adapters"]["requestBody"]["content"]
        assert "weights" in upload["multipart/form-data"]["schema"]["properties"]
        assert "$ref" not in json.dumps(schema)


async def test_every_operation_is_summed_up_in_a_sentence(tmp_path):
    async with running_service(tmp_path) as service, service.client(None) as client:
        paths = (await client.get("/docs/openapi.json")).json()["paths"]
        for path, item in paths.items():
            for method, operation in item.items():
                summary = operation["summary"]
                assert summary.endswith(".") and summary.count(" ") >= 2, (method, path, summary)
                assert "\n" not in summary and len(summary) < 200, summary


async def test_every_documented_error_has_the_shape_of_its_path(tmp_path):
    async with running_service(tmp_path) as service, service.client(None) as client:
        paths = (await client.get("/docs/openapi.json")).json()["paths"]
    for path, item in paths.items():
        for method, operation in item.items():
            if path.startswith("/health"):
                assert operation["security"] == [{}]
                continue
            replies = {int(status): reply for status, reply in operation["responses"].items()}
            errors = {status: reply for status, reply in replies.items() if status >= 400}
            assert {401, 403, 503} <= set(errors), (method, path)
            shape = "Problem" if path.startswith(("/admin", "/metrics")) else "OpenAIError"
            for status, reply in errors.items():
                schema = reply["content"]["application/json"]["schema"]
                assert schema == {"$ref": f"#/components/schemas/{shape}"}, (method, path, status)


async def test_the_docs_page_shows_every_call_and_loads_nothing(tmp_path):
    async with running_service(tmp_path) as service, service.client(None) as client:
        reply = await client.get("/docs")
        assert reply.headers["content-type"].startswith("text/html")
        paths = (await client.get("/docs/openapi.json")).json()["paths"]
        page = reply.text
        for path in paths:
            assert path.startswith("/t/") or f"<code>{path}</code>" in page
        assert not re.search(r"<script|src=|<link|@import|url\(|https?://", page)
        for target in re.findall('href="#([^"]+)"', page):
            assert f'id="{target}"' in page
        assert (await client.get("/docs/scalar")).status_code == 404


async def test_every_reply_has_a_request_id_and_a_clients_own_comes_back(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        service.engine.script = lambda request: [7]
        body = {"model": "base", "prompt": "x"}
        for method, path, kwargs in [
            ("POST", "/v1/completions", {"json": body}),
            ("POST", "/v1/completions", {"json": {**body, "stream": True}}),
            ("POST", "/v1/completions", {"json": {}}),
            ("GET", "/v1/models", {}), ("GET", "/nowhere", {}), ("DELETE", "/v1/models", {}),
        ]:  # fmt: skip
            reply = await client.request(method, path, **kwargs)
            assert reply.headers["x-request-id"].startswith("req_")
            own = await client.request(method, path, headers={"x-request-id": "mine-1"}, **kwargs)
            assert own.headers.get_list("x-request-id") == ["mine-1"]
        for bad in ["", "a b", "x" * 129, "\u00e9"]:
            headers = {"x-request-id": bad.encode("latin-1")}
            reply = await client.get("/v1/models", headers=headers)
            assert reply.headers["x-request-id"].startswith("req_")


async def test_two_requests_of_one_label_are_two_usage_rows(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        service.engine.script = lambda request: [7]
        for _ in range(2):
            await client.post(
                "/v1/completions", json={"model": "base", "prompt": "x"},
                headers={"x-request-id": "same"},
            )  # fmt: skip
        assert len(await service.usage(num_rows=2)) == 2


def fail_with_its_input(request: EngineRequest) -> list[int]:
    raise ExceptionGroup(SECRET, [ValueError(f"cannot read {SECRET!r}")]) from KeyError(SECRET)


async def test_logs_name_the_request_and_hold_no_text_and_no_key(tmp_path, capfd):
    async with running_service(tmp_path) as service, service.client() as client:
        service.engine.script = lambda request: service.tokenizer.encode(SECRET, False)
        service.engine.info = info(max_model_len=512)
        chat = {"model": "base", "messages": [{"role": "user", "content": SECRET}]}
        await client.post("/v1/chat/completions", json=chat)
        await client.post("/v1/chat/completions", json={**chat, "stream": True})
        await client.post("/v1/chat/completions", json={**chat, "temperature": SECRET})
        await client.post("/v1/chat/completions", json={**chat, "model": SECRET})
        await client.post("/v1/completions?prompt=" + SECRET, json={"model": "base"})
        service.engine.script = fail_with_its_input
        failed = await client.post("/v1/completions", json={"model": "base", "prompt": SECRET})
        assert (failed.status_code, SECRET in failed.text) == (500, False)
        await service.upload("legal")
        async with service.client("admin") as admin:
            created = (await admin.post("/admin/tenants/acme/keys", json={})).json()
        keys = [*service.keys.values(), created["key"], ADMIN_KEY]
    output = capfd.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines() if line[:1] == "{"]
    requests = [line for line in lines if line["event"] == "request"]
    assert {line["path"] for line in requests} >= {"/v1/chat/completions", "/v1/adapters"}
    assert len([line for line in requests if line["path"] == "/v1/chat/completions"]) == 4
    assert all(line["request_id"] and line["status"] for line in requests)
    [unexpected] = [line for line in lines if line["event"] == "unexpected_error"]
    assert "ExceptionGroup" in json.dumps(unexpected["exception"])
    for text in (SECRET, *keys):
        assert text not in output.out
        assert text not in output.err


async def test_usage_is_not_lost_while_the_database_is_away(tmp_path, monkeypatch):
    async with running_service(tmp_path) as service, service.client() as client:
        service.engine.script = lambda request: [7]
        record, failures = service.registry.record_usage, 2

        async def flaky(*records: object) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise RegistryUnavailable("gone")
            await record(*records)

        monkeypatch.setattr(service.registry, "record_usage", flaky)
        monkeypatch.setattr("loraplex.usage._WAIT_SECONDS", 2 * SECONDS)
        async with asyncio.timeout(SECONDS):  # no reply waits for the database
            for _ in range(3):
                reply = await client.post("/v1/completions", json={"model": "base", "prompt": "x"})
                assert reply.status_code == 200
        assert len(await service.usage(num_rows=3)) == 3
        assert failures == 0


async def test_what_is_queued_is_written_when_the_service_stops(tmp_path, monkeypatch):
    monkeypatch.setattr("loraplex.usage._LAST_SECONDS", SECONDS)
    async with running_service(tmp_path) as service, service.client() as client:
        service.engine.script = lambda request: [7]
        for _ in range(20):
            await client.post("/v1/completions", json={"model": "base", "prompt": "x"})
    async with open_registry(tmp_path) as registry:
        assert len(await registry.list_usage("acme")) == 20


async def test_a_row_that_the_registry_refuses_does_not_hold_up_the_others(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        service.engine.script = lambda request: [7]
        body = {"model": "base", "prompt": "x"}
        usage = service.app.state.services.usage
        await client.post("/v1/completions", json=body)
        (row,) = await service.usage()
        usage.record(dataclasses.replace(row, tenant="nobody", request_id="bad"))
        usage.record(dataclasses.replace(row, request_id="good"))
        await client.post("/v1/completions", json=body)
        rows = await service.usage(num_rows=3)
        assert "good" in [row.request_id for row in rows]
        assert "bad" not in [row.request_id for row in rows]
