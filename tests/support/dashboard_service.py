"""`loraplex serve` on a tiny model, with tenants, adapters and traffic for its dashboard."""

import contextlib
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from safetensors.torch import load_file, save

from loraplex.demo.service import DemoService, demo_service
from tests.support.tiny_models import EOS_TOKEN_ID, make_tiny_adapter, make_tiny_model

SLOTS = 2
ENGINE = [
    "--dtype", "float32", "--threads", "1", "--num-kv-blocks", "512", "--max-num-seqs", "4",
    "--max-loras", str(SLOTS), "--drain-seconds", "2",
]  # fmt: skip
SECRET = "the-words-of-a-prompt"
"""Part of every prompt: no page and no answer to one may show it."""

_LAST = 10
"""The token that replies end with, where they are to stop."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A call's id, and its queue seconds by cause."""

    call: str
    queue: dict[str, float]


@dataclass(slots=True)
class DashboardService:
    """A running service; `keys` are by tenant, `replies` by `tenant/adapter`."""

    service: DemoService
    adapter: Path
    keys: dict[str, str]
    replies: dict[str, list[Reply]] = field(default_factory=dict[str, list[Reply]])

    @property
    def url(self) -> str:
        return self.service.url

    def client(self, key: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=60
        )

    def publish(self, tenant: str, name: str, number: int) -> int:
        """Upload an adapter that no other `number` has; returns its version."""
        tensors = load_file(self.adapter / "adapter_model.safetensors")
        weights = save({key: tensor * (1 + number / 128) for key, tensor in tensors.items()})
        config = (self.adapter / "adapter_config.json").read_bytes()
        with self.client(self.service.admin_key) as http:
            reply = http.post(
                f"/t/{tenant}/v1/adapters",
                data={"name": name},
                files={"config": ("c", config), "weights": ("w", weights)},
            )
            assert reply.status_code == 201, reply.text
            return int(reply.json()["version"])

    def ask(self, calls: Iterable[tuple[str, str]], *, stops: bool, at_once: int = 8) -> None:
        """Call each `(tenant, model)`; replies end with `stop`, else run into their limit."""

        def ask_one(call: tuple[str, str]) -> None:
            self._ask(*call, stops=stops)

        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(ask_one, calls))

    def _ask(self, tenant: str, model: str, *, stops: bool) -> None:
        body: dict[str, Any] = {
            "model": model, "prompt": f"{SECRET} {model}", "max_tokens": 12, "temperature": 0,
        }  # fmt: skip
        if stops:
            body |= {"min_tokens": 6, "stop_token_ids": [_LAST], "logit_bias": {str(_LAST): 100}}
        else:  # without `ignore_eos`: endings that a client asked for are no evidence
            body |= {"logit_bias": {str(EOS_TOKEN_ID): -100}}
        with self.client(self.keys[tenant]) as http:
            reply = http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        said = reply.json()
        assert said["choices"][0]["finish_reason"] == ("stop" if stops else "length")
        self.replies.setdefault(f"{tenant}/{model}", []).append(
            Reply(said["id"], _causes(reply.headers["x-loraplex-queue"]))
        )

    def queue_seconds(self, adapter: str) -> dict[str, float]:
        """Queue seconds by cause, as the replies told them, summed."""
        total: dict[str, float] = {}
        for reply in self.replies[adapter]:
            for cause, seconds in reply.queue.items():
                total[cause] = total.get(cause, 0.0) + seconds
        return total

    def api_process(self) -> psutil.Process:
        """The API process, a child of the supervisor."""
        children = psutil.Process(self.service.process.pid).children()
        [found] = [one for one in children if "loraplex.api_process" in one.cmdline()]
        return found


def _causes(header: str) -> dict[str, float]:
    """The header `slot=12.5; turn=0.3`, milliseconds, as seconds."""
    parts = (part.split("=") for part in header.split("; ") if part)
    return {cause: float(ms) / 1e3 for cause, ms in parts}


@contextlib.contextmanager
def dashboard_service(folder: Path, tenants: Iterable[str]) -> Generator[DashboardService]:
    """Start the service with these tenants, each with a key of all a tenant's scopes."""
    model = make_tiny_model(folder / "model", "smollm", max_position_embeddings=2048)
    adapter = make_tiny_adapter(folder / "adapter", model)
    with demo_service(model, "base", ENGINE) as service:
        running = DashboardService(service, adapter, {})
        with running.client(service.admin_key) as http:
            for tenant in tenants:
                http.post("/admin/tenants", json={"name": tenant}).raise_for_status()
                made = http.post(
                    f"/admin/tenants/{tenant}/keys", json={"scopes": ["tenant", "inference"]}
                )
                made.raise_for_status()
                running.keys[tenant] = made.json()["key"]
        yield running
