"""Which model a `model` string means, for a tenant."""

from dataclasses import dataclass

from litestar.types import Scope

from adapter_store.errors import ModelNotFound
from adapter_store.model_ref import model_not_found, parse_model_ref
from adapter_store.registry.records import ResolvedAdapter, TenantInfo
from loraplex.errors import ApiError
from loraplex.openai.fields import GenerationFields
from loraplex.request_id import request_id
from loraplex.services import Services

BASE_LABEL = "base"


@dataclass(frozen=True, slots=True)
class Target:
    """A model, found. `adapter` is None for the base model."""

    asked: str
    """What the client called it; replies echo this."""
    adapter: ResolvedAdapter | None

    @property
    def digest(self) -> str | None:
        """The adapter's identity."""
        return self.adapter.digest if self.adapter else None

    @property
    def label(self) -> str:
        """`name@N`, or `base`."""
        return self.adapter.label if self.adapter else BASE_LABEL


def routing_key(fields: GenerationFields, scope: Scope) -> str:
    """What decides whether a request gets its alias's canary: its user, else the request itself."""
    return fields.user or fields.prompt_cache_key or request_id(scope)


async def resolve_target(
    services: Services, tenant: TenantInfo, model: str, routing_key: str = ""
) -> Target:
    """Find the model for a request with this key.

    Unknown, foreign, deleted and mistyped ones raise the same `ModelNotFound`. An adapter of
    another base model is 409: it was good when it was uploaded.
    """
    if model in services.base_names:
        return Target(model, None)
    reference = parse_model_ref(model)
    try:
        adapter = await services.backends.registry.resolve(tenant.name, reference, routing_key)
    except ModelNotFound:
        raise model_not_found(model) from None
    if adapter.base_fingerprint != services.backends.base_model.fingerprint:
        raise ApiError(
            409, "base_model_mismatch",
            f"{adapter.label} was trained on another base model than the one served now",
            param="model",
        )  # fmt: skip
    return Target(model, adapter)
