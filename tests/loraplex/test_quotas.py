"""Quotas over HTTP: set by an admin, held to at once."""

from typing import Any

import httpx
import pytest

from adapter_store.registry.records import Quota
from engine.errors import RequestRefused
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


@pytest.mark.usefixtures("standing_minute")
async def test_rates_are_on_every_reply_and_refuse_before_any_work(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        service.engine.script = lambda request: [7, 8, 9]
        body = {"model": "base", "prompt": "abc", "max_tokens": 10}
        assert "x-ratelimit-limit-requests" not in (
            (await client.post("/v1/completions", json=body)).headers
        )
        await service.registry.set_quota(
            "acme", Quota(requests_per_minute=3, tokens_per_minute=1000)
        )
        seen = []
        for stream in (False, True, False):
            reply = await client.post("/v1/completions", json=body | {"stream": stream})
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-ratelimit-limit-requests"] == "3"
            assert reply.headers["x-ratelimit-limit-tokens"] == "1000"
            assert {"x-ratelimit-reset-requests", "x-ratelimit-reset-tokens"} <= set(reply.headers)
            seen.append(int(reply.headers["x-ratelimit-remaining-requests"]))
        assert seen == [2, 1, 0]
        asked = len(service.engine.requests)
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("request_rate_exceeded", "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(service.engine.requests) == asked
        told = await service.engine.telemetry(with_totals=True)
        assert told.totals is not None
        assert {t.adapter: t.refused for t in told.totals.adapters if t.tenant == "acme"} == {
            None: {"request_rate_exceeded": 1}
        }


@pytest.mark.usefixtures("standing_minute")
@pytest.mark.parametrize(
    ("path", "good"),
    [
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_a_call_with_a_mistake_has_taken_its_request_and_the_next_one_no_work(
    tmp_path, path: str, good: dict[str, Any]
):
    async with running_service(tmp_path) as service, service.client() as client:
        service.engine.script = lambda request: [7]
        await service.registry.set_quota("acme", Quota(requests_per_minute=3))

        async def asked(**fields: Any) -> httpx.Response:
            return await client.post(f"/v1/{path}", json={"model": "base", **good, **fields})

        mistake = {"min_tokens": 5, "max_tokens": 4}
        for _ in range(2):
            assert (await asked(**mistake)).status_code == 400
        answered = await asked()
        assert answered.headers["x-ratelimit-remaining-requests"] == "0", answered.text
        # Now what is wrong is not looked for any more.
        for fields in ({}, mistake):
            refused = await asked(**fields)
            code = refused.json()["error"]["code"]
            assert (refused.status_code, code) == (429, "request_rate_exceeded")


@pytest.mark.usefixtures("standing_minute")
async def test_tokens_count_as_replies_say_and_refused_or_aborted_calls_give_theirs_back(tmp_path):
    async with running_service(tmp_path) as service, service.client() as client:
        limiter = service.app.state.services.limiter
        await service.registry.set_quota("acme", Quota(tokens_per_minute=1000))
        body = {"model": "base", "prompt": "abc", "max_tokens": 40, "n": 2}

        async def remaining() -> int:
            await limiter.__aexit__(None, None, None)  # what is being given back is
            acme = await service.registry.get_tenant("acme")
            admission = await limiter.admit(acme)
            await limiter.reserve(admission, acme, 1)
            admission.cancel()
            await limiter.__aexit__(None, None, None)
            return int(admission.headers["x-ratelimit-remaining-tokens"]) + 1

        assert await remaining() == 1000
        service.engine.script = lambda request: [7, 8]
        reply = await client.post("/v1/completions", json=body)
        used = reply.json()["usage"]["total_tokens"]
        num_prompt = reply.json()["usage"]["prompt_tokens"]
        assert reply.headers["x-ratelimit-remaining-tokens"] == str(1000 - num_prompt - 2 * 40)
        assert await remaining() == 1000 - used
        service.engine.refusal = RequestRefused("queue_full", "full", limit=1)
        assert (await client.post("/v1/completions", json=body)).status_code == 429
        assert await remaining() == 1000 - used
        service.engine.refusal = None
        service.engine.script = lambda request: None
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            assert stream.status_code == 200
            (request_id,) = service.engine.open_requests
            service.engine.say(request_id, [7])
            assert await anext(stream.aiter_text())
        rows = await service.usage(num_rows=2)
        assert await remaining() == 1000 - sum(r.prompt_tokens + r.output_tokens for r in rows)


@pytest.mark.usefixtures("standing_minute")
async def test_counts_of_tokens_and_exports_have_a_rate_of_their_own(tmp_path):
    async with (
        running_service(tmp_path) as service,
        service.client() as caller,
        service.client("acme:tenant") as owner,
    ):
        await service.upload("legal")
        service.engine.script = lambda request: [7]

        async def asked(what: str) -> httpx.Response:
            match what:
                case "tokenize":
                    return await caller.post("/tokenize", json={"prompt": "abc"})
                case "detokenize":
                    return await caller.post("/detokenize", json={"tokens": [7]})
                case "mistake":
                    return await caller.post("/tokenize", json={"prompt": 5})
                case "export":
                    return await owner.get("/v1/adapters/legal/versions/1/export")
                case _:
                    body = {"model": "base", "prompt": "x"}
                    return await caller.post("/v1/completions", json=body)

        free = await asked("tokenize")
        assert (free.status_code, "x-ratelimit-limit-requests" in free.headers) == (200, False)
        await service.registry.set_quota("acme", Quota(requests_per_minute=4))
        statuses = [
            (await asked(what)).status_code
            for what in ("tokenize", "detokenize", "mistake", "export")
        ]
        assert statuses == [200, 200, 400, 200]
        for what in ("tokenize", "detokenize", "mistake", "export"):
            refused = await asked(what)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (429, "request_rate_exceeded"), what
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        answered = await asked("completion")
        assert answered.headers["x-ratelimit-remaining-requests"] == "3"
        async with service.client("zen:inference") as other:
            told = await other.post("/tokenize", json={"prompt": "abc"})
        assert told.status_code == 200
        await service.registry.set_quota("acme", Quota(requests_per_minute=9))
        assert (await asked("detokenize")).headers["x-ratelimit-remaining-requests"] == "4"
