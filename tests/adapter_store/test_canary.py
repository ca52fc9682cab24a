"""Canaries: by share, by key, and never back."""

from collections import Counter

import pytest

from adapter_store.errors import InvalidField, VersionInUse, VersionNotFound
from adapter_store.model_ref import ModelRef
from adapter_store.registry.canary import takes_canary
from adapter_store.registry.records import AliasChange, Canary
from adapter_store.registry.registry import Registry
from tests.support.registry import FINGERPRINT, open_registry, upload

pytestmark = pytest.mark.anyio

KEYS = [f"user-{i}" for i in range(2000)]


def test_the_share_of_keys_that_get_the_canary_is_the_share_asked_for():
    for share in (0.01, 0.1, 0.5, 0.9):
        taken = sum(takes_canary("acme/a:default", 2, share, key) for key in KEYS)
        deviation = (len(KEYS) * share * (1 - share)) ** 0.5
        assert abs(taken - len(KEYS) * share) < 4 * deviation
    assert not any(takes_canary("acme/a:default", 2, 0.0, key) for key in KEYS)
    assert all(takes_canary("acme/a:default", 2, 1.0, key) for key in KEYS)


def test_raising_the_share_moves_no_key_back():
    taken: set[str] = set()
    for share in (0.0, 0.001, 0.05, 0.0501, 0.3, 0.99, 1.0):
        now = {key for key in KEYS if takes_canary("acme/a:default", 2, share, key)}
        assert taken <= now
        taken = now


def test_another_alias_or_canary_takes_other_keys():
    def taken(alias: str, version: int) -> set[str]:
        return {key for key in KEYS if takes_canary(alias, version, 0.1, key)}

    first = taken("acme/a:default", 2)
    for other in (taken("acme/a:default", 3), taken("acme/a:beta", 2), taken("zen/a:default", 2)):
        assert len(first & other) < len(first) / 3


def test_any_text_may_be_a_key():
    for key in ("", "\0", "ü", "\ud800", "x" * 100_000):
        assert takes_canary("acme/a:default", 2, 1.0, key)


async def push(registry: Registry, *contents: str) -> None:
    for content in contents:
        await registry.register_version("acme", "a", upload(content), FINGERPRINT, publish=False)


async def shares(registry: Registry, version: int | None = None) -> dict[int, int]:
    model = ModelRef("a", version)
    found = [(await registry.resolve("acme", model, key)).version for key in KEYS[:200]]
    return dict(Counter(found))


async def test_a_canary_gets_its_share_until_the_alias_moves_on(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one", "two", "three")
        await registry.set_alias("acme", "a", "default", 1)
        moved = await registry.set_alias(
            "acme", "a", "default", 1, expect=1, canary=Canary(2, 0.25)
        )
        assert moved == AliasChange("default", 1, 1, Canary(2, 0.25))
        few = await shares(registry)
        assert set(few) == {1, 2} and 20 < few[2] < 80
        assert await shares(registry, 1) == {1: 200}
        assert (await registry.get_adapter("acme", "a")).canaries == {"default": Canary(2, 0.25)}
        [listed] = await registry.list_adapters("acme")
        assert (listed.aliases, listed.canaries) == ({"default": 1}, {"default": Canary(2, 0.25)})

        first = [(await registry.resolve("acme", ModelRef("a"), key)).version for key in KEYS[:99]]
        await registry.set_alias("acme", "a", "default", 1, canary=Canary(2, 0.5))
        second = [(await registry.resolve("acme", ModelRef("a"), key)).version for key in KEYS[:99]]
        assert all(now >= before for before, now in zip(first, second, strict=True))
        assert second.count(2) > first.count(2)

        promoted = await registry.set_alias("acme", "a", "default", 2)
        assert promoted == AliasChange("default", 2, 1)
        assert await shares(registry) == {2: 200}
        await registry.set_alias("acme", "a", "default", 2, canary=Canary(3, 0.5))
        await registry.register_version("acme", "a", upload("four"), FINGERPRINT)
        assert await shares(registry) == {4: 200}  # who publishes ends the trial
        actions = [
            entry.detail for entry in await registry.list_audit() if "canary" in entry.detail
        ]
        assert actions[0] == {
            "version": 4, "previous": 2, "canary": None, "share": None,
            "previous_canary": 3, "previous_share": 0.5,
        }  # fmt: skip


async def test_a_canary_that_makes_no_sense_is_refused_and_changes_nothing(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one", "two")
        await registry.set_alias("acme", "a", "default", 1)
        for canary, error in (
            (Canary(1, 0.5), InvalidField),
            (Canary(2, 1.5), InvalidField),
            (Canary(2, float("nan")), InvalidField),
            (Canary(3, 0.5), VersionNotFound),
        ):
            with pytest.raises(error):
                await registry.set_alias("acme", "a", "default", 1, canary=canary)
        assert (await registry.get_adapter("acme", "a")).canaries == {}


async def test_a_canarys_version_is_in_use_and_goes_with_its_adapter(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one", "two")
        await registry.set_alias("acme", "a", "default", 1, canary=Canary(2, 0.0))
        with pytest.raises(VersionInUse, match="default"):
            await registry.delete_version("acme", "a", 2)
        assert len(await registry.delete_adapter("acme", "a")) == 2


async def test_a_deleted_alias_frees_its_versions(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one", "two")
        await registry.set_alias("acme", "a", "beta", 1, canary=Canary(2, 0.5))
        await registry.delete_alias("acme", "a", "beta")
        assert (await registry.get_adapter("acme", "a")).aliases == {}
        await registry.delete_version("acme", "a", 2)
