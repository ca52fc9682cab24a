import asyncio

import pytest

from adapter_store.errors import InvalidField, QuotaExceeded, TenantNotFound
from adapter_store.registry.aliases import MAX_ALIASES
from adapter_store.registry.records import Quota
from tests.support.registry import FINGERPRINT, open_registry, upload

pytestmark = pytest.mark.anyio


async def test_a_quota_is_kept_whole_and_told_to_whoever_asks(registry_url: str):
    async with open_registry(registry_url) as registry:
        key = await registry.create_key("acme")
        assert (await registry.authenticate(key.plain)).tenant.quota == Quota()
        quota = Quota(requests_per_minute=5, max_rank=8)
        changed = await registry.set_quota("acme", quota, weight=2.0, actor="admin")
        assert (changed.quota, changed.weight) == (quota, 2.0)
        assert (await registry.authenticate(key.plain)).tenant == changed
        only = Quota(max_queued=3)
        await registry.set_quota("acme", only)
        assert await registry.get_tenant("acme") == (await registry.authenticate(key.plain)).tenant
        found = await registry.get_tenant("acme")
        assert (found.quota, found.weight) == (only, 2.0)
        assert (await registry.get_tenant("zen")).quota == Quota()
        [newest, *_] = await registry.list_audit()
        assert (newest.action, newest.detail) == ("tenant.quota", {"weight": 2.0, "max_queued": 3})


async def test_a_quota_that_can_never_work_changes_nothing(registry_url: str):
    async with open_registry(registry_url) as registry:
        before = await registry.get_tenant("acme")
        for quota, weight, field in [
            (Quota(max_rank=0), None, "max_rank"),
            (Quota(tokens_per_minute=-1), None, "tokens_per_minute"),
            (Quota(), float("nan"), "weight"),
        ]:
            with pytest.raises(InvalidField) as refused:
                await registry.set_quota("acme", quota, weight=weight)
            assert refused.value.field == field
        with pytest.raises(TenantNotFound):
            await registry.set_quota("nobody", Quota())
        assert await registry.get_tenant("acme") == before


@pytest.mark.parametrize(
    ("quota", "code"),
    [
        (Quota(max_rank=7), "rank_quota_exceeded"),
        (Quota(max_adapters=1), "adapter_quota_exceeded"),
        (Quota(max_adapter_bytes=len("one") + len("other") - 1), "adapter_bytes_quota_exceeded"),
    ],
)
async def test_what_is_over_the_quota_is_refused_and_leaves_nothing(registry_url, quota, code):
    async with open_registry(registry_url) as registry:
        await registry.register_version("acme", "a", upload("one"), FINGERPRINT)
        await registry.set_quota("acme", quota)
        with pytest.raises(QuotaExceeded) as refused:
            await registry.register_version("acme", "b", upload("other"), FINGERPRINT)
        assert refused.value.code == code
        assert [a.name for a in await registry.list_adapters("acme")] == ["a"]
        again = await registry.register_version("acme", "a", upload("one"), FINGERPRINT)
        assert not again.created, "nothing new is kept"
        await registry.register_version("zen", "b", upload("other"), FINGERPRINT)
        if code != "rank_quota_exceeded":
            await registry.delete_adapter("acme", "a")
            await registry.register_version("acme", "b", upload("other"), FINGERPRINT)


async def test_uploads_at_the_same_time_take_no_more_than_there_is(registry_url: str):
    async with open_registry(registry_url) as registry:
        await registry.set_quota("acme", Quota(max_adapters=2, max_adapter_bytes=1000))
        outcomes = await asyncio.gather(
            *(
                registry.register_version("acme", f"a{n}", upload(f"file {n}"), FINGERPRINT)
                for n in range(6)
            ),
            return_exceptions=True,
        )
        refused = [o for o in outcomes if isinstance(o, QuotaExceeded)]
        assert len(refused) == 4, outcomes
        assert len(await registry.list_adapters("acme")) == 2


async def test_an_adapter_has_so_many_aliases_and_no_more(registry_url: str):
    async with open_registry(registry_url) as registry:
        for name in ("a", "b"):
            await registry.register_version("acme", name, upload("one"), FINGERPRINT)
        for number in range(MAX_ALIASES - 1):  # beside `default`
            await registry.set_alias("acme", "a", f"a{number}", 1)
        with pytest.raises(QuotaExceeded, match="100 aliases") as refused:
            await registry.set_alias("acme", "a", "one-more", 1)
        assert refused.value.code == "too_many_aliases"
        await registry.register_version("acme", "a", upload("two"), FINGERPRINT)
        await registry.set_alias("acme", "a", "a0", 2)
        await registry.set_alias("acme", "b", "one-more", 1)
        await registry.delete_alias("acme", "a", "a1")
        await registry.set_alias("acme", "a", "one-more", 1)
