"""`/v1/usage` and `/admin/usage`: what was used, summed, as JSON or CSV."""

from collections.abc import Collection
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, cast

import msgspec
from litestar import Controller, Response, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import QueryParameter

from adapter_store.registry.records import TenantInfo, UsageGroup, UsageTotals
from loraplex.auth import requires_admin, requires_tenant_scope
from loraplex.csv_table import Table, to_csv
from loraplex.errors import InvalidRequest
from loraplex.openapi import OpenAIError, Problem, errors, operation
from loraplex.services import Services

MAX_ROWS = 50_000
"""Of one reply."""
_DAY = timedelta(days=1)
_GROUPS = ("tenant", "adapter", "hour", "day")

Since = Annotated[
    datetime | None,
    QueryParameter(name="since", description="From then on, with its zone; default: a day."),
]
Until = Annotated[
    datetime | None, QueryParameter(name="until", description="Before then; default: now.")
]
GroupBy = Annotated[
    str,
    QueryParameter(
        name="group_by",
        max_length=64,
        description="Of `tenant`, `adapter` (its versions), `hour` and `day`, with commas; "
        "empty: one sum.",
    ),
]
Format = Annotated[Literal["json", "csv"], QueryParameter(description="Of the reply.")]


class UsageRow(msgspec.Struct, frozen=True):
    """A sum. What it is not grouped by is null; `adapter` is `base` for the base model."""

    period: str | None
    """When its hour or day began, in UTC."""
    tenant: str | None
    adapter: str | None
    version: int | None
    requests: int
    prompt_tokens: int
    """All of them; of these, `cached_tokens` were not computed."""
    cached_tokens: int
    completion_tokens: int
    engine_seconds: float
    """The tokens' share of the engine's steps."""


class UsageReport(msgspec.Struct, frozen=True):
    """Sums over a range."""

    since: datetime
    until: datetime
    data: list[UsageRow]


_OK = {200: ResponseSpec(UsageReport, description="The sums; with `format=csv`, a table.")}


class UsageController(Controller):
    """A tenant's own usage."""

    path = "/v1/usage"
    guards = (requires_tenant_scope,)
    tags = ("usage",)

    @get(
        operation_id=operation("getUsage"),
        responses={**_OK, **errors(OpenAIError, 400, 401, 403, 404, 503)},
    )
    async def show(
        self,
        services: NamedDependency[Services],
        tenant: NamedDependency[TenantInfo],
        since: Since = None,
        until: Until = None,
        group_by: GroupBy = "adapter,hour",
        format: Format = "json",
    ) -> Response[Any]:
        """Show what the tenant used."""
        return await _report(services, since, until, group_by, format, tenant=tenant.name)


class AllUsageController(Controller):
    """Everybody's usage."""

    path = "/admin/usage"
    guards = (requires_admin,)
    tags = ("admin",)

    @get(operation_id="getAllUsage", responses={**_OK, **errors(Problem, 400, 401, 403, 503)})
    async def show(
        self,
        services: NamedDependency[Services],
        since: Since = None,
        until: Until = None,
        group_by: GroupBy = "tenant,adapter,hour",
        format: Format = "json",
        of_tenant: Annotated[
            str | None,
            QueryParameter(name="tenant", max_length=64, description="Only this tenant's."),
        ] = None,
    ) -> Response[Any]:
        """Show what tenants used, deleted ones included."""
        return await _report(services, since, until, group_by, format, tenant=of_tenant)


async def _report(
    services: Services,
    since: datetime | None,
    until: datetime | None,
    group_by: str,
    format_: str,
    *,
    tenant: str | None,
) -> Response[Any]:
    groups = _groups(group_by)
    end = _aware("until", until) or datetime.now(UTC)
    start = _aware("since", since) or _day_before(end)
    if start >= end:
        raise InvalidRequest("since", "since must be before until")
    totals = await services.backends.registry.sum_usage(
        start, end, groups, tenant=tenant, limit=MAX_ROWS + 1
    )
    if len(totals) > MAX_ROWS:
        raise InvalidRequest(
            "since", f"more than {MAX_ROWS} rows; ask for less time or fewer groups",
            code="too_many_rows",
        )  # fmt: skip
    rows = [_row(total) for total in totals]
    if format_ == "csv":
        headers = {"content-disposition": 'attachment; filename="usage.csv"'}
        table = Table(UsageRow.__struct_fields__, [msgspec.structs.astuple(row) for row in rows])
        return Response(to_csv(table), media_type="text/csv", headers=headers)
    return Response(UsageReport(start, end, rows))


def _groups(text: str) -> Collection[UsageGroup]:
    groups = [part.strip() for part in text.split(",") if part.strip()]
    for group in groups:
        if group not in _GROUPS:
            raise InvalidRequest("group_by", f"group_by: {group!r} is none of {', '.join(_GROUPS)}")
    return cast(list[UsageGroup], groups)


def _aware(field: str, value: datetime | None) -> datetime | None:
    if value is not None and value.tzinfo is None:
        raise InvalidRequest(field, f"{field} needs a zone, as in 2026-01-31T00:00:00Z")
    return None if value is None else _in_utc(field, value)


def _in_utc(field: str, value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidRequest(field, f"{field} is out of range") from None


def _day_before(end: datetime) -> datetime:
    try:
        return end - _DAY
    except OverflowError:
        raise InvalidRequest("until", "until is out of range") from None


def _row(total: UsageTotals) -> UsageRow:
    fields = asdict(total)
    return UsageRow(completion_tokens=fields.pop("output_tokens"), **fields)
