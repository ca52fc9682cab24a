"""End calls that run, in whichever API process: the engine knows them all."""

from engine.client import EngineClient
from engine.messages import EndCalls

TENANT_SUSPENDED = "tenant_suspended"
VERSION_DELETED = "version_deleted"


def end_calls_of_tenant(engine: EngineClient, tenant: str) -> None:
    """End all that a tenant has queued or running; its clients get `tenant_suspended`."""
    reason = "the tenant may call nothing any more"
    engine.end_calls(EndCalls(tenant=tenant, code=TENANT_SUSPENDED, reason=reason))


def end_calls_of_adapter(
    engine: EngineClient, tenant: str, name: str, version: int | None = None
) -> None:
    """End the calls on an adapter, or on one version of it; their clients get `version_deleted`."""
    what = name if version is None else f"{name}@{version}"
    engine.end_calls(
        EndCalls(
            tenant=tenant,
            adapter=name,
            version=version,
            code=VERSION_DELETED,
            reason=f"{what} was deleted, and its calls ended",
        )
    )
