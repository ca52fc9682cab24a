"""What admins let a tenant register by reference, while the service runs."""

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from adapter_store.references.policy import HubCredential, S3Credential, SourcePolicy
from adapter_store.references.sources import AdapterSources
from tests.loraplex.test_registrations import begin, ended
from tests.support.fake_hub import FakeResolver, fake_hub
from tests.support.service import TestService, adapter_files, running_service

pytestmark = pytest.mark.anyio

PATH = "/admin/tenants/acme/sources"
ORG = "hf://org"
LAKE = S3Credential(
    access_key_id_env="I", secret_access_key_env="K", access_key_id="id", secret_access_key="lake-s"
)


@contextlib.asynccontextmanager
async def closed_service(root: Path, url: str) -> AsyncGenerator[TestService]:
    """A service on which nothing public may be registered, and a hub that wants a token."""
    async with fake_hub() as hub:
        hub.publish("org/name", *adapter_files())
        policy = SourcePolicy(
            public_sources=False, hub_url=hub.origin(), private_hosts=("hub.test",),
            credentials={"hub": HubCredential(token_env="T", token="hub-secret"), "lake": LAKE},
        )  # fmt: skip
        resolve = FakeResolver({"hub.test": ["127.0.0.1"]})
        sources = AdapterSources(policy, own_bucket="own-bucket", resolve=resolve)
        async with running_service(root, sources=sources, database_url=url) as service:
            yield service


async def test_a_source_may_be_used_from_when_it_is_allowed_until_it_is_withdrawn(
    tmp_path: Path, registry_url: str
):
    async with (
        closed_service(tmp_path, registry_url) as service,
        service.client("admin") as admin,
        service.client("acme:tenant") as acme,
        service.client("zen:tenant") as zen,
    ):
        assert (await begin(acme, "hf://org/name")).status_code == 403
        body = {"source": ORG, "credential": "hub"}
        allowed = (await admin.put(PATH, json=body)).raise_for_status().json()
        assert allowed["data"] == [{**body, "granted_in": "registry"}]
        assert allowed["credentials"] == ["hub", "lake"] and not allowed["public_sources"]
        begun = await begin(acme, "hf://org/name")
        assert begun.status_code == 202, begun.text
        assert (await ended(acme, begun.json()["url"]))["state"] == "ready"
        for client, source in ((zen, "hf://org/name"), (acme, "hf://other/name")):
            refused = await begin(client, source)
            assert refused.json()["error"]["code"] == "source_not_allowed"

        assert (await admin.delete(PATH, params={"source": ORG})).status_code == 204
        assert (await begin(acme, "hf://org/name")).status_code == 403
        assert (await admin.get(PATH)).json()["data"] == []
        log = (await admin.get("/admin/audit?tenant=acme")).json()["data"]
        assert [entry["action"] for entry in log if "source" in entry["action"]] == [
            "tenant.source.withdraw", "tenant.source.allow",
        ]  # fmt: skip
        assert "hub-secret" not in allowed.__repr__() and "secret" not in str(log)


@pytest.mark.parametrize(
    "body",
    [
        {"source": "hf://org/name"},
        {"source": "file:///x"},
        {"source": "s3://own lake"},
        {"source": "x" * 2000},
        {"source": "hf://org", "credential": "none of that name"},
        {"source": "hf://org", "credential": "lake"},
        {"source": "s3://lake", "credential": "hub"},
        {"source": 3},
        {},
    ],
)
async def test_what_can_never_be_used_is_not_granted(tmp_path: Path, body: dict[str, object]):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        reply = await admin.put(PATH, json=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["param"] in ("source", "credential")
        assert (await admin.get(PATH)).json()["data"] == []


async def test_grants_are_for_admins_and_of_tenants_that_there_are(tmp_path: Path):
    async with running_service(tmp_path) as service:
        async with service.client("acme:tenant") as tenant:
            assert (await tenant.get(PATH)).status_code == 403
            assert (await tenant.put(PATH, json={"source": ORG})).status_code == 403
        async with service.client("admin") as admin:
            path = "/admin/tenants/nobody/sources"
            for reply in (
                await admin.get(path),
                await admin.put(path, json={"source": ORG}),
                await admin.delete(path, params={"source": ORG}),
            ):
                assert reply.status_code == 404
            assert (await admin.delete(PATH, params={"source": ORG})).status_code == 400


async def test_the_stores_own_bucket_stays_closed_whatever_is_granted(
    tmp_path: Path, registry_url: str
):
    async with (
        closed_service(tmp_path, registry_url) as service,
        service.client("admin") as admin,
        service.client("acme:tenant") as acme,
    ):
        body = {"source": "s3://own-bucket", "credential": "lake"}
        (await admin.put(PATH, json=body)).raise_for_status()
        refused = await begin(acme, "s3://own-bucket/a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "source_not_allowed")


async def test_what_comes_by_reference_may_say_how_it_is_served(tmp_path: Path, registry_url: str):
    async def order(client: httpx.AsyncClient, **fields: object) -> httpx.Response:
        return await client.post(
            "/v1/adapters", json={"name": "a", "source": "hf://org/name", **fields}
        )

    async with (
        closed_service(tmp_path, registry_url) as service,
        service.client("admin") as admin,
        service.client("acme:tenant") as acme,
    ):
        (await admin.put(PATH, json={"source": ORG})).raise_for_status()
        template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        begun = await order(
            acme, chat_template=template, stop_tokens=["<|im_end|>"], defaults={"temperature": 0.2}
        )
        assert begun.status_code == 202, begun.text
        assert (await ended(acme, begun.json()["url"]))["state"] == "ready"
        version = (await acme.get("/v1/adapters/a/versions/1")).json()
        assert version["chat_template"] == template
        assert version["stop_tokens"] == ["<|im_end|>"]
        assert version["defaults"] == {"temperature": 0.2}
        for wrong, param in (
            ({"chat_template": "{% for"}, "chat_template"),
            ({"chat_template": 3}, "chat_template"),
            ({"chat_template": "x" * 70_000}, "chat_template"),
            ({"stop_tokens": ["no token of the model"]}, "stop_tokens"),
            ({"stop_tokens": "<|im_end|>"}, "stop_tokens"),
            ({"defaults": {"temperature": -1}}, "defaults"),
            ({"defaults": {"n": 2}}, "defaults"),
        ):
            refused = await order(acme, **wrong)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == param
