"""Which tenants and labels asked for a digest lately."""

from collections import OrderedDict

from engine.telemetry.labels import name_of
from engine.telemetry.records import AdapterOwner

MAX_OWNERS = 16
"""Owners kept for one digest; equal files under more names than that are rare."""


class Owners:
    """The digests that were asked for last, with the tenants and labels that asked."""

    def __init__(self, max_digests: int = 10_000) -> None:
        self._max_digests = max_digests
        self._owners = OrderedDict[str, tuple[AdapterOwner, ...]]()

    def note(self, digest: str, owner: AdapterOwner) -> None:
        """Somebody asks for an adapter."""
        known = self._owners.get(digest, ())
        if not known or known[0] != owner:
            others = (other for other in known if other != owner)
            self._owners[digest] = (owner, *others)[:MAX_OWNERS]
        self._owners.move_to_end(digest)
        if len(self._owners) > self._max_digests:
            self._owners.popitem(last=False)

    def of(self, digest: str) -> tuple[AdapterOwner, ...]:
        """Who asked for an adapter, the last one first."""
        return self._owners.get(digest, ())

    def forget(self, tenant: str, adapter: str | None) -> None:
        """An adapter, or a whole tenant, was deleted."""
        for digest, owners in list(self._owners.items()):
            kept = tuple(owner for owner in owners if not concerns(owner, tenant, adapter))
            if not kept:
                del self._owners[digest]
            elif len(kept) < len(owners):
                self._owners[digest] = kept


def concerns(owner: AdapterOwner, tenant: str, adapter: str | None) -> bool:
    """Whether an owner is this adapter of the tenant; None: any adapter of the tenant."""
    if owner.tenant != tenant:
        return False
    return adapter is None or name_of(owner.label) == adapter
