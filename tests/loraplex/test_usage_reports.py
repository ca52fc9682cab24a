"""Usage over HTTP: sums equal what replies said, for whom they concern."""

import asyncio
import csv
import io
from datetime import UTC, datetime, timedelta

import pytest

from engine.messages import ChoiceDelta, RequestOutput
from tests.support.service import running_service

pytestmark = pytest.mark.anyio

COUNTS = ("prompt_tokens", "completion_tokens")


async def test_sums_equal_what_replies_said(tmp_path, registry_url: str):
    async with running_service(tmp_path, database_url=registry_url) as service:
        service.engine.script = lambda request: [7] * (len(request.prompt_token_ids) % 5 + 1)
        await service.upload("legal", seed=1)
        await service.upload("legal", seed=2)
        said: dict[tuple[str, str, int | None], list[dict[str, int]]] = {}
        asked = [
            ("acme", "legal", ("legal", 2)), ("acme", "legal@1", ("legal", 1)),
            ("acme", "base", ("base", None)), ("zen", "base", ("base", None)),
        ]  # fmt: skip
        for number in range(12):
            tenant, model, (adapter, version) = asked[number % len(asked)]
            body = {"model": model, "prompt": "x" * (number + 1), "max_tokens": 9}
            async with service.client(f"{tenant}:inference") as client:
                reply = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            said.setdefault((tenant, adapter, version), []).append(reply["usage"])
        await service.usage("acme", 9)
        await service.usage("zen", 3)
        async with service.client("admin") as admin:
            report = (await admin.get("/admin/usage?group_by=tenant,adapter")).json()
            ours = (await admin.get("/admin/usage?group_by=&tenant=zen")).json()["data"]
            for_acme = (await admin.get("/t/acme/v1/usage?group_by=adapter")).json()["data"]
        found = {
            (row["tenant"], row["adapter"], row["version"]): (
                row["requests"], row["prompt_tokens"], row["completion_tokens"],
            )
            for row in report["data"]
        }  # fmt: skip
        assert found == {
            key: (len(usages), *(sum(u[count] for u in usages) for count in COUNTS))
            for key, usages in said.items()
        }
        assert [row["requests"] for row in ours] == [3]
        assert {row["requests"] for row in for_acme} == {3} and len(for_acme) == 3


async def test_engine_seconds_of_a_calls_requests_are_its_rows(tmp_path, registry_url: str):
    async with running_service(tmp_path, database_url=registry_url) as service:
        body = {"model": "base", "prompt": ["x", "y"], "max_tokens": 2}
        async with service.client() as client:
            call = asyncio.create_task(client.post("/v1/completions", json=body))
            async with asyncio.timeout(10):
                while len(service.engine.open_requests) < 2:  # noqa: ASYNC110 - nothing tells when
                    await asyncio.sleep(0.005)
            first, second = service.engine.open_requests
            for request, seconds, reason in (
                (first, 0.25, None), (second, 0.5, None), (first, 1.0, "length"),
                (second, 2.0, "length"),
            ):  # fmt: skip
                delta = ChoiceDelta(0, [7], finish_reason=reason)
                service.engine.push(
                    RequestOutput(
                        request, [delta], engine_seconds=seconds, finished=reason is not None
                    )
                )
            assert (await call).status_code == 200
        [row] = await service.usage()
        assert row.engine_seconds == pytest.approx(3.0)
        async with service.client("acme:tenant") as client:
            [total] = (await client.get("/v1/usage")).json()["data"]
        assert total["engine_seconds"] == pytest.approx(3.0)


async def test_a_tenant_sees_its_own_usage_and_a_table_of_it(tmp_path):
    async with running_service(tmp_path) as service:
        service.engine.script = lambda request: [7]
        body = {"model": "base", "prompt": "x"}
        for tenant in ("acme", "zen", "zen"):
            async with service.client(f"{tenant}:inference") as client:
                assert (await client.post("/v1/completions", json=body)).status_code == 200
        await service.usage("zen", 2)
        await service.usage("acme", 1)
        async with service.client("zen:tenant") as client:
            [row] = (await client.get("/v1/usage")).json()["data"]
            assert (row["requests"], row["adapter"], row["tenant"]) == (2, "base", None)
            hour = datetime.fromisoformat(row["period"])
            assert timedelta(0) <= datetime.now(UTC) - hour < timedelta(hours=1, minutes=1)
            table = await client.get("/v1/usage?format=csv")
            assert table.headers["content-type"].startswith("text/csv")
            [cells] = csv.DictReader(io.StringIO(table.text))
            assert cells == {k: "" if v is None else str(v) for k, v in row.items()}
            later = (datetime.now(UTC) + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
            future = f"/v1/usage?since={later}&until=2999-01-01T00:00:00Z"
            assert (await client.get(future)).json()["data"] == []
            assert (await client.get("/t/acme/v1/usage")).status_code == 404
            assert (await client.get("/admin/usage")).status_code == 403
        async with service.client("zen:inference") as client:
            assert (await client.get("/v1/usage")).status_code == 403


BAD = [
    ("since=2030-01-01T00:00:00Z&until=2029-01-01T00:00:00Z", "since"),
    ("since=2030-01-01T00:00:00", "since"),
    ("since=yesterday", "since"),
    ("until=0001-01-01T00:00:00Z", "until"),
    ("since=0001-01-01T00:00:00%2B12:00", "since"),
    ("group_by=color", "group_by"),
    ("group_by=" + "x" * 65, "group_by"),
    ("format=xml", "format"),
]


async def test_a_wrong_question_is_answered_with_the_parameter_at_fault(tmp_path):
    async with running_service(tmp_path) as service:
        async with service.client("acme:tenant") as client:
            for query, param in BAD:
                reply = await client.get(f"/v1/usage?{query}")
                error = reply.json()["error"]
                assert (reply.status_code, error["param"]) == (400, param), (query, error)
        async with service.client("admin") as admin:
            for query, param in BAD:
                reply = await admin.get(f"/admin/usage?{query}")
                assert (reply.status_code, reply.json()["param"]) == (400, param), query
            assert (await admin.get("/admin/usage?tenant=%00")).status_code < 500
