import asyncio
from datetime import timedelta, timezone
from pathlib import Path

import pytest

from adapter_store.errors import (
    InvalidField,
    InvalidName,
    KeyNotFound,
    LastAdminKey,
    NameTaken,
    TenantNotFound,
)
from adapter_store.registry.models import Base
from adapter_store.registry.registry import Registry
from tests.support.registry import FakeClock, open_registry

pytestmark = pytest.mark.anyio


async def test_a_key_speaks_for_its_tenant_with_its_scopes(registry_url: str):
    async with open_registry(registry_url) as registry:
        created = await registry.create_key("acme", {"tenant", "inference"})
        principal = await registry.authenticate(created.plain)
        assert principal is not None and principal.tenant is not None
        assert (principal.tenant.name, principal.tenant.weight) == ("acme", 1.0)
        assert principal.scopes == {"tenant", "inference"}
        assert principal.key_id == created.key_id
        assert (await registry.create_key("acme")).info.scopes == {"inference"}


async def test_a_platform_key_has_no_tenant(registry_url: str):
    async with open_registry(registry_url) as registry:
        created = await registry.create_key(None, {"admin", "metrics"})
        principal = await registry.authenticate(created.plain)
        assert principal is not None and principal.tenant is None
        assert principal.scopes == {"admin", "metrics"}


async def all_rows(registry: Registry) -> bytes:
    async with registry.database.engine.connect() as connection:
        return b"".join(
            [
                repr((await connection.execute(table.select())).all()).encode()
                for table in Base.metadata.sorted_tables
            ]
        )


def files_in(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir())


async def test_the_plain_key_is_nowhere_in_the_database(registry_url: str, tmp_path: Path):
    async with open_registry(registry_url) as registry:
        created = await registry.create_key("acme")
        assert await registry.authenticate(created.plain) is not None
        listed = repr(await registry.list_keys("acme")) + repr(await registry.list_audit())
        stored = await all_rows(registry)
        stored += files_in(tmp_path)  # with SQLite, the write-ahead log
    stored += files_in(tmp_path)
    secret = created.plain.removeprefix("lpx_")
    assert len(secret) == 43
    assert created.key_id.encode() in stored  # the row is there
    assert secret.encode() not in stored and secret[:20].encode() not in stored
    assert secret not in listed


async def test_keys_differ_and_near_misses_are_refused(registry_url: str):
    async with open_registry(registry_url) as registry:
        plain = (await registry.create_key("acme")).plain
        assert plain != (await registry.create_key("acme")).plain
        other = plain[:-1] + ("A" if plain[-1] != "A" else "B")
        wrong = ["", "lpx_", plain[4:], plain.upper(), f"{plain}\n", f" {plain}", other]
        for text in [*wrong, "ключ", "\ud800", "x" * 10_000]:
            assert await registry.authenticate(text) is None


