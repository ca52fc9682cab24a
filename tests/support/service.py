"""The whole service on a loopback port: real HTTP, registry and blobs; the engine is a fake."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import uvicorn
from litestar import Litestar
from litestar.types import ASGIApp
from safetensors.numpy import save as save_safetensors

from adapter_store.base_model import BaseModel, LinearShape
from adapter_store.blobs import BlobStore, LocalBlobStore
from adapter_store.cache.shared import OneProcess, SharedCache
from adapter_store.references.policy import SourcePolicy
from adapter_store.references.sources import AdapterSources
from adapter_store.registry.records import UsageRecord
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from engine.text.tokenizer import Tokenizer
from loraplex.app import create_app
from loraplex.drain import answering_when_cut
from loraplex.http_protocol import bounded_http
from loraplex.services import Backends
from loraplex.settings import (
    AuthSettings,
    ConnectionLimits,
    CorsSettings,
    EngineSettings,
    ModelSettings,
    RequestLimits,
    Settings,
    SourceSettings,
    StorageSettings,
    StreamSettings,
    UploadLimits,
)
from loraplex.tracing.tracing import NoTracing, Tracing
from tests.support.fake_engine import FakeEngine
from tests.support.registry import create_schema
from tests.support.registry import database_url as sqlite_url
from tests.support.tiny_tokenizers import CHATML, write_byte_level_folder
from tests.support.waiting import SECONDS

ADMIN_KEY = "admin-key-of-at-least-32-characters"
HIDDEN = 16
BASE = BaseModel(
    name="tiny",
    fingerprint="f" * 64,
    architecture="LlamaForCausalLM",
    num_layers=1,
    hidden_size=HIDDEN,
    vocab_size=400,
    linears={
        f"model.layers.0.self_attn.{name}_proj": LinearShape(HIDDEN, HIDDEN)
        for name in ("q", "k", "v", "o")
    },
    ends={},
    other_modules=frozenset(("lm_head", "model.embed_tokens", "model.norm")),
    tensors={},
)


def adapter_files(seed: int = 0, rank: int = 4) -> tuple[bytes, bytes]:
    """The config and the weights of a small adapter of `BASE`."""
    rng = np.random.default_rng(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    weights = {
        f"{prefix}.lora_A.weight": rng.normal(size=(rank, HIDDEN)).astype(np.float32),
        f"{prefix}.lora_B.weight": rng.normal(size=(HIDDEN, rank)).astype(np.float32),
    }
    return json.dumps(config).encode(), save_safetensors(weights)


def no_certificates() -> ssl.SSLContext:
    """For clients of a service here: loading the machine's own takes longer than most calls."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass(frozen=True)
