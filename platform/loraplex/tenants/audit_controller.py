"""`/admin/audit`: who changed what, newest first."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from adapter_store.registry.records import AuditEntry
from loraplex.auth import requires_admin
from loraplex.openapi import Problem, errors
from loraplex.paging import DEFAULT_LIMIT, PageLimit, cut
from loraplex.services import Services


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `actor` is the id of the key that asked for it, `admin`, `cli` or `system`."""

    id: int
    created_at: datetime
    actor: str
    action: str
    tenant: str | None
    subject: str
    detail: Mapping[str, Any]


class EntryList(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page of changes. `next` is the `before` of the next page, if there is one."""

    data: list[Entry]
    next: int | None = None


class AuditController(Controller):
    """The audit log."""

    path = "/admin/audit"
    guards = (requires_admin,)
    tags = ("admin",)

    @get(operation_id="listAudit", responses=errors(Problem, 400, 401, 403, 503))
    async def list(
        self,
        services: NamedDependency[Services],
        limit: PageLimit = DEFAULT_LIMIT,
        before: Annotated[
            int, QueryParameter(ge=1, le=2**63 - 1, description="`next` of the page before.")
        ] = 2**63 - 1,
        of_tenant: Annotated[
            str | None,
            QueryParameter(
                name="tenant", max_length=64, description="Only changes of this tenant's."
            ),
        ] = None,
    ) -> EntryList:
        """List changes, newest first, a page at a time."""
        found = await services.backends.registry.list_audit(
            limit + 1, before=before, tenant=of_tenant
        )
        page, has_more = cut(found, limit)
        return EntryList([_entry(entry) for entry in page], page[-1].entry_id if has_more else None)


def _entry(entry: AuditEntry) -> Entry:
    return Entry(
        id=entry.entry_id,
        created_at=entry.created_at,
        actor=entry.actor,
        action=entry.action,
        tenant=entry.tenant,
        subject=entry.subject,
        detail=entry.detail,
    )
