"""`/admin/engine`: the engine at this moment, for an admin."""

from litestar import Controller, get
from litestar.di import NamedDependency

from engine.engine_info import EngineInfo
from engine.engine_stats import EngineStats
from loraplex.auth import requires_admin
from loraplex.openapi import Problem, errors
from loraplex.services import Services

_ERRORS = errors(Problem, 401, 403, 503)


class EngineController(Controller):
    """What runs, what waits, who holds slots and blocks."""

    path = "/admin/engine"
    guards = (requires_admin,)
    tags = ("admin",)

    @get(operation_id="getEngineStats", responses=_ERRORS)
    async def stats(self, services: NamedDependency[Services]) -> EngineStats:
        """Return a snapshot of the engine."""
        return await services.backends.engine.stats()

    @get("/info", operation_id="getEngineInfo", responses=_ERRORS)
    async def info(self, services: NamedDependency[Services]) -> EngineInfo:
        """Return what the engine runs with, all limits effective."""
        return services.backends.engine.info
