"""What a running service is made of: opened once by the lifespan, handed to handlers by name."""

from dataclasses import dataclass, field

from litestar import Litestar

from adapter_store.base_model import BaseModel
from adapter_store.blobs import BlobStore
from adapter_store.model_ref import BASE_NAME
from adapter_store.registry.registry import Registry
from engine.client import EngineClient
from engine.text.tokenizer import Tokenizer
from loraplex.auth import Authenticator
from loraplex.settings import Settings
from loraplex.usage import UsageRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """What the process around the app opens, and closes after it."""

    engine: EngineClient
    registry: Registry
    blobs: BlobStore
    tokenizer: Tokenizer
    base_model: BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What handlers use."""

    settings: Settings
    backends: Backends
    authenticator: Authenticator
    usage: UsageRecorder
    base_names: frozenset[str] = field(init=False)
    """Everything that clients may call the base model."""

    def __post_init__(self) -> None:
        names = (BASE_NAME, self.backends.base_model.name, *self.settings.model.served_model_names)
        object.__setattr__(self, "base_names", frozenset(names))

    @property
    def model_name(self) -> str:
        """The base model's first name, as `/v1/models` lists it."""
        served = self.settings.model.served_model_names
        return served[0] if served else self.backends.base_model.name


def services_of(app: Litestar) -> Services:
    """Return the services of a started app."""
    services: Services = app.state.services
    return services
