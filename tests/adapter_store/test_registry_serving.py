"""What a version says of how it is served: part of its identity, kept with it, resolved with it."""

import pytest

from adapter_store.errors import IdempotencyKeyReused
from adapter_store.model_ref import parse_model_ref
from adapter_store.registry.records import AS_THE_BASE, Canary, ServingDefaults
from adapter_store.registry.registry import Registry
from tests.support.registry import FINGERPRINT, open_registry, upload

pytestmark = pytest.mark.anyio

OWN = ServingDefaults(
    chat_template="{{ messages }}", stop_tokens=("<|end|>",), sampling={"temperature": 0.5}
)


async def push(registry: Registry, serving: ServingDefaults, key: str | None = None):
    return await registry.register_version(
        "acme", "support", upload("one"), FINGERPRINT, serving=serving, idempotency_key=key
    )


async def test_equal_files_with_other_defaults_are_another_version(registry_url: str):
    async with open_registry(registry_url) as registry:
        made = [await push(registry, serving) for serving in (AS_THE_BASE, OWN, OWN, AS_THE_BASE)]
        assert [(m.version, m.created) for m in made] == [
            (1, True), (2, True), (2, False), (3, True),
        ]  # fmt: skip
        shown = await registry.list_versions("acme", "support")
        assert [version.serving for version in shown] == [AS_THE_BASE, OWN, AS_THE_BASE]


async def test_whatever_leads_to_a_version_brings_its_defaults(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, AS_THE_BASE)
        await push(registry, OWN)

        async def serving_of(model: str) -> ServingDefaults:
            return (await registry.resolve("acme", parse_model_ref(model))).serving

        assert await serving_of("support") == OWN
        assert await serving_of("support@1") == AS_THE_BASE
        assert await serving_of("support@2") == OWN
        await registry.set_alias("acme", "support", "default", 1, canary=Canary(2, 1.0))
        assert await serving_of("support") == OWN


async def test_a_repeated_call_must_name_the_same_defaults(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, OWN, key="k")
        assert (await push(registry, OWN, key="k")).replayed
        with pytest.raises(IdempotencyKeyReused):
            await push(registry, AS_THE_BASE, key="k")