class TestService:
    """A running service; `keys` are those of the tenants `acme` and `zen`, by `tenant:scope`."""

    __test__ = False

    url: str
    app: Litestar
    engine: FakeEngine
    """Or another client, where a test gave one."""
    registry: Registry
    blobs: BlobStore
    tokenizer: Tokenizer
    root: Path
    keys: dict[str, str]

    def client(self, key: str | None = "acme:inference") -> httpx.AsyncClient:
        """An HTTP client with a key by its name, or with none."""
        headers = {} if key is None else {"authorization": f"Bearer {self.keys[key]}"}
        return httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=SECONDS, verify=no_certificates()
        )

    def openai(self, key: str = "acme:inference", path: str = "/v1") -> openai.AsyncOpenAI:
        """The official client, strict about what it gets."""
        return openai.AsyncOpenAI(
            base_url=self.url + path, api_key=self.keys[key], max_retries=0, timeout=SECONDS,
            _strict_response_validation=True,
        )  # fmt: skip

    async def upload(
        self, name: str, *, seed: int = 0, key: str = "acme:tenant", **form: str
    ) -> dict[str, Any]:
        """Upload an adapter and return the reply."""
        config, weights = adapter_files(seed)
        async with self.client(key) as client:
            reply = await client.post(
                "/v1/adapters",
                data={"name": name, **form},
                files={"config": ("c", config), "weights": ("w", weights)},
            )
        assert reply.is_success, reply.text
        return reply.json()

    async def usage(self, tenant: str = "acme", num_rows: int = 1) -> list[UsageRecord]:
        """The newest usage rows, once there are so many."""
        async with asyncio.timeout(SECONDS):
            while True:
                rows = await self.registry.list_usage(tenant, 1000)
                if len(rows) >= num_rows:
                    return rows
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running_service(
    root: Path,
    engine: Any = None,
    *,
    requests: RequestLimits | None = None,
    uploads: UploadLimits | None = None,
    streams: StreamSettings | None = None,
    connections: ConnectionLimits | None = None,
    sources: AdapterSources | None = None,
    source_settings: SourceSettings | None = None,
    shared_cache: SharedCache | None = None,
    blobs: BlobStore | None = None,
    database_url: str | None = None,
    chat_template: str = CHATML,
    tracing: Tracing | None = None,
    cors_origins: tuple[str, ...] = (),
    admin_key: str | None = ADMIN_KEY,
) -> AsyncIterator[TestService]:
    """With `database_url`, on that database, which has the schema (the fixture `registry_url`).

    With `admin_key` None the settings have none, and the registry has one.
    """
    for folder in ("blobs", "cache", "uploads", "usage"):
        (root / folder).mkdir(exist_ok=True)
    url = database_url or sqlite_url(root)
    if database_url is None:
        await create_schema(url)
    settings = Settings(
        storage=StorageSettings(
            database_url=url,
            blobs_dir=str(root / "blobs"),
            cache_dir=str(root / "cache"),
            uploads_dir=str(root / "uploads"),
            usage_dir=str(root / "usage"),
        ),
        engine=EngineSettings(engine_socket=str(root / "engine.sock"), model_dir=str(root)),
        auth=AuthSettings(admin_key=admin_key),
        cors=CorsSettings(cors_origins=cors_origins),
        model=ModelSettings(served_model_names=("tiny-chat", "org/Tiny-Chat")),
        requests=requests or RequestLimits(),
        uploads=uploads or UploadLimits(),
        streams=streams or StreamSettings(),
        connections=connections or ConnectionLimits(),
        sources=source_settings or SourceSettings(),
    )
    shared = shared_cache or OneProcess()
    reserved = ("tiny", "tiny-chat", "org/Tiny-Chat")
    registry = Registry(Database(url), reserved_names=reserved, shared=shared)
    tracing = tracing or NoTracing()
    keys = {"admin": admin_key or (await registry.create_key(None, ["admin"])).plain}
    for tenant in ("acme", "zen"):
        await registry.create_tenant(tenant)
        for scope in ("inference", "tenant"):
            keys[f"{tenant}:{scope}"] = (await registry.create_key(tenant, [scope])).plain
    engine = engine or FakeEngine()
    blobs = blobs or LocalBlobStore(root / "blobs")
    tokenizer = Tokenizer.from_pretrained(
        write_byte_level_folder(root / "tokenizer", chat_template)
    )
    backends = Backends(
        engine=engine, registry=registry, blobs=blobs, tokenizer=tokenizer, base_model=BASE,
        shared_cache=shared, sources=sources or AdapterSources(SourcePolicy()),
        tracing=tracing,
    )  # fmt: skip
    app = create_app(settings, lambda: contextlib.nullcontext(backends))
    async with _served(tracing.wrap(app), settings.connections) as base_url:
        yield TestService(base_url, app, engine, registry, blobs, tokenizer, root, keys)
    await registry.close()


class _Server(uvicorn.Server):
    """Stops as soon as it is told to; uvicorn looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stop.wait()


@contextlib.asynccontextmanager
async def _served(app: ASGIApp, limits: ConnectionLimits) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    # asyncio sees no TCP in such a socket and leaves Nagle's algorithm on: 40 ms a reply.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(
        answering_when_cut(app), http=bounded_http(limits), ws="none", lifespan="on",
        access_log=False, log_config=None, timeout_graceful_shutdown=2,
    )  # fmt: skip
    server = _Server(config)
    task = asyncio.create_task(server._serve([listener]))  # `serve` would take the signal handlers
    while not server.started:
        await asyncio.sleep(0.001)
        if task.done():
            task.result()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop.set()
        await task
        listener.close()
