"""The calls that run in this process, by tenant and adapter version, so that they can be ended."""

from typing import Protocol

from loraplex.errors import ApiError


class RunningCall(Protocol):
    """A call, as far as it matters here."""

    tenant_name: str
    adapter_version: tuple[str, int] | None
    """None for the base model."""

    def give_up(self, error: ApiError) -> None:
        """End it; its client gets the error."""
        ...


class RunningCalls:
    """Calls from admission to their last frame."""

    def __init__(self) -> None:
        self._calls: dict[str, set[RunningCall]] = {}

    def add(self, call: RunningCall) -> None:
        """The engine has queued it."""
        self._calls.setdefault(call.tenant_name, set()).add(call)

    def remove(self, call: RunningCall) -> None:
        """It is over."""
        calls = self._calls.get(call.tenant_name, set())
        calls.discard(call)
        if not calls:
            self._calls.pop(call.tenant_name, None)

    def abort(self, tenant: str, name: str | None = None, version: int | None = None) -> None:
        """End a tenant's calls: all, those of an adapter, or those of one version of it."""
        for call in tuple(self._calls.get(tenant, ())):
            adapter = call.adapter_version
            if name is None:
                error = ApiError(403, "tenant_suspended", "the tenant may call nothing any more")
            elif adapter is None or adapter[0] != name or version not in (None, adapter[1]):
                continue
            else:
                error = ApiError(
                    409, "version_deleted", f"{name}@{adapter[1]} was deleted, and its calls ended"
                )
            call.give_up(error)
