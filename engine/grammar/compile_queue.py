"""Which grammar is compiled next: tenants take turns, so that one's many hold up no other's."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class CompileQueue(Generic[T]):
    """Jobs by tenant and grammar. Each `put` that says True is for one `take`, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, OrderedDict[str, T]] = OrderedDict()
        """The one whose turn it is first; each one's oldest job first."""

    def put(self, tenant: str, grammar: str, job: T) -> bool:
        """Queue a job; False where that tenant's for the grammar waits already: it is replaced."""
        with self._lock:
            jobs = self._tenants.setdefault(tenant, OrderedDict())
            is_new = grammar not in jobs
            jobs[grammar] = job
            return is_new

    def take(self) -> tuple[str, T]:
        """The next grammar and its job; raises `KeyError` where nothing waits."""
        with self._lock:
            tenant, jobs = self._tenants.popitem(last=False)
            grammar, job = jobs.popitem(last=False)
            if jobs:
                self._tenants[tenant] = jobs
            return grammar, job
