"""The Litestar app: routes, and who answers what. Holds no state of its own."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.di import Provide
from litestar.middleware import DefineMiddleware
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme
from litestar.types import ControllerRouterHandler

from adapter_store.registry.registrations import Registrations
from adapter_store.registry.transactions import utc_now
from engine.tenant_turns import TenantTurns
from engine.text.template_renderer import TemplateRenderer
from loraplex.adapters.alias_controller import AliasController
from loraplex.adapters.controller import AdapterController
from loraplex.adapters.registrar import Registrar, owner_of
from loraplex.adapters.registration_controller import RegistrationController
from loraplex.adapters.residency import ResidencyKeeper
from loraplex.adapters.version_controller import VersionController
from loraplex.adapters.vllm_controller import VllmAdapterController
from loraplex.auth import PUBLIC, Authenticator, AuthMiddleware
from loraplex.cors import cors_config
from loraplex.dashboard.access import add_security_headers
from loraplex.dashboard.data_controller import DataController
from loraplex.dashboard.live import LiveSource
from loraplex.dashboard.pages import dashboard_pages
from loraplex.dashboard.session_controller import SessionController
from loraplex.dashboard.sessions import Sessions
from loraplex.docs_page import DocsPage, JsonDocument
from loraplex.engine_controller import EngineController
from loraplex.error_handler import answer_error
from loraplex.front_door import front_door
from loraplex.health import HealthController
from loraplex.housekeeping import keeping_house
from loraplex.limits.rate_limiter import RateLimiter
from loraplex.logs import log_access, structlog_plugin
from loraplex.metrics.controller import metrics
from loraplex.metrics.counting import count_reply
from loraplex.metrics.page import MetricsPage
from loraplex.metrics.process_metrics import ProcessMetrics
from loraplex.openai.absent_controller import AbsentController
from loraplex.openai.chat_controller import ChatController
from loraplex.openai.completions_controller import CompletionsController
from loraplex.openai.grammar_checks import GrammarChecks
from loraplex.openai.models_controller import ModelsController
from loraplex.openai.tokenize_controller import TokenizeController
from loraplex.processes_controller import ProcessController
from loraplex.registry_watch import RegistryWatch
from loraplex.request_id import add_request_id
from loraplex.services import Backends, Services
from loraplex.settings import Settings
from loraplex.tenant_scope import provide_tenant
from loraplex.tenants.admin_key_controller import AdminKeyController
from loraplex.tenants.audit_controller import AuditController
from loraplex.tenants.controller import TenantController
from loraplex.tenants.key_controller import KeyController
from loraplex.tenants.source_controller import SourceController
from loraplex.usage import UsageWriter
from loraplex.usage_controller import AllUsageController, UsageController
from loraplex.version import service_version

OpenBackends = Callable[[], AbstractAsyncContextManager[Backends]]
"""Opens the engine client, the registry and the rest on the app's own event loop."""

MAX_TOKENISING = 4
"""Long prompts that one process tokenises at a time."""
MAX_INSPECTIONS = 2
"""Uploads that one process inspects at a time; the others wait on disk."""
MAX_EXPORTS = 2
"""Exports that one process makes ready at a time."""

_V1: Sequence[ControllerRouterHandler] = (
    ChatController,
    CompletionsController,
    ModelsController,
    TokenizeController,
    AbsentController,
    AdapterController,
    AliasController,
    VersionController,
    VllmAdapterController,
    RegistrationController,
    UsageController,
)


def create_app(settings: Settings, open_backends: OpenBackends) -> Litestar:
    """Return the service's ASGI app; its lifespan opens the backends and closes them."""
    return Litestar(
        route_handlers=[
            EngineController,
            metrics,
            ProcessController,
            HealthController,
            TenantController,
            KeyController,
            AdminKeyController,
            SourceController,
            AuditController,
            AllUsageController,
            front_door,
            dashboard_pages(),
            SessionController,
            DataController,
            Router("/", route_handlers=_V1),
            Router("/t/{tenant_name:str}", route_handlers=_V1),
        ],
        dependencies={
            "services": Provide(_provide_services, sync_to_thread=False),
            "tenant": Provide(provide_tenant),
        },
        middleware=[DefineMiddleware(AuthMiddleware, exclude_http_methods=[])],
        exception_handlers={Exception: answer_error},
        before_send=[count_reply, add_request_id, add_security_headers, log_access],
        lifespan=[partial(_running_services, settings, open_backends)],
        plugins=[structlog_plugin()],
        request_max_body_size=settings.requests.max_body_bytes,
        cors_config=cors_config(settings.cors),
        openapi_config=_openapi(),
    )


@asynccontextmanager
async def _running_services(
    settings: Settings, open_backends: OpenBackends, app: Litestar
) -> AsyncGenerator[None]:
    async with (
        open_backends() as backends,
        RateLimiter(backends.rates) as limiter,
        TemplateRenderer(backends.tokenizer.special_tokens) as templates,
        ResidencyKeeper(
            backends.engine, backends.registry, backends.base_model.fingerprint
        ) as residency,
        Registrar(
            Registrations(
                backends.registry.database, owner_of(settings.storage.uploads_dir), utc_now
            ),
            settings.sources,
        ) as registrar,
        LiveSource(
            backends.engine,
            backends.registry.database,
            sessions := Sessions(backends.registry, settings.auth.admin_key),
        ) as live,
        RegistryWatch(backends.registry) as registry_watch,
        keeping_house(backends.registry, backends.blobs),
        # The first to end: what it has left must be safe before anything else takes time.
        UsageWriter(
            backends.registry, Path(settings.storage.usage_dir), backends.engine.settle
        ) as usage,
    ):
        backends.engine.on_orphans(usage.adopt)
        app.state.services = Services(
            settings=settings,
            backends=backends,
            authenticator=Authenticator(backends.registry, settings.auth.admin_key),
            registry_watch=registry_watch,
            usage=usage,
            residency=residency,
            registrar=registrar,
            grammars=GrammarChecks(),
            limiter=limiter,
            templates=templates,
            sessions=sessions,
            live=live,
            tokenising=TenantTurns(MAX_TOKENISING),
            inspections=TenantTurns(MAX_INSPECTIONS),
            exports=TenantTurns(MAX_EXPORTS),
            started_at=int(time.time()),
        )
        app.state.process_metrics = ProcessMetrics()
        app.state.metrics_page = MetricsPage(app.state.services, app.state.process_metrics)
        yield


def _provide_services(state: State) -> Services:
    services: Services = state.services
    return services


def _openapi() -> OpenAPIConfig:
    return OpenAPIConfig(
        title="Loraplex",
        version=service_version(),
        use_handler_docstrings=True,
        openapi_router=Router("/docs", route_handlers=[], opt=PUBLIC, include_in_schema=False),
        render_plugins=[DocsPage(), JsonDocument()],
        components=Components(
            security_schemes={"key": SecurityScheme(type="http", scheme="bearer")},
        ),
        security=[{"key": []}],
    )
