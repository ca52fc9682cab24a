"""Which model a `model` string means, for a tenant."""

from dataclasses import dataclass

from litestar.types import Scope

from adapter_store.model_ref import BASE_NAME, parse_model_ref
from adapter_store.registry.records import ResolvedAdapter, TenantInfo
from loraplex.adapters.servable import refusal
from loraplex.openai.fields import GenerationFields
from loraplex.request_id import request_id
from loraplex.services import Services


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
        return self.adapter.label if self.adapter else BASE_NAME


def routing_key(fields: GenerationFields, scope: Scope) -> str:
    """What decides whether a request gets its alias's canary: its user, else the request itself."""
    return fields.user or fields.prompt_cache_key or request_id(scope)


async def resolve_target(
    services: Services, tenant: TenantInfo, model: str, routing_key: str = ""
) -> Target:
    """Find the model for a request with this key.

    Unknown, foreign, deleted and mistyped ones raise the same `ModelNotFound`; of an adapter of the
    tenant's own it says which versions or aliases there are. An adapter that was good when it was
    uploaded, and is too large or of another base model now, is a 409.
    """
    if model in services.base_names:
        return Target(model, None)
    reference = parse_model_ref(model)
    adapter = await services.backends.registry.resolve(tenant.name, reference, routing_key)
    if (refused := refusal(services, adapter)) is not None:
        raise refused
    return Target(model, adapter)
