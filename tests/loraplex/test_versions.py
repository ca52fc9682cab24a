"""Versions over HTTP: canaries, repeated calls, deletion under running requests, export, pages."""

import asyncio
import io
import json
import zipfile
from typing import Any

import pytest

from adapter_store.registry.records import Canary
from tests.support.fake_engine import FakeEngine, info
from tests.support.registry import FINGERPRINT, upload
from tests.support.service import TestService, adapter_files, running_service

pytestmark = pytest.mark.anyio


def form(seed: int = 0) -> dict[str, Any]:
    config, weights = adapter_files(seed)
    return {"config": ("adapter_config.json", config), "weights": ("w.safetensors", weights)}


async def ask(service: TestService, model: str = "legal", **fields: Any) -> str:
    """The version that answers."""
    async with service.client() as client:
        body = {"model": model, "prompt": "x", "max_tokens": 1, **fields}
        reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return list(service.engine.requests.values())[-1].label


async def test_a_canary_gets_its_users_and_keeps_them_while_its_share_grows(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        service.engine.script = lambda request: [7]
        for seed in range(2):
            await service.upload("legal", seed=seed)
        url = "/v1/adapters/legal/aliases/default"

        async def share(share: float) -> dict[str, str]:
            canary = {"version": 2, "share": share}
            moved = await client.put(url, json={"version": 1, "canary": canary})
            assert moved.json()["canary"] == canary, moved.text
            return {f"user-{i}": await ask(service, user=f"user-{i}") for i in range(24)}

        few, many = await share(0.3), await share(0.7)
        assert 0 < list(few.values()).count("legal@2") < list(many.values()).count("legal@2") < 24
        assert all(many[user] == "legal@2" for user in few if few[user] == "legal@2")
        for user in ("user-1", "user-2"):
            assert await ask(service, prompt_cache_key=user) == many[user]
        assert {await ask(service) for _ in range(32)} == {"legal@1", "legal@2"}
        shown = (await client.get("/v1/adapters/legal")).json()
        assert shown["canaries"] == {"default": {"version": 2, "share": 0.7}}

        refused = await client.delete("/v1/adapters/legal/versions/2")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_in_use")
        done = await client.put(url, json={"version": 2})
        assert done.json() == {"alias": "default", "version": 2, "previous": 1}
        assert {await ask(service, user=user) for user in few} == {"legal@2"}


async def test_with_its_last_version_the_engine_forgets_the_adapter_and_no_earlier(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        for seed in range(2):
            await service.upload("legal", seed=seed)
        url = "/v1/adapters/legal"
        assert (await client.delete(f"{url}/versions/1")).status_code == 204
        assert service.engine.forgotten == []
        assert (await client.delete(f"{url}/aliases/default")).status_code == 204
        assert (await client.delete(f"{url}/versions/2")).status_code == 204
        assert service.engine.forgotten == [("acme", "legal")]


async def test_a_bad_canary_is_refused_by_its_field(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        await service.upload("legal")
        for canary, param in [
            ({"version": 2}, "canary.share"),
            ({"version": 2, "share": 1.5}, "canary.share"),
            ({"version": 2, "share": "x"}, "canary.share"),
            ({"version": 0, "share": 0.5}, "canary.version"),
            ({"version": 1, "share": 0.5}, "canary.version"),
            ({"version": 2, "share": 0.5, "x": 1}, "canary.x"),
        ]:
            body = {"version": 1, "canary": canary}
            reply = await client.put("/v1/adapters/legal/aliases/default", json=body)
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, param), (canary, error)
        body = {"version": 1, "canary": {"version": 2, "share": 0.5}}
        reply = await client.put("/v1/adapters/legal/aliases/default", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "version_not_found")


async def test_an_upload_with_a_key_may_be_sent_again(tmp_path, registry_url: str):
    async with (
        running_service(tmp_path, database_url=registry_url) as service,
        service.client("acme:tenant") as client,
    ):

        async def push(seed: int, key: str, name: str = "legal"):
            return await client.post(
                "/v1/adapters", data={"name": name}, files=form(seed),
                headers={"idempotency-key": key},
            )  # fmt: skip

        first = await push(0, "k-1")
        assert (first.status_code, "idempotent-replayed" in first.headers) == (201, False)
        again = await push(0, "k-1")
        assert (again.status_code, again.json()) == (201, first.json())
        assert again.headers["idempotent-replayed"] == "true"
        for other in (await push(1, "k-1"), await push(0, "k-1", "other")):
            assert other.status_code == 422
            assert other.json()["error"]["code"] == "idempotency_key_reused"
        assert await service.blobs.list() == [first.json()["digest"]]
        for bad in ("", "a b", "x" * 256):
            refused = await push(0, bad)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "invalid_idempotency_key"

        await client.delete("/v1/adapters/legal")
        assert (await push(0, "k-1")).json() == first.json()
        assert await service.blobs.list() == []  # of a deleted version nothing comes back
        assert (await client.get("/v1/adapters")).json() == {"data": []}


async def test_a_guarded_move_may_be_sent_again(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        for seed in range(2):
            await service.upload("legal", seed=seed)

        async def move(**headers: str):
            body = {"version": 1, "expect": 2}
            return await client.put(
                "/v1/adapters/legal/aliases/default", json=body, headers=headers
            )

        key = {"Idempotency-Key": "move"}
        first, again, without = await move(**key), await move(**key), await move()
        assert first.json() == again.json() == {"alias": "default", "version": 1, "previous": 2}
        assert again.headers["idempotent-replayed"] == "true"
        assert without.status_code == 409


async def running_stream(service: TestService, model: str) -> asyncio.Task[str]:
    """A stream that the engine has queued and says nothing to yet."""
    before = len(service.engine.open_requests)

    async def read() -> str:
        async with service.client() as client:
            body = {"model": model, "prompt": "x", "max_tokens": 4, "stream": True}
            return (await client.post("/v1/completions", json=body)).text

    task = asyncio.create_task(read())
    async with asyncio.timeout(10):
        while len(service.engine.open_requests) == before:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.005)
    return task


async def test_requests_finish_on_a_deleted_version_unless_they_are_to_end(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        digests = [(await service.upload("legal", seed=seed))["digest"] for seed in range(3)]
        drained = await running_stream(service, "legal@1")
        [request_id] = service.engine.open_requests
        assert (await client.delete("/v1/adapters/legal/versions/1")).status_code == 204
        assert await service.blobs.list() == sorted(digests[1:])
        assert service.engine.unloaded == [digests[0]]
        assert service.engine.open_requests == [request_id]
        service.engine.say(request_id, [5, 6, 7, 8], reason="length", finished=True)
        assert (await drained).endswith("data: [DONE]\n\n")

        ended, other = [await running_stream(service, f"legal@{n}") for n in (2, 3)]
        gone = await client.delete("/v1/adapters/legal/versions/2", params={"abort": "true"})
        assert gone.status_code == 204
        events = (await ended).strip().split("\n\n")
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["code"] == "version_deleted"
        [request_id] = service.engine.open_requests  # the other version's
        assert (await client.delete("/v1/adapters/legal?abort=true")).status_code == 204
        assert "version_deleted" in await other
        assert service.engine.open_requests == []
        assert request_id in service.engine.ended


async def test_a_version_that_does_not_exist_is_not_found_whatever_its_number(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        await service.upload("legal")
        for number in ("0", "-1", "2", str(2**31), str(2**70)):
            for call in (
                client.get(f"/v1/adapters/legal/versions/{number}"),
                client.get(f"/v1/adapters/legal/versions/{number}/export"),
                client.delete(f"/v1/adapters/legal/versions/{number}"),
            ):
                assert (await call).status_code == 404, number
        shown = (await client.get("/v1/adapters/legal/versions/1")).json()
        assert shown["report"]["rank"] == 4
        missing = await client.delete("/v1/adapters/legal/aliases/beta")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "alias_not_found")
        assert (await client.delete("/v1/adapters/legal/aliases/default")).status_code == 204
        assert (await client.delete("/v1/adapters/legal/versions/1")).status_code == 204


async def test_an_export_is_the_upload_and_what_became_of_it(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        pushed = await service.upload("legal", seed=3)
        reply = await client.get("/v1/adapters/legal/versions/1/export")
        assert reply.headers["content-type"] == "application/zip"
        assert 'filename="legal-1.zip"' in reply.headers["content-disposition"]
        with zipfile.ZipFile(io.BytesIO(reply.content)) as archive:
            assert archive.testzip() is None
            config, weights = adapter_files(3)
            assert archive.read("adapter_config.json") == config
            assert archive.read("adapter_model.safetensors") == weights
            manifest = json.loads(archive.read("manifest.json"))
        assert (manifest["version"], manifest["digest"]) == (1, pushed["digest"])
        assert manifest["report"] == pushed["report"]
        again = await client.post(
            "/v1/adapters", data={"name": "copy"}, files={"archive": ("a.zip", reply.content)}
        )
        assert (again.status_code, again.json()["digest"]) == (201, pushed["digest"])
        assert list((service.root / "uploads").rglob("*")) == []
        async with service.client("zen:tenant") as other:
            assert (await other.get("/v1/adapters/legal/versions/1/export")).status_code == 404

        for path in (service.root / "blobs").rglob("adapter_model.safetensors"):
            path.write_bytes(b"damaged")
        damaged = await client.get("/v1/adapters/legal/versions/1/export")
        assert (damaged.status_code, damaged.json()["error"]["code"]) == (
            503,
            "adapter_unavailable",
        )


async def test_a_version_beyond_the_limits_of_now_is_refused_by_name_and_listed_so(
    tmp_path, registry_url: str
):
    engine = FakeEngine(lambda request: [7])
    async with (
        running_service(tmp_path, engine, database_url=registry_url) as service,
        service.client() as caller,
        service.client("acme:tenant") as owner,
    ):
        await service.upload("other")
        for inspected, base in (
            (upload("plain"), FINGERPRINT),
            (upload("with a head", full_values=3_000_000_000), FINGERPRINT),
            (upload("of high rank", rank=32), FINGERPRINT),
            (upload("of another base"), "0" * 64),
        ):
            await service.registry.register_version(
                "acme", "big", inspected, base, publish=base == FINGERPRINT
            )
        behind = Canary(2, 1.0)
        await service.registry.set_alias("acme", "big", "default", 1, canary=behind)

        async def asked(model: str) -> tuple[int, dict[str, Any]]:
            body = {"model": model, "prompt": "x", "max_tokens": 1}
            reply = await caller.post("/v1/completions", json=body)
            return reply.status_code, reply.json()

        async def states() -> dict[int, str]:
            listed = (await owner.get("/v1/adapters/big/versions")).json()["data"]
            for version in listed:
                one = await owner.get(f"/v1/adapters/big/versions/{version['version']}")
                assert one.json() == version
            return {version["version"]: version["state"] for version in listed}

        as_uploaded = {1: "ready", 2: "ready", 3: "ready", 4: "base_model_mismatch"}
        assert await states() == as_uploaded
        for model in ("big", "big@1", "big@2", "big@3"):
            assert (await asked(model))[0] == 200

        engine.info = info(max_lora_rank=31, max_full_values=2_999_999_999)
        num_queued = len(engine.requests)
        for model, code, told in (
            ("big@2", "full_weight_too_large", "`--cpu-lora-bytes`"),
            ("big", "full_weight_too_large", "big@2 has 3000000000 values"),
            ("big@3", "rank_too_large", "ranks up to 31 now (`--max-lora-rank`)"),
            ("big@4", "base_model_mismatch", "another base model"),
        ):
            status, body = await asked(model)
            error = body["error"]
            assert (status, error["code"], error["param"]) == (409, code, "model")
            assert told in error["message"]
        assert len(engine.requests) == num_queued
        for model in ("other", "big@1", "base"):
            assert (await asked(model))[0] == 200
        assert await states() == {
            **as_uploaded, 2: "full_weight_too_large", 3: "rank_too_large",
        }  # fmt: skip
        engine.info = info(max_full_values=0)
        assert "takes none now" in (await asked("big@2"))[1]["error"]["message"]
        engine.info = info(max_full_values=3_000_000_000)
        assert await states() == as_uploaded
        assert (await asked("big"))[0] == 200


async def test_adapters_come_in_pages(tmp_path, registry_url: str):
    async with (
        running_service(tmp_path, database_url=registry_url) as service,
        service.client("acme:tenant") as client,
    ):
        for name in "abcde":
            await service.upload(name)
        names: list[str] = []
        page: dict[str, Any] = {"next": ""}
        while "next" in page:
            params = {"limit": 2, "after": page["next"]}
            page = (await client.get("/v1/adapters", params=params)).json()
            names += [adapter["name"] for adapter in page["data"]]
        assert names == list("abcde")
        for params, param in [
            ({"limit": 0}, "limit"), ({"limit": 1001}, "limit"), ({"limit": "x"}, "limit"),
            ({"after": "\0"}, "after"), ({"after": "No"}, "after"),
        ]:  # fmt: skip
            reply = await client.get("/v1/adapters", params=params)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_versions_come_in_pages_newest_first(tmp_path, registry_url: str):
    async with (
        running_service(tmp_path, database_url=registry_url) as service,
        service.client("acme:tenant") as client,
    ):
        for number in range(5):
            await service.registry.register_version(
                "acme", "legal", upload(str(number)), FINGERPRINT
            )
        await service.registry.set_alias("acme", "legal", "beta", 2)
        await service.registry.delete_version("acme", "legal", 4)
        path = "/v1/adapters/legal/versions"
        whole = (await client.get(path)).json()
        assert "next" not in whole
        assert [(v["version"], v["aliases"]) for v in whole["data"]] == [
            (5, ["default"]), (3, []), (2, ["beta"]), (1, []),
        ]  # fmt: skip
        versions: list[dict[str, Any]] = []
        sizes: list[int] = []
        page: dict[str, Any] = {"next": ""}
        while "next" in page:
            params = {"limit": 3, "after": page["next"]}
            page = (await client.get(path, params=params)).json()
            versions += page["data"]
            sizes.append(len(page["data"]))
        assert (versions, sizes) == (whole["data"], [3, 1])
        # A version that is gone meanwhile is no hole, and what is not there ends the list.
        assert [v["version"] for v in (await client.get(f"{path}?after=4")).json()["data"]] == [
            3, 2, 1,
        ]  # fmt: skip
        assert (await client.get(f"{path}?after=1")).json() == {"data": []}
        for params, param in [
            ({"limit": 0}, "limit"), ({"limit": 1001}, "limit"), ({"after": "\0"}, "after"),
            ({"after": "x"}, "after"), ({"after": "0"}, "after"), ({"after": str(2**31)}, "after"),
            ({"after": "-1"}, "after"), ({"after": "9" * 65}, "after"),
        ]:  # fmt: skip
            reply = await client.get(path, params=params)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_without_a_limit_a_page_has_a_hundred_versions(tmp_path):
    async with running_service(tmp_path) as service, service.client("acme:tenant") as client:
        for number in range(101):
            await service.registry.register_version(
                "acme", "legal", upload(str(number)), FINGERPRINT
            )
        first = (await client.get("/v1/adapters/legal/versions")).json()
        assert [v["version"] for v in first["data"]] == list(range(101, 1, -1))
        path = f"/v1/adapters/legal/versions?after={first['next']}"
        rest = (await client.get(path)).json()
        assert [v["version"] for v in rest["data"]] == [1] and "next" not in rest
