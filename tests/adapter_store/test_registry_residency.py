"""Residency in the registry: limits over all tenants, by file and not by name, with `default`."""

import asyncio
from dataclasses import replace

import pytest

from adapter_store.errors import AdapterNotFound, ResidencyLimit
from adapter_store.registry.records import Residency, ResidencyLimits
from adapter_store.registry.registry import Registry
from tests.support.registry import FINGERPRINT, digest_of, open_registry, upload

pytestmark = pytest.mark.anyio

LIMITS = ResidencyLimits(base_fingerprint=FINGERPRINT, max_pinned=2, max_warm=2, max_bytes=1000)


async def push(registry: Registry, name: str, content: str, tenant: str = "acme", **kwargs: bool):
    await registry.register_version(tenant, name, upload(content), FINGERPRINT, **kwargs)


async def keep(
    registry: Registry, name: str, wanted: Residency, tenant: str = "acme",
    limits: ResidencyLimits = LIMITS,
) -> str:  # fmt: skip
    return (await registry.set_residency(tenant, name, wanted, limits)).residency


async def kept(registry: Registry) -> tuple[list[str], list[str]]:
    found = await registry.resident_adapters(FINGERPRINT)
    return list(found.pinned), list(found.warm)


async def test_pins_count_once_by_file_and_past_the_limit_nothing_changes(registry_url: str):
    async with open_registry(registry_url) as registry:
        for name, content in (("a", "one"), ("b", "two"), ("c", "three")):
            await push(registry, name, content)
        await push(registry, "twin", "one", "zen")
        for name in ("a", "a", "b"):
            assert await keep(registry, name, "pinned") == "pinned"
        assert await keep(registry, "twin", "pinned", "zen") == "pinned"
        with pytest.raises(ResidencyLimit, match="at most 2 adapters") as caught:
            await keep(registry, "c", "pinned")
        assert caught.value.code == "pin_limit_exceeded"
        assert (await registry.get_adapter("acme", "c")).residency == "auto"
        assert await kept(registry) == ([digest_of("one"), digest_of("two")], [])
        changes = [e.subject for e in await registry.list_audit() if e.action == "residency.set"]
        assert changes == ["twin", "b", "a"]

        assert await keep(registry, "a", "auto") == "auto"  # its twin keeps the place
        with pytest.raises(ResidencyLimit):
            await keep(registry, "c", "pinned")
        await keep(registry, "twin", "auto", "zen")
        assert await keep(registry, "c", "pinned") == "pinned"


async def test_residency_follows_the_default_alias_and_ends_with_the_adapter(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "a", "one")
        await keep(registry, "a", "pinned")
        await push(registry, "a", "two", publish=False)
        assert (await kept(registry))[0] == [digest_of("one")]
        await registry.set_alias("acme", "a", "default", 2)
        assert (await kept(registry))[0] == [digest_of("two")]
        assert await registry.resident_adapters("0" * 64) == await registry.resident_adapters("1")
        await registry.delete_adapter("acme", "a")
        assert await kept(registry) == ([], [])
        await push(registry, "a", "three")
        assert (await registry.get_adapter("acme", "a")).residency == "auto"


async def test_what_cannot_be_served_is_not_kept(registry_url: str):
    sizes = {"plain": (8, 0), "of-high-rank": (32, 0), "with-a-head": (8, 3_000_000_000)}
    async with open_registry(registry_url) as registry:
        for name, size in sizes.items():
            await registry.register_version("acme", name, upload(name, *size), FINGERPRINT)
            await keep(registry, name, "warm", limits=replace(LIMITS, max_warm=3))
        for limits, left in (
            ((None, None), list(sizes)),
            ((32, 3_000_000_000), list(sizes)),
            ((31, None), ["plain", "with-a-head"]),
            ((32, 2_999_999_999), ["plain", "of-high-rank"]),
            ((31, 0), ["plain"]),
        ):
            found = await registry.resident_adapters(FINGERPRINT, *limits)
            assert found.warm == tuple(digest_of(name) for name in left)
        small = replace(LIMITS, max_rank=31, max_full_values=0)
        assert await keep(registry, "plain", "pinned", limits=small) == "pinned"
        for name in ("of-high-rank", "with-a-head"):
            with pytest.raises(ResidencyLimit, match="no version that is served now") as caught:
                await keep(registry, name, "pinned", limits=small)
            assert caught.value.code == "no_default_version"


async def test_warm_adapters_are_bounded_in_number_and_with_the_pinned_in_bytes(registry_url: str):
    async with open_registry(registry_url) as registry:
        for name in ("a", "b", "c"):
            await push(registry, name, name * 400)
        await keep(registry, "a", "warm")
        await keep(registry, "b", "pinned")
        with pytest.raises(ResidencyLimit, match="1200 bytes") as caught:
            await keep(registry, "c", "warm")
        assert caught.value.code == "host_memory_exceeded"
        tight = ResidencyLimits(
            base_fingerprint=FINGERPRINT, max_pinned=1, max_warm=1, max_bytes=10**6
        )
        with pytest.raises(ResidencyLimit) as caught:
            await keep(registry, "c", "warm", limits=tight)
        assert caught.value.code == "warm_limit_exceeded"
        assert await kept(registry) == ([digest_of("b" * 400)], [digest_of("a" * 400)])
        assert await keep(registry, "a", "pinned") == "pinned"
        assert (await kept(registry))[1] == []


async def test_only_what_has_a_default_version_can_be_kept(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "a", "one", publish=False)
        for wanted in ("pinned", "warm"):
            with pytest.raises(ResidencyLimit) as caught:
                await keep(registry, "a", wanted)
            assert caught.value.code == "no_default_version"
        assert await keep(registry, "a", "auto") == "auto"
        await registry.register_version("acme", "b", upload("two"), "0" * 64)
        with pytest.raises(ResidencyLimit, match="no version that is served now"):
            await keep(registry, "b", "pinned")
        with pytest.raises(AdapterNotFound):
            await keep(registry, "nothing", "auto")


async def test_the_last_place_goes_to_one_of_many_at_once(registry_url: str):
    async with open_registry(registry_url) as one, open_registry(registry_url) as other:
        for number in range(6):
            await push(one, f"a{number}", str(number))
        outcomes = await asyncio.gather(
            *(keep([one, other][n % 2], f"a{n}", "pinned") for n in range(6)),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, ResidencyLimit) for outcome in outcomes) == 4
        assert len((await kept(one))[0]) == 2


async def test_live_digests_are_those_that_a_version_names(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "a", "one")
        await push(registry, "a", "two")
        asked = [digest_of(content) for content in ("one", "two", "gone")]
        assert await registry.live_digests(asked) == set(asked[:2])
        assert await registry.live_digests([]) == set()
        many = [f"{number:064x}" for number in range(1000)]  # more than one statement takes
        assert await registry.live_digests([*many, *asked]) == set(asked[:2])
