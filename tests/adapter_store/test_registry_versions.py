import pytest

from adapter_store.errors import (
    AdapterNotFound,
    AliasConflict,
    InvalidName,
    ModelNotFound,
    NameReserved,
    TenantNotFound,
    VersionInUse,
    VersionNotFound,
)
from adapter_store.model_ref import ModelRef, parse_model_ref
from adapter_store.registry.registry import Registry
from tests.support.registry import FINGERPRINT, FakeClock, digest_of, open_registry, upload

pytestmark = pytest.mark.anyio


async def push(registry: Registry, content: str, name: str = "support", **kwargs: object):
    tenant = str(kwargs.pop("tenant", "acme"))
    publish = bool(kwargs.pop("publish", True))
    return await registry.register_version(
        tenant, name, upload(content), FINGERPRINT, publish=publish
    )


async def version_of(registry: Registry, model: str, tenant: str = "acme") -> int | None:
    try:
        return (await registry.resolve(tenant, parse_model_ref(model))).version
    except ModelNotFound:
        return None


async def test_each_upload_is_the_next_version_and_the_bare_name_follows(registry_url: str):
    async with open_registry(registry_url) as registry:
        first = await push(registry, "one")
        assert (first.version, first.created, first.published, first.previous) == (
            1,
            True,
            True,
            None,
        )
        second = await push(registry, "two")
        assert (second.version, second.created, second.previous) == (2, True, 1)

        resolved = await registry.resolve("acme", ModelRef("support"))
        assert (resolved.label, resolved.digest) == ("support@2", digest_of("two"))
        assert resolved.base_fingerprint == FINGERPRINT
        assert await version_of(registry, "support@1") == 1
        assert await version_of(registry, "support:default") == 2


