"""One handler for every exception of every route, 404 and 405 included."""

from typing import Any

import msgspec
from litestar.connection import Request
from litestar.response import Response

from loraplex.errors import as_api_error, is_openai_path, openai_body, problem_body
from loraplex.logs import log_unexpected
from loraplex.metrics.process_metrics import ProcessMetrics


def answer_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Return the reply for an exception, in the shape that its path promises."""
    answer = as_api_error(error)
    counts: ProcessMetrics | None = request.app.state.get("process_metrics")
    if counts is not None:
        counts.refused(answer.code, answer.status)
    if answer.code == "internal_error":
        log_unexpected(request.scope, error)
    if is_openai_path(request.scope["path"]):
        body, media_type = openai_body(answer), "application/json"
    else:
        body, media_type = problem_body(answer), "application/problem+json"
    return Response(
        msgspec.json.encode(body),
        status_code=answer.status,
        media_type=media_type,
        headers=answer.headers,
    )
