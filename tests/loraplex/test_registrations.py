"""Registration by reference over HTTP: taken on with a 202, followed by its URL."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter_store.references.policy import SourcePolicy
from adapter_store.references.sources import AdapterSources
from adapter_store.registry.registrations import Registrations
from adapter_store.registry.session import Database
from adapter_store.registry.transactions import utc_now
from loraplex.adapters.registrar import Registrar, owner_of
from loraplex.settings import SourceSettings
from tests.support.fake_hub import COMMIT, FakeHub, FakeResolver, Reply, fake_hub
from tests.support.registry import database_url
from tests.support.service import TestService, adapter_files, running_service

pytestmark = pytest.mark.anyio

WEIGHTS_PATH = f"/org/name/resolve/{COMMIT}/adapter_model.safetensors"


@contextlib.asynccontextmanager
async def service_and_hub(
    root: Path, **settings: Any
) -> AsyncGenerator[tuple[TestService, FakeHub]]:
    """A service that may fetch from a fake hub, and from `root / "shared"`."""
    (root / "shared").mkdir(exist_ok=True)
    async with fake_hub() as hub:
        hub.publish("org/name", *adapter_files())
        policy = SourcePolicy(hub_url=hub.origin(), private_hosts=("hub.test",))
        sources = AdapterSources(
            policy, roots=[root / "shared"], own_bucket="own-bucket",
            resolve=FakeResolver({"hub.test": ["127.0.0.1"]}),
        )  # fmt: skip
        async with running_service(
            root, sources=sources, source_settings=SourceSettings(**settings)
        ) as service:
            yield service, hub


async def begin(
    client: httpx.AsyncClient, source: str, name: str = "a", path: str = "", **headers: str
) -> httpx.Response:
    body = {"name": name, "source": source}
    return await client.post(f"{path}/v1/adapters", json=body, headers=headers)


async def ended(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    return await reached(client, url, "ready", "failed")


async def reached(client: httpx.AsyncClient, url: str, *states: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            found = (await client.get(url)).json()
            if found["state"] in states:
                return found
            await asyncio.sleep(0.01)


async def test_a_reference_becomes_a_version_that_answers(tmp_path: Path):
    async with (
        service_and_hub(tmp_path) as (service, hub),
        service.client("acme:tenant") as client,
    ):
        reply = await begin(client, "hf://org/name")
        assert reply.status_code == 202, reply.text
        begun = reply.json()
        assert reply.headers["location"] == begun["url"]
        assert (begun["state"], begun["source"]) == ("queued", "hf://org/name@main")
        ready = await ended(client, begun["url"])
        assert (ready["state"], ready["version"], ready["unchanged"]) == ("ready", 1, False)
        assert ready["source"] == f"hf://org/name@{COMMIT}"
        config, weights = adapter_files()
        versions = (await client.get("/v1/adapters/a/versions")).json()["data"]
        assert versions[0]["digest"] == ready["digest"]
        assert versions[0]["report"]["base_match"]["declared"] == "tiny"
        assert await service.blobs.list() == [ready["digest"]]
        assert list((tmp_path / "uploads").iterdir()) == []
        # Only the two files were asked for: nothing of the base that the config names.
        assert hub.paths == ["/org/name/resolve/main/adapter_config.json", WEIGHTS_PATH]

        again = await ended(client, (await begin(client, "hf://org/name")).json()["url"])
        assert (again["state"], again["version"], again["unchanged"]) == ("ready", 1, True)
        uploaded = await client.post(
            "/v1/adapters", data={"name": "a"}, files={"config": config, "weights": weights}
        )
        assert uploaded.json()["unchanged"] is True
        listed = (await client.get("/v1/registrations")).json()["data"]
        assert [found["id"] for found in listed] == [again["id"], begun["id"]]
        first = (await client.get("/v1/registrations?limit=1")).json()
        assert (first["data"], first["next"]) == (listed[:1], again["id"])
        rest = (await client.get(f"/v1/registrations?after={first['next']}")).json()
        assert rest == {"data": listed[1:]}


async def test_a_client_that_goes_away_leaves_its_registration_at_work(tmp_path: Path):
    async with service_and_hub(tmp_path) as (service, hub):
        whole = hub.replies[WEIGHTS_PATH].body
        hub.replies[WEIGHTS_PATH] = Reply(whole[:64], length=len(whole), stalls=True)
        async with service.client("acme:tenant") as client:
            url = (await begin(client, "hf://org/name")).json()["url"]
            found = await reached(client, url, "fetching")
        assert found["version"] is None
        async with service.client("acme:tenant") as client:
            listed = (await client.get("/v1/registrations")).json()["data"]
            assert [job["state"] for job in listed] == ["fetching"]
    # And a stop of the service ends it with a reason.
    async with registrations(tmp_path) as afterwards:
        failed = await afterwards.get("acme", found["id"])
        assert (failed.state, failed.error_code) == ("failed", "interrupted")
    assert list((tmp_path / "uploads").iterdir()) == []


@contextlib.asynccontextmanager
async def registrations(root: Path) -> AsyncGenerator[Registrations]:
    """Those of the service that ran in the folder, as its successor sees them."""
    database = Database(database_url(root))
    yield Registrations(database, owner_of(str(root / "uploads")), utc_now)
    await database.close()


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("https://huggingface.co/org/name", 400, "invalid_source"),
        ("hf://org/../name", 400, "invalid_source"),
        ("s3://own-bucket/x", 403, "source_not_allowed"),
        ("file:///etc", 403, "source_not_allowed"),
        ("hf://" + "x" * 5000, 400, "invalid_source"),
    ],
)
async def test_what_may_not_be_named_is_refused_before_anything_starts(
    tmp_path: Path, source: str, status: int, code: str
):
    async with (
        service_and_hub(tmp_path) as (service, hub),
        service.client("acme:tenant") as client,
    ):
        reply = await begin(client, source)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        assert reply.json()["error"]["param"] == "source"
        assert (await client.get("/v1/registrations")).json()["data"] == []
        assert hub.requests == []


async def test_malformed_orders_are_refused_by_field(tmp_path: Path):
    async with (
        service_and_hub(tmp_path) as (service, _),
        service.client("acme:tenant") as client,
        service.client("acme:inference") as other,
    ):
        for body, status, param in (
            ({"source": "hf://org/name"}, 400, "name"),
            ({"name": "a"}, 400, "source"),
            ({"name": "a", "source": "hf://org/name", "token": "x"}, 400, "token"),
            ({"name": "a", "source": 5}, 400, "source"),
            ({"name": "tiny", "source": "hf://org/name"}, 400, None),
            ({"name": "../a", "source": "hf://org/name"}, 400, None),
            ({"name": "a", "source": "x" * 200_000}, 413, None),
        ):
            reply = await client.post("/v1/adapters", json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), body
        assert (await begin(other, "hf://org/name")).status_code == 403
        assert (await other.get("/v1/registrations")).status_code == 403
        missing = await client.get("/v1/registrations/reg_0")
        assert missing.json()["error"]["code"] == "registration_not_found"


async def test_what_fails_on_the_way_says_why_and_leaves_nothing(tmp_path: Path):
    async with (
        service_and_hub(tmp_path) as (service, hub),
        service.client("acme:tenant") as client,
    ):
        config, weights = adapter_files()
        hub.publish("org/pickle", config, b"\x80\x04 a pickle")
        hub.publish("org/foreign", config.replace(b"LORA", b"LOHA"), weights)
        for repository, code in (
            ("org/none", "source_not_found"),
            ("org/foreign", "unsupported_peft_type"),
            ("org/pickle", "not_safetensors"),
        ):
            failed = await ended(client, (await begin(client, f"hf://{repository}")).json()["url"])
            assert failed["state"] == "failed"
            assert failed["error"]["message"]
            assert failed["error"]["code"] == code
        assert (await client.get("/v1/adapters")).json()["data"] == []
        assert await service.blobs.list() == []
        assert list((tmp_path / "uploads").iterdir()) == []


async def test_admins_register_files_under_the_root_for_a_tenant(tmp_path: Path):
    async with service_and_hub(tmp_path) as (service, _), service.client("admin") as admin:
        folder = tmp_path / "shared" / "one"
        folder.mkdir()
        config, weights = adapter_files()
        (folder / "adapter_config.json").write_bytes(config)
        (folder / "adapter_model.safetensors").write_bytes(weights)
        reply = await begin(admin, f"file://{folder}", path="/t/acme")
        assert reply.status_code == 202, reply.text
        assert reply.json()["url"].startswith("/t/acme/v1/registrations/reg_")
        ready = await ended(admin, reply.json()["url"])
        assert ready["state"] == "ready"
        outside = await begin(admin, f"file://{tmp_path}/blobs", path="/t/acme")
        failed = await ended(admin, outside.json()["url"])
        assert failed["error"]["code"] == "source_not_allowed"
        async with service.client("zen:tenant") as stranger:
            assert (await stranger.get(ready["url"])).status_code == 404
            own = f"/v1/registrations/{ready['id']}"
            assert (await stranger.get(own)).status_code == 404


async def test_a_repeated_call_with_its_idempotency_key_makes_no_second_version(tmp_path: Path):
    async with (
        service_and_hub(tmp_path) as (service, hub),
        service.client("acme:tenant") as client,
    ):
        key = {"Idempotency-Key": "once"}
        first = await ended(client, (await begin(client, "hf://org/name", **key)).json()["url"])
        await service.upload("a", seed=1)
        again = await ended(client, (await begin(client, "hf://org/name", **key)).json()["url"])
        assert (first["version"], again["version"]) == (1, 1)
        assert (await client.get("/v1/adapters/a")).json()["aliases"] == {"default": 2}
        hub.publish("org/name", *adapter_files(seed=2))  # the branch moved: another request
        other = await ended(client, (await begin(client, "hf://org/name", **key)).json()["url"])
        assert other["error"]["code"] == "idempotency_key_reused"


async def cli(service: TestService, *arguments: str, key: str = "acme:tenant") -> tuple[int, str]:
    """What `loraplex adapters register` prints, and how it exits."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loraplex", "adapters", "register", *arguments,
        "--url", service.url, "--api-key", service.keys[key],
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": "platform:."}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_the_command_waits_for_the_version_or_says_why_there_is_none(tmp_path: Path):
    async with service_and_hub(tmp_path) as (service, _):
        (good, said), (bad, why), (begun, identity) = await asyncio.gather(
            cli(service, "a", "hf://org/name"),
            cli(service, "b", "hf://org/none"),
            cli(service, "c", "hf://org/name", "--no-wait", "--json"),
        )
        assert good == 0
        assert "a@1 registered, digest" in said and COMMIT in said
        assert bad == 1
        assert "(source_not_found)" in why
        assert begun == 0
        assert json.loads(identity)["state"] == "queued"


