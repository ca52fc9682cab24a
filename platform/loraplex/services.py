"""What a running service is made of: opened once by the lifespan, handed to handlers by name."""

from dataclasses import dataclass, field

from adapter_store.base_model import BaseModel
from adapter_store.blobs import BlobStore
from adapter_store.cache.shared import OneProcess, SharedCache
from adapter_store.model_ref import BASE_NAME
from adapter_store.references.policy import SourcePolicy
from adapter_store.references.sources import AdapterSources
from adapter_store.registry.registry import Registry
from engine.client import EngineClient
from engine.tenant_turns import TenantTurns
from engine.text.template_renderer import TemplateRenderer
from engine.text.tokenizer import Tokenizer
from loraplex.adapters.registrar import Registrar
from loraplex.adapters.residency import ResidencyKeeper
from loraplex.auth import Authenticator
from loraplex.dashboard.live import LiveSource
from loraplex.dashboard.sessions import Sessions
from loraplex.heartbeats import Heartbeats
from loraplex.limits.rate_limiter import RateLimiter
from loraplex.limits.shared_rates import SharedRates
from loraplex.openai.grammar_checks import GrammarChecks
from loraplex.registry_watch import RegistryWatch
from loraplex.settings import Settings
from loraplex.tracing.tracing import NoTracing, Tracing
from loraplex.usage import UsageWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """What the process around the app opens, and closes after it."""

    engine: EngineClient
    registry: Registry
    blobs: BlobStore
    tokenizer: Tokenizer
    base_model: BaseModel
    shared_cache: SharedCache = field(default_factory=OneProcess)
    sources: AdapterSources = field(default_factory=lambda: AdapterSources(SourcePolicy()))
    rates: SharedRates = field(default_factory=SharedRates)
    tracing: Tracing = field(default_factory=NoTracing)
    heartbeats: Heartbeats = field(default_factory=Heartbeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What handlers use."""

    settings: Settings
    backends: Backends
    authenticator: Authenticator
    registry_watch: RegistryWatch
    usage: UsageWriter
    residency: ResidencyKeeper
    registrar: Registrar
    grammars: GrammarChecks
    limiter: RateLimiter
    templates: TemplateRenderer
    """Renders the chat templates that came with adapters."""
    sessions: Sessions
    """Of the dashboard."""
    live: LiveSource
    """What the dashboard's pages show of this moment."""
    tokenising: TenantTurns
    """In which long prompts are tokenised."""
    inspections: TenantTurns
    """In which uploads are inspected: each keeps a core busy."""
    exports: TenantTurns
    """In which exports are copied and verified: each takes an adapter's bytes on the disk."""
    started_at: int
    """Unix time."""

    @property
    def served_names(self) -> tuple[str, ...]:
        """The base model's public names, the first one first."""
        return self.settings.model.served_model_names or (self.backends.base_model.name,)

    @property
    def model_name(self) -> str:
        """The base model's first name."""
        return self.served_names[0]

    @property
    def base_names(self) -> frozenset[str]:
        """Everything that clients may call the base model, and so no adapter."""
        return frozenset((BASE_NAME, self.backends.base_model.name, *self.served_names))

    @property
    def system_fingerprint(self) -> str:
        """Which weights answered, as OpenAI's replies say it."""
        return f"fp_{self.backends.base_model.fingerprint[:12]}"
