"""Every exception becomes an answer in the shape that its path promises."""

import json

import pytest
from litestar.exceptions import NotFoundException

from adapter_store import errors as store
from engine.errors import AdapterUnavailable, ClientClosed, EngineUnavailable, RequestRefused
from loraplex.errors import ApiError, as_api_error, is_openai_path
from tests.support.service import running_service


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (store.AdapterFormatError("rank_too_large", "m", field="r"), 422, "rank_too_large"),
        (store.ModelNotFound("m"), 404, "model_not_found"),
        (store.AdapterNotFound("m"), 404, "adapter_not_found"),
        (store.VersionNotFound("m"), 404, "version_not_found"),
        (store.TenantNotFound("m"), 404, "tenant_not_found"),
        (store.KeyNotFound("m"), 404, "key_not_found"),
        (store.InvalidName("m"), 400, "invalid_name"),
        (store.InvalidField("weight", "m"), 400, "invalid_field"),
        (store.NameReserved("m"), 400, "name_reserved"),
        (store.NameTaken("m"), 409, "name_taken"),
        (store.VersionInUse("m"), 409, "version_in_use"),
        (store.AliasConflict("m"), 409, "alias_conflict"),
        (store.RegistryUnavailable("m"), 503, "registry_unavailable"),
        (store.BlobMissing("d", "m"), 503, "adapter_unavailable"),
        (AdapterUnavailable("d", "m"), 503, "adapter_unavailable"),
        (EngineUnavailable("m"), 503, "engine_unavailable"),
        (ClientClosed("m"), 503, "shutting_down"),
        (RequestRefused("queue_full", "m"), 429, "queue_full"),
        (RequestRefused("context_length_exceeded", "m"), 400, "context_length_exceeded"),
        (RequestRefused("engine_error", "m"), 500, "engine_error"),
        (store.SourceError("source_not_allowed", "m"), 403, "source_not_allowed"),
        (store.SourceError("source_denied", "m"), 400, "source_denied"),
        (store.SourceError("upload_storage", "m"), 503, "upload_storage"),
        (NotFoundException(), 404, "not_found"),
        (ApiError(418, "teapot", "m"), 418, "teapot"),
        (ValueError("secret prompt"), 500, "internal_error"),
    ],
)
def test_exceptions_have_a_status_and_a_code(error, status, code):
    answer = as_api_error(error)
    assert (answer.status, answer.code) == (status, code)
    assert "secret" not in answer.message


def test_the_field_at_fault_is_kept():
    assert as_api_error(store.AdapterFormatError("c", "m", field="use_dora")).param == "use_dora"
    assert as_api_error(store.InvalidField("weight", "m")).param == "weight"
    assert as_api_error(RequestRefused("c", "m", param="n")).param == "n"


@pytest.mark.parametrize(
    ("path", "is_openai"),
    [
        ("/v1", True), ("/v1/", True), ("/v1/models", True), ("/t/acme/v1", True),
        ("/t/acme/v1/x", True), ("/v10", False), ("/admin/tenants", False), ("/t/acme", False),
        ("/t/acme/other/v1", False), ("/health", False), ("/", False),
    ],
)  # fmt: skip
def test_which_paths_speak_openai(path, is_openai):
    assert is_openai_path(path) is is_openai


@pytest.mark.anyio
async def test_both_shapes_on_the_wire(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as client:
        for path in ("/v1/nothing", "/t/acme/v1/nothing", "/v1/chat/completions", "/v1/models"):
            reply = await client.get(path)
            assert reply.headers["content-type"] == "application/json"
            assert set(reply.json()) == {"error"}
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        for path in ("/nothing", "/admin/nothing", "/t/acme", "/admin/tenants/nobody/keys"):
            reply = await client.get(path)
            assert reply.headers["content-type"] == "application/problem+json"
            problem = reply.json()
            assert problem["status"] == reply.status_code
            assert {"type", "title", "status", "detail", "code"} <= set(problem)
        reply = await client.delete("/admin/tenants")
        assert (reply.status_code, reply.json()["code"]) == (405, "method_not_allowed")


@pytest.mark.anyio
async def test_an_unforeseen_exception_tells_nothing_and_the_service_goes_on(
    tmp_path, monkeypatch, capfd
):
    async with running_service(tmp_path) as service, service.client() as client:

        async def explode(*args: object) -> None:
            secret = "the prompt in a local variable"
            raise ValueError(f"no {len(secret)}")

        monkeypatch.setattr(service.registry, "list_adapters", explode)
        reply = await client.get("/v1/models")
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
        assert "ValueError" not in reply.text
        monkeypatch.undo()
        assert (await client.get("/v1/models")).status_code == 200
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line[:1] == "{"]
    (logged,) = [line for line in lines if line["event"] == "unexpected_error"]
    assert logged["exception"][0]["exc_type"] == "ValueError"
    assert "the prompt in a local variable" not in json.dumps(logged)
