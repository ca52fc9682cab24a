"""Endpoints of OpenAI's API that current clients try, and that this service has not."""

from litestar import Controller, post
from litestar.di import NamedDependency

from adapter_store.registry.records import TenantInfo
from loraplex.auth import requires_inference_scope
from loraplex.errors import ApiError
from loraplex.openapi import OpenAIError, errors, operation

_ERRORS = errors(OpenAIError, 400, 401, 403, 404, 503)


class AbsentController(Controller):
    """A 404 that says what to use instead: for a mistyped path it would be a riddle."""

    path = "/v1"
    guards = (requires_inference_scope,)
    tags = ("inference",)

    @post("/responses", operation_id=operation("createResponse"), responses=_ERRORS)
    async def responses(self, tenant: NamedDependency[TenantInfo]) -> None:
        """Refuse: there is no Responses API here."""
        raise _absent("the Responses API", "use /v1/chat/completions")

    @post("/embeddings", operation_id=operation("createEmbedding"), responses=_ERRORS)
    async def embeddings(self, tenant: NamedDependency[TenantInfo]) -> None:
        """Refuse: generation is all that is served here."""
        raise _absent("the Embeddings API", "the models here generate text")


def _absent(what: str, instead: str) -> ApiError:
    return ApiError(404, "endpoint_not_supported", f"{what} is not served here: {instead}")