async def test_the_same_upload_again_changes_nothing(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        await push(registry, "one")
        before = (await registry.get_adapter("acme", "support"), len(await registry.list_audit()))
        clock.advance(60)
        again = await push(registry, "one")
        assert (again.version, again.created) == (1, False)
        after = (await registry.get_adapter("acme", "support"), len(await registry.list_audit()))
        assert after == before


async def test_an_older_digest_again_is_a_new_version(registry_url: str):
    async with open_registry(registry_url) as registry:
        for content in ("one", "two", "one"):
            await push(registry, content)
        versions = await registry.list_versions("acme", "support")
        assert [(v.version, v.digest) for v in versions] == [
            (3, digest_of("one")),
            (2, digest_of("two")),
            (1, digest_of("one")),
        ]


async def test_the_same_files_for_another_base_model_are_a_new_version(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one")
        other = await registry.register_version("acme", "support", upload("one"), "0" * 64)
        assert (other.version, other.created) == (2, True)


async def test_unpublished_versions_answer_to_their_number_only(registry_url: str):
    async with open_registry(registry_url) as registry:
        quiet = await push(registry, "one", publish=False)
        assert not quiet.published
        assert await version_of(registry, "support") is None
        assert await version_of(registry, "support@1") == 1
        await registry.set_alias("acme", "support", "default", 1)
        await push(registry, "two", publish=False)
        assert await version_of(registry, "support") == 1


async def test_publishing_an_unchanged_upload_moves_the_bare_name_to_it(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one")
        await push(registry, "two", publish=False)
        same = await push(registry, "two", publish=False)
        assert (same.created, await version_of(registry, "support")) == (False, 1)
        published = await push(registry, "two")
        assert (published.version, published.created, published.previous) == (2, False, 1)
        assert await version_of(registry, "support") == 2


async def test_a_version_keeps_its_config_and_report(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        inspected = upload("one", rank=16)
        registered = await registry.register_version("acme", "support", inspected, FINGERPRINT)
        [version] = await registry.list_versions("acme", "support")
        assert version.config == inspected.config
        assert version.report == registered.report
        assert version.report["scalings"] == [2.0]
        assert (version.rank, version.bytes, version.state) == (16, 3, "ready")
        assert version.aliases == ("default",)
        assert version.created_at == clock.now


async def test_aliases_move_under_guard_and_name_what_they_left(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one")
        await push(registry, "two")
        back = await registry.set_alias("acme", "support", "default", 1, expect=2)
        assert (back.version, back.previous) == (1, 2)
        assert await version_of(registry, "support") == 1

        with pytest.raises(AliasConflict, match="points to version 1"):
            await registry.set_alias("acme", "support", "default", 2, expect=2)
        with pytest.raises(AliasConflict, match="does not exist"):
            await registry.set_alias("acme", "support", "beta", 2, expect=1)
        assert await version_of(registry, "support") == 1
        assert await version_of(registry, "support:beta") is None

        new = await registry.set_alias("acme", "support", "beta", 2)
        assert (new.alias, new.previous) == ("beta", None)
        assert await version_of(registry, "support:beta") == 2
        same = await registry.set_alias("acme", "support", "beta", 2)
        assert same.previous == 2


async def test_aliases_refuse_what_does_not_exist(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one")
        with pytest.raises(VersionNotFound) as caught:
            await registry.set_alias("acme", "support", "default", 2)
        assert caught.value.message == "the adapter 'support' has no version 2; it has version 1"
        with pytest.raises(AdapterNotFound):
            await registry.set_alias("acme", "other", "default", 1)
        with pytest.raises(InvalidName):
            await registry.set_alias("acme", "support", "No", 1)
        with pytest.raises(TenantNotFound):
            await registry.set_alias("nobody", "support", "default", 1)


async def test_a_version_in_use_by_an_alias_stays(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one")
        await push(registry, "two")
        with pytest.raises(VersionInUse, match="default"):
            await registry.delete_version("acme", "support", 2)
        assert await registry.delete_version("acme", "support", 1) == [digest_of("one")]
        with pytest.raises(VersionNotFound, match=r"no version 1; it has version 2$"):
            await registry.delete_version("acme", "support", 1)
        assert await version_of(registry, "support@1") is None
        assert await version_of(registry, "support") == 2


async def test_numbers_are_not_given_out_again_after_deletes(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one")
        await push(registry, "two")
        await push(registry, "three", publish=False)
        await registry.delete_version("acme", "support", 3)
        assert (await push(registry, "three", publish=False)).version == 4
        await registry.delete_adapter("acme", "support")
        assert (await push(registry, "four")).version == 5
        assert await version_of(registry, "support") == 5
        assert await version_of(registry, "support@1") is None


async def test_the_last_version_takes_the_adapter_with_it(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one", publish=False)
        assert await registry.delete_version("acme", "support", 1) == [digest_of("one")]
        assert await registry.list_adapters("acme") == []
        with pytest.raises(AdapterNotFound):
            await registry.get_adapter("acme", "support")
        assert (await push(registry, "one")).version == 2


async def test_a_deleted_adapter_is_gone_whole(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "one")
        await push(registry, "two")
        await registry.set_alias("acme", "support", "beta", 1)
        digests = await registry.delete_adapter("acme", "support")
        assert digests == sorted([digest_of("one"), digest_of("two")])
        for model in ("support", "support@1", "support:beta"):
            assert await version_of(registry, model) is None
        for call in (registry.get_adapter, registry.list_versions, registry.delete_adapter):
            with pytest.raises(AdapterNotFound):
                await call("acme", "support")
        await push(registry, "three", publish=False)
        assert (await registry.get_adapter("acme", "support")).aliases == {}


async def test_a_digest_is_unused_only_when_no_tenant_has_it(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "same")
        await push(registry, "mine")
        await push(registry, "same", tenant="zen", name="other")
        assert await registry.delete_adapter("acme", "support") == [digest_of("mine")]
        assert await registry.is_live(digest_of("same"))
        assert not await registry.is_live(digest_of("mine"))
        assert await registry.delete_adapter("zen", "other") == [digest_of("same")]
        assert not await registry.is_live(digest_of("same"))


async def test_a_digest_of_two_versions_is_unused_only_after_the_second(registry_url: str):
    async with open_registry(registry_url) as registry:
        for content in ("one", "two", "one"):
            await push(registry, content)
        assert await registry.delete_version("acme", "support", 1) == []
        assert await registry.delete_version("acme", "support", 2) == [digest_of("two")]


async def test_tenants_do_not_see_each_other(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "ours")
        await push(registry, "theirs", tenant="zen")
        await push(registry, "secret", tenant="zen", name="secret")
        await registry.set_alias("zen", "support", "beta", 1)

        ours = await registry.resolve("acme", ModelRef("support"))
        theirs = await registry.resolve("zen", ModelRef("support"))
        assert (ours.digest, theirs.digest) == (digest_of("ours"), digest_of("theirs"))
        assert (ours.version, theirs.version) == (1, 1)
        assert [a.name for a in await registry.list_adapters("acme")] == ["support"]
        assert (await registry.get_adapter("acme", "support")).aliases == {"default": 1}

        await registry.delete_adapter("acme", "support")
        assert await version_of(registry, "support", "zen") == 1
        with pytest.raises(AdapterNotFound):
            await registry.delete_adapter("acme", "secret")
        assert await version_of(registry, "secret", "zen") == 1


async def test_unknown_foreign_and_deleted_models_get_the_same_answer(registry_url: str):
    async with open_registry(registry_url) as registry:
        await push(registry, "theirs", tenant="zen", name="support")
        messages: set[str] = set()

        async def refused(tenant: str) -> None:
            with pytest.raises(ModelNotFound) as caught:
                await registry.resolve(tenant, ModelRef("support"))
            messages.add(f"{type(caught.value)} {caught.value.code} {caught.value.message}")

        await refused("acme")  # another tenant's
        await refused("nobody")
        await push(registry, "ours")
        await registry.delete_adapter("acme", "support")
        await refused("acme")  # deleted
        assert len(messages) == 1


async def test_of_a_live_adapter_of_its_own_a_tenant_is_told_what_there_is(registry_url: str):
    async with open_registry(registry_url) as registry:

        async def told(model: str, tenant: str = "acme") -> str:
            with pytest.raises(ModelNotFound) as caught:
                await registry.resolve(tenant, parse_model_ref(model))
            return caught.value.message

        generic = (
            "The model {!r} does not exist or you do not have access to it. "
            "`GET /v1/models` lists yours; the base is `base`."
        )
        assert await told("support@1") == generic.format("support@1")
        await push(registry, "one", publish=False)
        none = "The adapter 'support' has no alias {!r}; it has none, and its newest version is "
        assert await told("support") == none.format("default") + "support@1."
        for number in range(2, 13):
            await push(registry, f"content {number}")
            await registry.set_alias("acme", "support", f"a{number}", number)
        await registry.delete_version("acme", "support", 1)
        assert await told("support@1") == (
            "The adapter 'support' has no version 1; "
            "the newest are 12, 11, 10, 9, 8, 7, 6, 5, 4 and 3."
        )
        with pytest.raises(VersionNotFound, match=r"the newest are 12, .* and 3$"):
            await registry.get_version("acme", "support", 1)
        assert await told("support:b") == (
            "The adapter 'support' has no alias 'b'; it has a10, a11, a12, a2, a3, a4, a5, a6, a7, "
            "a8, …, and its newest version is support@12."
        )
        for model in ("support@1", "support:b", "support@2"):
            assert await told(model, "zen") == generic.format(model)
        await registry.delete_adapter("acme", "support")
        for model in ("support@2", "support:b", "support"):
            assert await told(model) == generic.format(model)


async def test_uploads_under_a_wrong_name_leave_no_row(registry_url: str):
    async with open_registry(registry_url, reserved_names=("SmolLM2",)) as registry:
        for name, error in (
            ("base", NameReserved),
            ("smollm2", NameReserved),
            ("../x", InvalidName),
            ("x@1", InvalidName),
        ):
            with pytest.raises(error):
                await push(registry, "one", name=name)
        with pytest.raises(TenantNotFound):
            await push(registry, "one", tenant="nobody")
        assert await registry.list_adapters("acme") == []


async def test_lists_count_versions_and_name_aliases(registry_url: str):
    clock = FakeClock()
    async with open_registry(registry_url, clock) as registry:
        await push(registry, "one", name="b")
        start = clock.now
        clock.advance(10)
        await push(registry, "two", name="b")
        await push(registry, "one", name="a", publish=False)
        await registry.set_alias("acme", "b", "old", 1)
        a, b = await registry.list_adapters("acme")
        assert (a.name, a.latest_version, a.num_versions, a.aliases) == ("a", 1, 1, {})
        assert (b.name, b.latest_version, b.num_versions) == ("b", 2, 2)
        assert b.aliases == {"default": 2, "old": 1}
        assert (b.created_at, b.updated_at) == (start, clock.now)
        assert await registry.get_adapter("acme", "b") == b
