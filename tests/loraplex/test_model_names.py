"""`model`: a name finds the base or an adapter of one's own; else a 404 that gives nothing away."""

import pytest

from tests.support.service import running_service

pytestmark = pytest.mark.anyio

CHAT = {"model": "base", "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION = {"model": "base", "prompt": "Hello"}


async def test_models_are_found_or_are_one_and_the_same_404(tmp_path):
    async with running_service(tmp_path) as service:
        await service.upload("legal")
        await service.upload("theirs", key="zen:tenant")
        await service.upload("gone")
        async with service.client("acme:tenant") as manager:
            assert (await manager.delete("/v1/adapters/gone")).status_code == 204
        unknown = [
            "theirs", "theirs@1", "theirs:default", "gone", "gone@1", "gone:x", "nobody",
            "legal@0", "legal@01", "legal@-1", "legal@x", "legal:", "legal@",
            "legal@1@1", "legal:default@1", "Legal", "LEGAL", " legal", "legal ", "Base", "", "/",
            "../legal", "legal/../legal", "l\u0435gal", "acme/legal", "legal\u0000", "x" * 10_000,
            "legal@99999999999999999999",
        ]  # fmt: skip
        async with service.client() as client:
            service.engine.script = lambda request: [7]
            for path, body in [("completions", COMPLETION), ("chat/completions", CHAT)]:
                shapes = set()
                for model in unknown:
                    reply = await client.post(f"/v1/{path}", json={**body, "model": model})
                    error = reply.json()["error"]
                    assert (reply.status_code, error["code"]) == (404, "model_not_found"), model
                    first, _, last = error["message"].partition(" does not exist or ")
                    shapes.add((error["type"], error["param"], first.split("'")[0], last))
                assert shapes == {
                    ("not_found_error", None, "The model ", "you do not have access to it. "
                     "`GET /v1/models` lists yours; the base is `base`."),
                }  # fmt: skip
            assert service.engine.requests == {}
            for model in ["base", "tiny", "tiny-chat", "org/Tiny-Chat"]:
                reply = await client.post("/v1/completions", json={**COMPLETION, "model": model})
                assert reply.json()["model"] == model
                assert reply.headers["x-loraplex-adapter"] == "base"
            for model in ["legal", "legal@1", "legal:default"]:
                reply = await client.post("/v1/completions", json={**COMPLETION, "model": model})
                assert reply.json()["model"] == model
                assert reply.headers["x-loraplex-adapter"] == "legal@1"
            digests = {r.adapter for r in list(service.engine.requests.values())[-3:]}
            assert len(digests) == 1 and None not in digests


async def test_of_its_own_adapter_a_tenant_is_told_what_there_is_and_nobody_else_is(tmp_path):
    async with running_service(tmp_path) as service:
        await service.upload("legal")
        async with service.client() as ours, service.client("zen:inference") as theirs:

            async def refusal(client, model):
                reply = await client.post("/v1/completions", json={**COMPLETION, "model": model})
                assert (reply.status_code, reply.json()["error"]["code"]) == (
                    404, "model_not_found",
                )  # fmt: skip
                return reply.json()["error"]

            unknown = await refusal(theirs, "nobody")
            for model, words in [
                ("legal@9", "The adapter 'legal' has no version 9; it has version 1."),
                ("legal:nope", "The adapter 'legal' has no alias 'nope'; it has default, and its "
                 "newest version is legal@1."),
            ]:  # fmt: skip
                assert (await refusal(ours, model))["message"] == words
                foreign = unknown["message"].replace("nobody", model)
                assert await refusal(theirs, model) == {**unknown, "message": foreign}
