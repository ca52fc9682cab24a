"""Our own service as the benchmarks run it: a real `loraplex serve`, one tenant, its adapters."""

import contextlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from loraplex.cli.api_client import ApiClient
from loraplex.demo.service import DemoService, demo_service

BASE = "base"
TENANT = "bench"
_MODULES = {"engine": "engine.process", "api": "loraplex.api_process"}


@dataclass(frozen=True, slots=True)
class Usage:
    """Of the engine and API processes so far."""

    engine_cpu_seconds: float
    api_cpu_seconds: float
    steps: int
    output_tokens: int

    def __sub__(self, before: "Usage") -> "Usage":
        return Usage(
            self.engine_cpu_seconds - before.engine_cpu_seconds,
            self.api_cpu_seconds - before.api_cpu_seconds,
            self.steps - before.steps,
            self.output_tokens - before.output_tokens,
        )

    def as_dict(self) -> dict[str, float]:
        """Per output token and per step, for JSON."""
        return {
            "engine_cpu_ms_per_token": 1e3 * self.engine_cpu_seconds / self.output_tokens,
            "api_cpu_ms_per_token": 1e3 * self.api_cpu_seconds / self.output_tokens,
            "tokens_per_step": self.output_tokens / self.steps,
        }


@dataclass(frozen=True, slots=True)
class OurService:
    """A running service and a key for its tenant."""

    service: DemoService
    key: str
    first_token_seconds: float
    """From the start of the command to a client's first token."""

    @property
    def url(self) -> str:
        """Where the OpenAI API is."""
        return f"{self.service.url}/v1"

    def process(self, name: str) -> psutil.Process:
        """The `engine` or `api` process that lives now."""
        for child in psutil.Process(self.service.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if _MODULES[name] in child.cmdline():
                    return child
        raise ProcessLookupError(f"the service has no {name} process")

    def stats(self) -> dict[str, Any]:
        """The engine's statistics."""
        with ApiClient(self.service.url, self.service.admin_key) as admin:
            return admin.call("GET", "/admin/engine")

    def usage(self) -> Usage:
        """CPU time and work so far."""
        engine, api = (sum(self.process(name).cpu_times()[:2]) for name in _MODULES)
        stats = self.stats()
        return Usage(engine, api, stats["steps"], stats["output_tokens"])

    def cpu_seconds(self) -> float:
        """Of all processes of the service so far, those that ended apart."""
        root = psutil.Process(self.service.process.pid)
        processes = (root, *root.children(recursive=True))
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def memory(self, field: str, name: str = "engine") -> int:
        """Bytes of a process by a field of its `/proc/PID/status`: `RssAnon` is what it holds
        apart from mapped files, `VmHWM` its peak."""
        status = Path(f"/proc/{self.process(name).pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) * 1024

    def push(self, folders: Sequence[Path]) -> None:
        """Upload adapters through the API; each is named as its folder."""
        with ApiClient(self.service.url, self.key) as api:
            for folder in folders:
                api.push_adapter(folder.name, folder)


@contextlib.contextmanager
def our_service(
    model: Path, arguments: Sequence[str] = (), *, prefix_cache: bool = False
) -> Generator[OurService]:
    """Start `loraplex serve` on a free port with a data directory of its own; stop it at the end.

    Prefix caching is off unless asked for: the workload repeats its prompts.
    """
    if not prefix_cache:
        arguments = ["--no-prefix-cache", *arguments]
    started = time.perf_counter()
    with demo_service(model, BASE, [*arguments]) as service:
        with ApiClient(service.url, service.admin_key) as admin:
            admin.call("POST", "/admin/tenants", json={"name": TENANT})
            body = {"scopes": ["tenant", "inference"]}
            key: str = admin.call("POST", f"/admin/tenants/{TENANT}/keys", json=body)["key"]
        one_token(service.url, key)
        yield OurService(service, key, time.perf_counter() - started)


def one_token(url: str, key: str, model: str = BASE) -> None:
    """Ask for a single token, and wait for it."""
    httpx.post(
        f"{url}/v1/completions",
        headers={"authorization": f"Bearer {key}"},
        json={"model": model, "prompt": "Hello", "max_tokens": 1},
        timeout=120.0,
        trust_env=False,
    ).raise_for_status()