async def test_a_revoked_key_stops_at_once_and_for_good(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        created = await registry.create_key("acme")
        kept = await registry.create_key("acme")
        assert await registry.authenticate(created.plain) is not None  # cached from here on
        revoked = await registry.revoke_key(created.key_id)
        assert await registry.authenticate(created.plain) is None
        assert await registry.authenticate(kept.plain) is not None
        clock.advance(60)
        again = await registry.revoke_key(created.key_id)
        assert again.revoked_at == revoked.revoked_at
        states = {k.key_id: k.revoked_at is None for k in await registry.list_keys("acme")}
        assert states == {created.key_id: False, kept.key_id: True}


async def test_an_expired_key_stops_even_while_it_is_cached(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        created = await registry.create_key("acme", expires_at=clock.now + timedelta(seconds=0.5))
        assert await registry.authenticate(created.plain) is not None
        clock.advance(0.5)
        assert await registry.authenticate(created.plain) is None


async def test_times_come_back_in_utc(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        east = clock.now.astimezone(timezone(timedelta(hours=9))) + timedelta(hours=1)
        created = await registry.create_key("acme", expires_at=east)
        [listed] = await registry.list_keys("acme")
        assert listed.expires_at == created.info.expires_at == east
        assert listed.expires_at.utcoffset() == timedelta(0)
        assert listed.created_at == clock.now


@pytest.mark.parametrize(
    ("tenant", "scopes"),
    [
        ("acme", {"admin"}),
        ("acme", {"inference", "root"}),
        ("acme", set[str]()),
        (None, {"inference"}),
        (None, {"tenant", "admin"}),
    ],
)
async def test_scopes_that_do_not_fit_the_owner_are_refused(
    registry_url: str, tenant: str | None, scopes: set[str]
):
    async with open_registry(registry_url) as registry:
        with pytest.raises(InvalidField) as caught:
            await registry.create_key(tenant, scopes)
        assert caught.value.field == "scopes"
        assert await registry.list_keys(tenant) == []


async def test_an_expiry_in_the_past_or_without_a_zone_is_refused(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        for expires_at in (clock.now, (clock.now + timedelta(days=1)).replace(tzinfo=None)):
            with pytest.raises(InvalidField) as caught:
                await registry.create_key("acme", expires_at=expires_at)
            assert caught.value.field == "expires_at"


async def test_a_tenants_keys_are_found_under_that_tenant_only(registry_url: str):
    async with open_registry(registry_url) as registry:
        created = await registry.create_key("acme")
        await registry.create_key(None, {"admin"})
        assert [k.key_id for k in await registry.list_keys("acme")] == [created.key_id]
        assert await registry.list_keys("zen") == []
        assert [k.scopes for k in await registry.list_keys(None)] == [{"admin"}]
        with pytest.raises(KeyNotFound):
            await registry.revoke_key(created.key_id, tenant="zen")
        with pytest.raises(KeyNotFound):
            await registry.revoke_key("key_none")
        assert await registry.authenticate(created.plain) is not None
        await registry.revoke_key(created.key_id, tenant="acme")
        assert await registry.authenticate(created.plain) is None


async def test_the_services_own_admin_key_is_made_once(registry_url: str):
    async with open_registry(registry_url) as registry:
        created = await registry.ensure_admin_key()
        assert created is not None and created.info.scopes == {"admin"}
        assert await registry.ensure_admin_key() is None
        await registry.revoke_key(created.key_id)
    async with open_registry(registry_url) as registry:
        assert await registry.ensure_admin_key() is None


async def test_the_last_admin_key_that_works_is_revoked_only_where_it_may_be(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        first = await registry.create_key(None, {"admin"})
        gone = await registry.create_key(None, {"admin"})
        await registry.create_key(None, {"admin"}, clock.now + timedelta(seconds=1))
        metrics = await registry.create_key(None, {"metrics"})
        tenants = await registry.create_key("acme")
        await registry.revoke_own_key(gone.key_id)
        clock.advance(1)  # past the third one's time
        with pytest.raises(LastAdminKey):
            await registry.revoke_own_key(first.key_id)
        for key_id in (tenants.key_id, "key_none", "\x00"):
            with pytest.raises(KeyNotFound):
                await registry.revoke_own_key(key_id, may_be_last=True)
        await registry.revoke_own_key(metrics.key_id)
        await registry.revoke_own_key(gone.key_id)  # a second time changes nothing
        assert await registry.authenticate(first.plain) is not None
        assert await registry.authenticate(tenants.plain) is not None
        await registry.revoke_own_key(first.key_id, may_be_last=True)
        assert await registry.authenticate(first.plain) is None


async def test_two_admins_who_revoke_each_others_key_leave_one(registry_url: str):
    async with open_registry(registry_url) as one, open_registry(registry_url) as other:
        keys = [await one.create_key(None, {"admin"}) for _ in range(2)]
        outcomes = await asyncio.gather(
            *(
                registry.revoke_own_key(key.key_id)
                for registry, key in zip((one, other), keys, strict=True)
            ),
            return_exceptions=True,
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["KeyInfo", "LastAdminKey"]
        left = [key for key in await one.list_keys(None) if key.revoked_at is None]
        assert len(left) == 1


@pytest.mark.parametrize("tenant", ["acme", None])
async def test_keys_are_listed_in_pages(registry_url: str, tenant: str | None):
    async with open_registry(registry_url) as registry:
        scopes = {"metrics"}
        made = [(await registry.create_key(tenant, scopes)).key_id for _ in range(5)]
        others = await registry.create_key("zen", scopes)
        listed: list[str] = []
        while page := await registry.list_keys(tenant, 2, listed[-1] if listed else ""):
            assert len(page) <= 2
            listed += [key.key_id for key in page]
        assert listed == made
        for after in (others.key_id, "key_0000000000000000", "x", "\x00"):
            with pytest.raises(InvalidField) as caught:
                await registry.list_keys(tenant, 2, after)
            assert caught.value.field == "after"


async def test_tenants_are_made_once_with_a_sound_weight(registry_url: str):
    async with open_registry(registry_url) as registry:
        made = await registry.create_tenant("blue", 2.5)
        assert await registry.get_tenant("blue") == made
        assert [t.name for t in await registry.list_tenants()] == ["acme", "blue", "zen"]
        with pytest.raises(NameTaken):
            await registry.create_tenant("blue")
        with pytest.raises(InvalidName):
            await registry.create_tenant("../blue")
        for weight in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidField) as caught:
                await registry.create_tenant("green", weight)
            assert caught.value.field == "weight"
        for call in (registry.get_tenant, registry.create_key, registry.list_keys):
            with pytest.raises(TenantNotFound):
                await call("green")
