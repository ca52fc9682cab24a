"""Fetch an adapter from where a reference says, then check and publish it as an upload is."""

from dataclasses import dataclass
from pathlib import Path

from adapter_store.errors import SourceError
from adapter_store.references.reference import Reference
from adapter_store.registry.records import AS_THE_BASE, ServingDefaults, TenantInfo
from adapter_store.registry.registrations import Outcome
from loraplex.adapters.publishing import publish, upload_folder
from loraplex.adapters.registrar import RegistrationProgress
from loraplex.adapters.upload import Upload
from loraplex.services import Services
from loraplex.tenant_scope import tenant_not_found


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a caller asked for, checked."""

    tenant: TenantInfo
    """As it was when it asked."""
    name: str
    reference: Reference
    publish: bool
    is_admin: bool
    actor: str
    idempotency_key: str | None = None
    serving: ServingDefaults = AS_THE_BASE


async def fetch_and_publish(
    services: Services, order: Order, progress: RegistrationProgress
) -> Outcome:
    """Fetch what was ordered, check it and publish it as the next version.

    Raises `SourceError`, and what `publish` raises; nothing is left on the disk then.
    """
    settings = services.settings
    # As it is now: what was withdrawn while this waited is not fetched.
    tenant = await services.backends.registry.get_tenant(order.tenant.name)
    if tenant.created_at != order.tenant.created_at:
        raise tenant_not_found()
    async with upload_folder(Path(settings.storage.uploads_dir)) as folder:
        progress.state = "fetching"
        try:
            fetched = await services.backends.sources.fetch(
                order.reference, tenant.name, folder, tenant.sources,
                is_admin=order.is_admin,
                max_bytes=settings.uploads.max_upload_bytes,
                seconds=settings.sources.source_seconds,
                progress=progress.take,
            )  # fmt: skip
        except OSError as error:
            raise SourceError(
                "upload_storage", f"the source's files cannot be stored: {error.strerror}"
            ) from error
        progress.state = "checking"
        upload = Upload(order.name, order.publish, fetched.config, fetched.weights, None)
        registered = await publish(
            services, tenant, upload, folder,
            max_rank=services.backends.engine.info.max_lora_rank, actor=order.actor,
            serving=order.serving, idempotency_key=order.idempotency_key,
        )  # fmt: skip
    await services.residency.refresh()
    return Outcome(
        str(fetched.reference), registered.version, registered.digest, registered.created
    )
