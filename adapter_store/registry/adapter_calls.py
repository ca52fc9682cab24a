"""The registry's calls about adapters, versions and aliases: each a transaction of its own."""

from collections.abc import Iterable
from datetime import datetime

from adapter_store.model_ref import ModelRef, check_adapter_name
from adapter_store.peft_format import InspectedAdapter
from adapter_store.registry import adapters, aliases, replies, residency, versions
from adapter_store.registry.canary import takes_canary
from adapter_store.registry.records import (
    AS_THE_BASE,
    AdapterInfo,
    AliasChange,
    Canary,
    RegisteredVersion,
    Residency,
    ResidencyLimits,
    ResidentAdapters,
    ResolvedAdapter,
    ServingDefaults,
    VersionInfo,
)
from adapter_store.registry.replies import RepeatableCall
from adapter_store.registry.transactions import Transactions


class AdapterCalls(Transactions):
    """Part of `Registry`."""

    # Adapters and versions

    def check_name(self, name: str) -> None:
        """Raise `InvalidName` or `NameReserved` unless an adapter may be called that."""
        check_adapter_name(name, self._reserved)

    async def register_version(
        self,
        tenant: str,
        name: str,
        inspected: InspectedAdapter,
        base_fingerprint: str,
        *,
        publish: bool = True,
        serving: ServingDefaults = AS_THE_BASE,
        idempotency_key: str | None = None,
        tenant_created_at: datetime | None = None,
        actor: str = "system",
    ) -> RegisteredVersion:
        """Make an upload, whose files are stored already, the next version of a name.

        If the newest version has the same digest, base and `serving`, it is returned instead
        (`created` is False). With `publish` the alias `default` then points to the version
        returned, whether it is new or not: who uploads for publication gets what was uploaded,
        also after a roll-back.
        Without, no alias moves; a first version then answers to `name@1` only. A call with the
        `idempotency_key` of an earlier one changes nothing and returns what that one did.
        With `tenant_created_at` it is for the tenant that was created then, and for none that has
        got its name since. Raises `InvalidName`, `NameReserved`, `TenantNotFound`,
        `IdempotencyKeyReused` or `QuotaExceeded`.
        """
        self.check_name(name)
        change = self._change(actor)
        # Named only where there are any: replies stored before there were keep their hash.
        extra = [] if serving == AS_THE_BASE else [serving]
        repeatable = _repeatable(
            idempotency_key, "register", name, inspected.digest, base_fingerprint, publish, *extra
        )
        new = versions.NewVersion(inspected, base_fingerprint, serving)
        return await self._change_adapter(
            tenant,
            name,
            lambda s: versions.register(
                s, change, tenant, name, new, publish=publish, repeatable=repeatable,
                tenant_created_at=tenant_created_at,
            ),
        )  # fmt: skip

    async def resolve(self, tenant: str, ref: ModelRef, routing_key: str = "") -> ResolvedAdapter:
        """The version that a reference names now, for a request with this key (`canary.py`).

        Raises `ModelNotFound`, the same for what is unknown, another tenant's or deleted; of an
        adapter of the tenant's own it says which versions or aliases there are.
        """
        route = await self._routes.get(
            f"{tenant}/{ref.name}",
            str(ref),
            lambda: self._database.read(lambda s: versions.resolve(s, tenant, ref)),
        )
        assert route is not None
        canary = route.canary
        if canary is not None and takes_canary(
            route.alias, canary.version, route.share, routing_key
        ):
            return canary
        return route.stable

    async def list_adapters(
        self, tenant: str, limit: int | None = None, after: str = ""
    ) -> list[AdapterInfo]:
        """A tenant's adapters by name: all, or the first `limit` of those after a name.

        Raises `TenantNotFound`.
        """
        return await self._database.read(lambda s: adapters.list_of(s, tenant, limit, after))

    async def get_adapter(self, tenant: str, name: str) -> AdapterInfo:
        """Raises `TenantNotFound` or `AdapterNotFound`."""
        return await self._database.read(lambda s: adapters.get(s, tenant, name))

    async def list_versions(
        self, tenant: str, name: str, limit: int | None = None, after: str = ""
    ) -> list[VersionInfo]:
        """An adapter's versions, newest first: all, or the first `limit` of those after a number.

        Raises `TenantNotFound`, `AdapterNotFound` or `InvalidField` (after).
        """
        return await self._database.read(lambda s: versions.list_of(s, tenant, name, limit, after))

    async def delete_adapter(self, tenant: str, name: str, *, actor: str = "system") -> list[str]:
        """Delete an adapter whole; a later upload goes on with the numbers.

        Returns the digests that nothing names any more: unload them, then let the sweeper have
        them. Raises `TenantNotFound` or `AdapterNotFound`.
        """
        change = self._change(actor)
        return await self._change_adapter(
            tenant, name, lambda s: adapters.remove(s, change, tenant, name)
        )

    async def delete_version(
        self, tenant: str, name: str, version: int, *, actor: str = "system"
    ) -> list[str]:
        """Delete a version, and with the last one the adapter; returns as `delete_adapter` does.

        Raises `TenantNotFound`, `AdapterNotFound`, `VersionNotFound`, or `VersionInUse` while an
        alias points to it.
        """
        change = self._change(actor)
        return await self._change_adapter(
            tenant, name, lambda s: versions.remove(s, change, tenant, name, version)
        )

    async def set_alias(
        self,
        tenant: str,
        name: str,
        alias: str,
        version: int,
        *,
        expect: int | None = None,
        canary: Canary | None = None,
        idempotency_key: str | None = None,
        actor: str = "system",
    ) -> AliasChange:
        """Point an alias to a version; with `expect`, only if it points to that version now.

        A share of its requests goes to the `canary`; without one, none does from now on. A call
        with the `idempotency_key` of an earlier one changes nothing and returns what that one did.
        Raises `InvalidName`, `InvalidField`, `TenantNotFound`, `AdapterNotFound`,
        `VersionNotFound`, `AliasConflict`, `QuotaExceeded` or `IdempotencyKeyReused`.
        """
        change = self._change(actor)
        asked = canary and (canary.version, canary.share)
        repeatable = _repeatable(idempotency_key, "alias", name, alias, version, expect, asked)
        return await self._change_adapter(
            tenant,
            name,
            lambda s: aliases.set_alias(
                s, change, tenant, name, alias, version, expect, canary, repeatable
            ),
        )

    async def delete_alias(
        self, tenant: str, name: str, alias: str, *, actor: str = "system"
    ) -> None:
        """Raises `InvalidName`, `TenantNotFound`, `AdapterNotFound` or `AliasNotFound`."""
        change = self._change(actor)
        await self._change_adapter(
            tenant, name, lambda s: aliases.remove(s, change, tenant, name, alias)
        )

    async def get_version(self, tenant: str, name: str, version: int) -> VersionInfo:
        """Raises `TenantNotFound`, `AdapterNotFound` or `VersionNotFound`."""
        return await self._database.read(lambda s: versions.get(s, tenant, name, version))

    async def purge_replies(self) -> None:
        """Forget the replies to calls with an idempotency key of more than 24 hours ago."""
        now = self._clock()
        await self._database.write(lambda s: replies.purge(s, now))

    async def set_residency(
        self,
        tenant: str,
        name: str,
        wanted: Residency,
        limits: ResidencyLimits,
        *,
        actor: str = "system",
    ) -> AdapterInfo:
        """Say where an adapter is kept: by name, so it goes where the alias `default` goes.

        Raises `TenantNotFound`, `AdapterNotFound`, or `ResidencyLimit` where it would not fit.
        """
        change = self._change(actor)
        return await self._database.write(
            lambda s: residency.set_residency(s, change, tenant, name, wanted, limits)
        )

    async def resident_adapters(
        self,
        base_fingerprint: str,
        max_rank: int | None = None,
        max_full_values: int | None = None,
    ) -> ResidentAdapters:
        """The adapters of a base model that are pinned, and those that are warm.

        Of those within the limits; None: there is no limit.
        """
        return await self._database.read(
            lambda s: residency.resident(s, base_fingerprint, max_rank, max_full_values)
        )

    async def live_digests(
        self,
        digests: Iterable[str],
        max_rank: int | None = None,
        max_full_values: int | None = None,
    ) -> set[str]:
        """Those of `digests` that a version of any tenant names, of those within the limits.

        None: there is no limit.
        """
        asked = tuple(digests)
        return await self._database.read(
            lambda s: versions.live_digests(s, asked, max_rank, max_full_values)
        )

    async def is_live(self, digest: str) -> bool:
        """Whether a version of any tenant names the digest."""
        return await self._database.read(lambda s: versions.is_live(s, digest))

    async def digests_in_use(self) -> list[str]:
        """Every digest that a version of any tenant names, sorted."""
        return await self._database.read(versions.digests_in_use)

    async def names_in_use(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that a tenant's adapter has, sorted: no base model may have them."""
        return await self._database.read(lambda s: adapters.names_in_use(s, names))


def _repeatable(key: str | None, *request: object) -> RepeatableCall | None:
    return None if key is None else RepeatableCall.of(key, *request)
