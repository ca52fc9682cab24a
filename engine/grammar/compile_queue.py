"""Which grammar is compiled next: tenants take turns, so that many of one delay no other's."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class CompileQueue(Generic[T]):
    """Jobs by tenant and grammar. Every `put` that returns True must be followed by one `take`.

    Safe on any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, OrderedDict[str, T]] = OrderedDict()
        """The tenant whose turn is next comes first; of each tenant, the oldest job."""

    def put(self, tenant: str, grammar: str, job: T) -> bool:
        """Queue a job. Returns False if it replaced a waiting one of this tenant and grammar."""
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
