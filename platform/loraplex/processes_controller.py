"""`/admin/processes`: the API processes that are alive, for an admin."""

from datetime import UTC, datetime

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency

from loraplex.auth import requires_admin
from loraplex.openapi import Problem, errors
from loraplex.services import Services

_ERRORS = errors(Problem, 401, 403, 503)


class ProcessView(msgspec.Struct, frozen=True):
    """An API process. `answered` marks the one that gives this answer."""

    id: str
    pid: int
    host: str
    started_at: datetime
    seen_at: datetime
    """When it last said that it is alive."""
    answered: bool


class ProcessList(msgspec.Struct, frozen=True):
    """The API processes that are alive, the oldest first."""

    data: list[ProcessView]
    degraded: bool
    """Redis is away: these were alive when it was last heard of."""


class ProcessController(Controller):
    """Who answers requests."""

    path = "/admin/processes"
    guards = (requires_admin,)
    tags = ("admin",)

    @get(operation_id="listProcesses", responses=_ERRORS)
    async def list(self, services: NamedDependency[Services]) -> ProcessList:
        """List the API processes that are alive."""
        heartbeats = services.backends.heartbeats
        return ProcessList(
            [
                ProcessView(
                    id=process.id,
                    pid=process.pid,
                    host=process.host,
                    started_at=datetime.fromtimestamp(process.started_at, UTC),
                    seen_at=datetime.fromtimestamp(seen_at, UTC),
                    answered=process.id == heartbeats.me.id,
                )
                for process, seen_at in heartbeats.alive()
            ],
            degraded=services.backends.shared_cache.is_degraded,
        )
