"""Health pages: no key, and nothing in them that a stranger may not know."""

from collections.abc import Iterable

from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.response import Response

from loraplex.auth import PUBLIC
from loraplex.services import Services

_NOT_READY = {
    503: ResponseSpec(dict[str, str], description="A part is unavailable; the body says which.")
}


class HealthController(Controller):
    """`/health`, `/health/live`, `/health/ready`."""

    path = "/health"
    opt = PUBLIC
    security = ({},)
    tags = ("health",)

    @get("/live", operation_id="getLiveness")
    async def live(self) -> dict[str, str]:
        """Answer while the process can answer at all."""
        return {"status": "ok"}

    @get("/", operation_id="getHealth", responses=_NOT_READY)
    async def health(self, services: NamedDependency[Services]) -> Response[dict[str, str]]:
        """Answer 200 while the engine and the registry answer, else 503.

        Without its database the service is `degraded` (200) for a minute, then unavailable.
        A new engine is `warming` (503) while it loads pinned and recently used adapters.
        """
        return await _readiness(services)

    @get("/ready", operation_id="getReadiness", responses=_NOT_READY)
    async def ready(self, services: NamedDependency[Services]) -> Response[dict[str, str]]:
        """Answer 200 while the engine and the registry answer, else 503.

        Without its database the service is `degraded` (200) for a minute, then unavailable.
        A new engine is `warming` (503) while it loads pinned and recently used adapters.
        """
        return await _readiness(services)


async def _readiness(services: Services) -> Response[dict[str, str]]:
    parts = {
        "engine": _engine_status(services),
        "registry": await services.registry_watch.status(),
    }
    is_ready = parts["engine"] == "ok" and parts["registry"] != "unavailable"
    if services.backends.shared_cache.is_degraded:  # slower, and ready all the same
        parts["cache"] = "degraded"
    return Response(
        {"status": "ok" if is_ready else _worst(parts.values()), **parts},
        status_code=200 if is_ready else 503,
    )


def _engine_status(services: Services) -> str:
    engine = services.backends.engine
    if not engine.is_ready:
        return "unavailable"
    return "warming" if engine.is_warming else "ok"


def _worst(statuses: Iterable[str]) -> str:
    return "unavailable" if "unavailable" in statuses else "warming"
