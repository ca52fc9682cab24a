"""Quotas over HTTP: set by an admin, held to at once."""

import pytest

from adapter_store.registry.records import Quota
from tests.support.service import adapter_files, running_service

pytestmark = pytest.mark.anyio


async def test_an_admin_sets_shows_and_lifts_a_quota(tmp_path, registry_url: str):
    async with (
        running_service(tmp_path, database_url=registry_url) as service,
        service.client("admin") as admin,
    ):
        none = (await admin.get("/admin/tenants/acme")).json()
        assert set(none["quota"].values()) == {None} and none["weight"] == 1.0
        body = {"requests_per_minute": 9, "max_concurrent": 2, "max_queued": 5, "weight": 3.0}
        reply = await admin.put("/admin/tenants/acme/quota", json=body)
        assert reply.status_code == 200, reply.text
        shown = (await admin.get("/admin/tenants/acme")).json()
        assert shown == reply.json()
        assert shown["weight"] == body.pop("weight")
        assert {k: v for k, v in shown["quota"].items() if v is not None} == body
        lifted = (await admin.put("/admin/tenants/acme/quota", json={})).json()
        assert lifted == none | {"weight": 3.0}


BAD = [
    ({"max_rank": 0}, "max_rank"),
    ({"max_rank": -1}, "max_rank"),
    ({"max_rank": 1.5}, "max_rank"),
    ({"max_rank": "8"}, "max_rank"),
    ({"tokens_per_minute": 2**63}, "tokens_per_minute"),
    ({"weight": 0}, "weight"),
    ({"unknown": 1}, "unknown"),
    ([], None),
]


async def test_a_wrong_quota_is_a_problem_that_names_the_field(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        for body, param in BAD:
            reply = await admin.put("/admin/tenants/acme/quota", json=body)
            problem = reply.json()
            assert (reply.status_code, problem.get("param")) == (400, param), (body, problem)
        assert (await admin.put("/admin/tenants/nobody/quota", json={})).status_code == 404
        async with service.client("acme:tenant") as tenant:
            refused = await tenant.put("/admin/tenants/acme/quota", json={})
        assert refused.status_code == 403
        assert (await service.registry.get_tenant("acme")).quota == Quota()


async def test_the_engine_is_told_concurrency_queue_and_weight_at_once(tmp_path):
    async with running_service(tmp_path) as service, service.client("admin") as admin:
        service.engine.script = lambda request: [7]
        body = {"model": "base", "prompt": "x"}
        async with service.client() as client:
            await client.post("/v1/completions", json=body)
            quota = {"max_concurrent": 2, "max_queued": 5, "weight": 3.0}
            await admin.put("/admin/tenants/acme/quota", json=quota)
            await client.post("/v1/completions", json=body)
        before, after = service.engine.requests.values()
        assert (before.max_concurrent, before.max_queued, before.weight) == (None, None, 1.0)
        assert (after.max_concurrent, after.max_queued, after.weight) == (2, 5, 3.0)


async def test_an_upload_over_the_quota_is_refused_and_leaves_no_file(tmp_path):
    async with running_service(tmp_path) as service:
        await service.registry.set_quota("acme", Quota(max_rank=2))
        config, weights = adapter_files(rank=4)
        async with service.client("acme:tenant") as client:
            reply = await client.post(
                "/v1/adapters",
                data={"name": "big"},
                files={"config": ("c", config), "weights": ("w", weights)},
            )
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "rank_quota_exceeded")
        assert await service.blobs.list() == []
        assert await service.registry.list_adapters("acme") == []
