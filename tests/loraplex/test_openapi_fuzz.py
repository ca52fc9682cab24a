"""Requests made from our own OpenAPI document, well-formed and not: none is a server error."""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from adapter_store.references.policy import SourcePolicy
from adapter_store.references.sources import AdapterSources
from engine.engine_stats import EngineStats
from tests.support.fake_engine import FakeEngine
from tests.support.service import TestService, adapter_files
from tests.support.threaded_service import threaded_service

KNOWN = {
    "name": ["good"], "alias": ["default"], "version": [1, "1"],
    "model": ["base", "good", "good@1", "good:default"],
}  # fmt: skip
"""What path parameters hold half of the time, so that handlers find what they look for."""


IDLE = EngineStats(
    running=0, waiting=0, kv_blocks_used=0, kv_blocks_total=64, slots_used=0, slots_total=2,
    preemptions=0, steps=0, prompt_tokens=0, cached_tokens=0, output_tokens=0, host_adapters=0,
    host_adapter_bytes=0, resident=[],
)  # fmt: skip


@dataclass
class Target:
    """The service, and what all requests are made from."""

    service: TestService
    session: requests.Session
    operations: dict[str, Any]
    """By method and path, as in `GET /v1/models`."""
    tenant: str = "acme"

    def call(self, method: str, path: str, **options: Any) -> requests.Response:
        return self.session.request(method, self.service.url + path, timeout=20, **options)

    def restore(self) -> str:
        """Have a tenant, its adapter and a key, whatever was deleted; return the key."""
        admin = {"authorization": f"Bearer {self.service.keys['admin']}"}
        quota = {"json": {}, "headers": admin}
        while self.call("PUT", f"/admin/tenants/{self.tenant}/quota", **quota).status_code == 404:
            self.tenant += "e"  # the name of one deleted stays its usage's
            created = {"json": {"name": self.tenant}, "headers": admin}
            self.call("POST", "/admin/tenants", **created).raise_for_status()
        self.call("POST", f"/admin/tenants/{self.tenant}/resume", headers=admin)
        config, weights = adapter_files()
        self.call(
            "POST", f"/t/{self.tenant}/v1/adapters", data={"name": "good"}, headers=admin,
            files={"config": ("c", config), "weights": ("w", weights)},
        ).raise_for_status()  # fmt: skip
        key = self.call(
            "POST", f"/admin/tenants/{self.tenant}/keys", headers=admin,
            json={"scopes": ["inference", "tenant"]},
        )  # fmt: skip
        key.raise_for_status()
        return key.json()["key"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Generator[Target]:
    root: Path = tmp_path_factory.mktemp("service")
    nothing_outside = AdapterSources(SourcePolicy(public_sources=False))
    engine = FakeEngine(lambda request: [5, 6])
    engine.statistics = IDLE
    with (
        threaded_service(root, engine, sources=nothing_outside) as service,
        requests.Session() as session,
    ):
        document = session.get(f"{service.url}/docs/openapi.json", timeout=20)
        document.raise_for_status()
        schema = schemathesis.openapi.from_dict(document.json())
        operations = [result.ok() for result in schema.get_all_operations()]
        by_label = {f"{op.method.upper()} {op.path}": op for op in operations}
        yield Target(service, session, by_label)


@st.composite
def cases(draw: st.DrawFn, operation: Any, mode: GenerationMode, tenant: str) -> Any:
    case = draw(operation.as_strategy(generation_mode=mode))
    known = {**KNOWN, "tenant_name": [tenant]}
    for name in case.path_parameters or {}:
        if name in known and draw(st.booleans()):
            case.path_parameters[name] = draw(st.sampled_from(known[name]))
    return case


def probe(target: Target, label: str, key: str, max_examples: int) -> list[str]:
    """The requests of an operation that were a server error, each with its answer."""
    found: list[str] = []
    operation = target.operations[label]
    headers = {"authorization": f"Bearer {key}"}
    for mode in GenerationMode:

        @hypothesis.settings(
            max_examples=max_examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(cases(operation, mode, target.tenant))
        def run(case: Any) -> None:
            reply = case.call(
                base_url=target.service.url, session=target.session, headers=headers, timeout=20
            )
            if reply.status_code >= 500:
                found.append(f"{case.as_curl_command()}: {reply.status_code} {reply.text[:300]}")

        try:
            run()
        except hypothesis.errors.Unsatisfiable:  # what takes nothing cannot be called wrongly
            assert mode is GenerationMode.NEGATIVE, label
    return found


def test_every_operation_of_the_document_is_reached(target: Target):
    assert len(target.operations) > 60
    assert {"POST /v1/chat/completions", "POST /admin/tenants", "GET /health/ready"} <= (
        target.operations.keys()
    )


def labels(target: Target) -> list[str]:
    """All but those under `/t/{tenant}`, which are the same handlers again."""
    return [label for label in target.operations if " /t/{tenant_name}/" not in label]


def test_no_request_of_an_admin_or_a_tenant_is_a_server_error(target: Target):
    failed: list[str] = []
    for label in labels(target):
        key = target.restore()
        failed += probe(target, label, key, 4)
        if " /v1/" not in label:
            failed += probe(target, label, target.service.keys["admin"], 4)
    assert not failed, "\n".join(failed)


@pytest.mark.slow
def test_nor_is_one_of_many_more(target: Target):
    failed: list[str] = []
    for label in labels(target):
        key = target.restore()
        is_tenants = " /v1/" in label
        failed += probe(target, label, key if is_tenants else target.service.keys["admin"], 20)
    assert not failed, "\n".join(failed)
