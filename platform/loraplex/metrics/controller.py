"""`GET /metrics`, for a key with the scope `metrics`."""

from typing import Any

from litestar import Request, get
from litestar.datastructures import State
from litestar.response.base import ASGIResponse

from loraplex.auth import Caller, requires_metrics_scope
from loraplex.metrics.page import MetricsPage
from loraplex.openapi import Problem, errors


@get(
    "/metrics",
    operation_id="getMetrics",
    tags=["metrics"],
    guards=[requires_metrics_scope],
    responses=errors(Problem, 401, 403, 503),
    media_type="text/plain",
)
async def metrics(request: Request[Caller, None, Any], state: State) -> ASGIResponse:
    """Return the metrics of the engine and of this API process, as Prometheus reads them.

    A tenant's key gets those of its own adapters.
    """
    page: MetricsPage = state.metrics_page
    accept, tenant = request.headers.get("accept", ""), request.user.tenant
    if tenant is None:
        rendered = await page.render(accept)
    else:
        rendered = await page.render_for(tenant.name, accept)
    return ASGIResponse(
        body=rendered.body, headers={"content-type": rendered.content_type}, media_type=None
    )
