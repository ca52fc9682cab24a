"""`/dashboard/api/…`: what the pages read, live or over a window; `views.py` says what each is."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, TypeVar

from litestar import Controller, Response, get
from litestar.di import NamedDependency, Provide
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, QueryParameter
from litestar.response.base import ASGIResponse
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import AdapterNotFound
from loraplex.auth import PUBLIC
from loraplex.csv_table import Table, to_csv
from loraplex.dashboard import tables
from loraplex.dashboard.access import provide_viewer, require_session
from loraplex.dashboard.adapter_query import adapter_view
from loraplex.dashboard.adapter_views import Adapters, AdapterSort, AdapterView
from loraplex.dashboard.adapters_query import MAX_LIMIT, TableQuery, adapters_table
from loraplex.dashboard.alerts_query import alerts
from loraplex.dashboard.batch_query import batch
from loraplex.dashboard.engine_views import Batch, Slots
from loraplex.dashboard.live import TOPICS
from loraplex.dashboard.live_stream import LiveResponse
from loraplex.dashboard.overview_query import overview
from loraplex.dashboard.quota_query import quota
from loraplex.dashboard.sessions import Viewer
from loraplex.dashboard.slots_query import slots
from loraplex.dashboard.views import Alerts, Overview, Quota
from loraplex.errors import InvalidRequest
from loraplex.recorder.widths import Range
from loraplex.services import Services

T = TypeVar("T")
MAX_EXPORT_ROWS = 20_000

Window = Annotated[Range, QueryParameter(name="range")]
Search = Annotated[str, QueryParameter(max_length=128)]
Offset = Annotated[int, QueryParameter(ge=0, le=1_000_000)]
Limit = Annotated[int, QueryParameter(ge=1, le=MAX_LIMIT)]
Sort = Annotated[AdapterSort, QueryParameter()]
Order = Annotated[Literal["asc", "desc"], QueryParameter()]


class DataController(Controller):
    """For whoever has a session; a tenant's sees what is the tenant's own."""

    path = "/dashboard/api"
    opt = PUBLIC
    before_request = require_session
    dependencies = {"viewer": Provide(provide_viewer, sync_to_thread=False)}  # noqa: RUF012
    include_in_schema = False

    @get("/overview")
    async def overview(
        self,
        services: NamedDependency[Services],
        viewer: NamedDependency[Viewer],
        range_: Window = "5m",
    ) -> Overview:
        """Goodput, throughput, latency and load."""
        return await _overview(services, viewer, range_)

    @get("/adapters")
    async def adapters(
        self,
        services: NamedDependency[Services],
        viewer: NamedDependency[Viewer],
        range_: Window = "1h",
        sort: Sort = "requests",
        order: Order = "desc",
        search: Search = "",
        offset: Offset = 0,
        limit: Limit = 50,
    ) -> Adapters:
        """A page of the table of adapters."""
        query = TableQuery(
            range_=range_, tenant=viewer.tenant, sort=sort, descending=order == "desc",
            search=search, offset=offset, limit=limit,
        )  # fmt: skip
        return await _read(services, lambda s, now: adapters_table(s, query, now))

    @get("/adapters/{tenant_name:str}/{adapter:str}")
    async def adapter(
        self,
        services: NamedDependency[Services],
        viewer: NamedDependency[Viewer],
        tenant_name: FromPath[str],
        adapter: FromPath[str],
        range_: Window = "1h",
    ) -> AdapterView:
        """One adapter."""
        return await _adapter(services, viewer, tenant_name, adapter, range_)

    @get("/slots")
    async def slots(
        self,
        services: NamedDependency[Services],
        viewer: NamedDependency[Viewer],
        range_: Window = "5m",
    ) -> Slots:
        """Who held which slot when."""
        return await _read(services, lambda s, now: slots(s, viewer.tenant, range_, now))

    @get("/batch")
    async def batch(
        self,
        services: NamedDependency[Services],
        viewer: NamedDependency[Viewer],
        range_: Window = "5m",
    ) -> Batch:
        """What batches were made of."""
        return await _batch(services, viewer, range_)

    @get("/alerts")
    async def alerts(
        self,
        services: NamedDependency[Services],
        viewer: NamedDependency[Viewer],
        range_: Window = "1h",
    ) -> Alerts:
        """What goes wrong."""
        return await _read(services, lambda s, now: alerts(s, viewer.tenant, range_, now))

    @get("/quota")
    async def quota(
        self, services: NamedDependency[Services], viewer: NamedDependency[Viewer]
    ) -> Quota:
        """What a tenant may use, and uses."""
        if viewer.tenant is None:
            raise NotFoundException("an admin has no quota")
        return await quota(services, viewer.tenant)

    @get("/events", media_type="text/event-stream")
    async def events(
        self,
        services: NamedDependency[Services],
        viewer: NamedDependency[Viewer],
        topics: Annotated[str, QueryParameter(max_length=64)] = "",
    ) -> ASGIResponse:
        """Live events, until the session or the process ends."""
        wanted = frozenset(part for part in topics.split(",") if part)
        if not wanted <= TOPICS:
            raise InvalidRequest("topics", f"topics are {', '.join(sorted(TOPICS))}")
        return LiveResponse(services.live.open(viewer, wanted), services.live.close)

    @get("/export/{table:str}")
    async def export(
        self,
        services: NamedDependency[Services],
        viewer: NamedDependency[Viewer],
        table: FromPath[str],
        range_: Window = "1h",
        tenant_name: Annotated[str, QueryParameter(name="tenant", max_length=64)] = "",
        adapter: Annotated[str, QueryParameter(max_length=64)] = "",
        sort: Sort = "requests",
        order: Order = "desc",
        search: Search = "",
    ) -> Response[str]:
        """A chart or a table as CSV."""
        name = table.removesuffix(".csv")
        if name.startswith("adapter-"):
            view = await _adapter(services, viewer, tenant_name, adapter, range_)
            found = _of_adapter(name, view)
        elif name in ("throughput", "latency", "load", "causes"):
            found = _of_overview(name, await _overview(services, viewer, range_))
        elif name in ("steps", "step-times"):
            shown = await _batch(services, viewer, range_)
            found = tables.steps(shown) if name == "steps" else tables.step_times(shown)
        elif name in ("slots", "waits"):
            held = await _read(services, lambda s, now: slots(s, viewer.tenant, range_, now))
            found = tables.slot_spans(held) if name == "slots" else tables.waits(held)
        elif name == "alerts":
            found = tables.alerts(
                await _read(services, lambda s, now: alerts(s, viewer.tenant, range_, now))
            )
        elif name == "adapters":
            query = TableQuery(
                range_=range_, tenant=viewer.tenant, sort=sort, descending=order == "desc",
                search=search, limit=MAX_EXPORT_ROWS,
            )  # fmt: skip
            page = await _read(services, lambda s, now: adapters_table(s, query, now))
            found = tables.adapters(page.rows)
        else:
            raise InvalidRequest("table", f"there is no table {name[:40]!r}")
        return Response(
            to_csv(found),
            media_type="text/csv",
            headers={"content-disposition": f'attachment; filename="loraplex-{name}-{range_}.csv"'},
        )


async def _read(services: Services, work: Callable[[AsyncSession, float], Awaitable[T]]) -> T:
    now = services.live.now()
    return await services.backends.registry.database.read(lambda s: work(s, now))


async def _overview(services: Services, viewer: Viewer, range_: Range) -> Overview:
    live = await services.live.live(viewer.tenant)
    return await _read(services, lambda s, now: overview(s, viewer.tenant, range_, now, live))


async def _adapter(
    services: Services, viewer: Viewer, tenant: str, adapter: str, range_: Range
) -> AdapterView:
    """Another tenant's is as unknown as one that is not there."""
    if viewer.tenant not in (None, tenant):
        raise AdapterNotFound(f"there is no adapter {adapter[:64]!r}")
    return await _read(services, lambda s, now: adapter_view(s, tenant, adapter, range_, now))


async def _batch(services: Services, viewer: Viewer, range_: Range) -> Batch:
    steps, info = await services.live.steps(), services.live.info
    return await _read(services, lambda s, now: batch(s, viewer.tenant, range_, now, steps, info))


def _of_overview(name: str, view: Overview) -> Table:
    match name:
        case "throughput":
            return tables.throughput(view)
        case "latency":
            return tables.latency(view)
        case "load":
            return tables.load(view)
        case _:
            return tables.causes(view.window, view.causes)


def _of_adapter(name: str, view: AdapterView) -> Table:
    match name:
        case "adapter-causes":
            return tables.causes(view.window, view.causes)
        case "adapter-latency":
            return tables.latency(view)
        case "adapter-finishes":
            return tables.finishes(view.window, view.finishes)
        case "adapter-traffic":
            return tables.traffic(view)
        case "adapter-versions":
            return tables.versions(view)
        case "adapter-publishes":
            return tables.publishes(view)
        case "adapter-requests":
            return tables.slow_requests(view)
        case _:
            raise InvalidRequest("table", f"there is no table {name[:40]!r}")