async def test_the_api_page_tells_of_both_bodies(tmp_path: Path):
    async with service_and_hub(tmp_path) as (service, _), service.client(None) as client:
        document = (await client.get("/docs/openapi.json")).json()
        content = document["paths"]["/v1/adapters"]["post"]["requestBody"]["content"]
        assert set(content) == {"multipart/form-data", "application/json"}
        assert content["application/json"]["schema"]["required"] == ["name", "source"]


async def test_a_tenant_has_so_many_under_way_and_the_others_go_on(tmp_path: Path):
    async with (
        service_and_hub(tmp_path, max_tenant_registrations=2, max_parallel_sources=2) as (
            service,
            hub,
        ),
        service.client("acme:tenant") as client,
        service.client("zen:tenant") as other,
    ):
        whole = hub.replies[WEIGHTS_PATH]
        hub.replies[WEIGHTS_PATH] = Reply(whole.body[:64], length=len(whole.body), stalls=True)
        for _ in range(2):
            assert (await begin(client, "hf://org/name")).status_code == 202
        third = await begin(client, "hf://org/name")
        assert (third.status_code, third.json()["error"]["code"]) == (429, "too_many_registrations")
        assert "retry-after" in third.headers
        async with asyncio.timeout(20):
            while len(hub.requests) < 2:  # noqa: ASYNC110 - the hub is a stranger
                await asyncio.sleep(0.005)
        hub.replies[WEIGHTS_PATH] = whole
        ready = await ended(other, (await begin(other, "hf://org/name")).json()["url"])
        assert ready["state"] == "ready"


async def test_a_new_process_fails_what_its_killed_predecessor_left(tmp_path: Path):
    async with service_and_hub(tmp_path) as (service, _):
        owner = owner_of(str(tmp_path / "uploads"))
        of_killed = Registrations(service.registry.database, owner, utc_now)
        left = await of_killed.create("acme", "a", "hf://org/name@main", max_unfinished=9)
    async with registrations(tmp_path) as afterwards:
        registrar = Registrar(afterwards, SourceSettings())
        async with registrar, asyncio.timeout(20):
            while True:
                found = await afterwards.get("acme", left.registration_id)
                if found.state == "failed":
                    break
                await asyncio.sleep(0.01)
        assert found.error_code == "interrupted"


def test_an_owner_is_a_process_and_its_successors():
    assert owner_of("/data/uploads/api-0") == owner_of("/data/uploads/api-0")
    assert owner_of("/data/uploads/api-0") != owner_of("/data/uploads/api-1")
