"""What `benchmarks.soak` does to a service: requests, disconnects, uploads, deletes, kills.

Everything is drawn from one seed. An answer is kept by (tenant, `name@N`, question) and every
later one must be equal to it: versions are immutable, seeds are given, and neither neighbours nor
preemptions nor restarts may change a token.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

BASE = "base"
NAMES = ("alpha", "beta", "gamma", "delta")
PROMPTS = tuple(
    f"{number}. " + sentence * repeats
    for number, (sentence, repeats) in enumerate(
        [
            ("How do I reset my password?", 1),
            ("List three steps to bake bread, and say why each of them matters. ", 6),
            ("My order has not arrived and the tracking page shows nothing. ", 18),
        ]
    )
)
CLEAN_ERRORS = frozenset({"engine_unavailable", "adapter_unavailable", "model_not_found"})


@dataclass
class Record:
    """What happened so far; `faults` must stay empty."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    answers: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    num_compared: int = 0
    killed_at: float = 0.0
    error_seconds: list[float] = field(default_factory=list)
    """From a kill to the error event of a stream that it ended."""
    recovery_seconds: list[float] = field(default_factory=list)
    """From a kill to the first good readiness answer."""

    def fault(self, text: str) -> None:
        self.faults.append(text)
        self.outcomes["FAULT"] += 1

    def compare(self, key: tuple[Any, ...], answer: Any) -> None:
        if key not in self.answers:
            self.answers[key] = answer
            return
        self.num_compared += 1
        if self.answers[key] != answer:
            self.fault(f"{key}: {answer!r} is not {self.answers[key]!r}")


@dataclass(frozen=True)
class Tenant:
    name: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


class Traffic:
    """Clients and publishers that go on until told to stop."""

    def __init__(
        self, http: httpx.AsyncClient, tenants: list[Tenant], examples: list[Path], seed: int
    ) -> None:
        self.record = Record()
        self.stopping = asyncio.Event()
        self._http = http
        self._tenants = tenants
        self._examples = examples
        self._seed = seed

    async def readiness(self) -> int:
        """Status of the readiness page."""
        return (await self._http.get("/health/ready")).status_code

    async def ask_for_ever(self, number: int) -> None:
        """One client: one request after another, some of which it does not read to the end."""
        draw = random.Random(self._seed * 1000 + number)
        while not self.stopping.is_set():
            try:
                outcome = await self._ask(draw)
            except httpx.TransportError as error:
                self.record.fault(f"the API broke a connection: {error!r}")
                outcome = "broken connection"
            self.record.outcomes[outcome] += 1
            await asyncio.sleep(draw.expovariate(0.5 if "error" in outcome else 5))

    async def publish_for_ever(self) -> None:
        """Uploads of new and known contents, refused ones, and deletes."""
        draw = random.Random(self._seed)
        while not self.stopping.is_set():
            tenant, name = draw.choice(self._tenants), draw.choice(NAMES)
            action = draw.choice(["upload"] * 8 + ["delete", "garbage"])
            try:
                match action:
                    case "upload":
                        await self.upload(tenant, name, draw.choice(self._examples), draw)
                    case "delete":
                        await self.delete(tenant, name)
                    case _:
                        await self._upload_garbage(tenant, name)
            except httpx.TransportError as error:
                self.record.fault(f"{action}: {error!r}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), draw.uniform(2, 10))

    async def upload(self, tenant: Tenant, name: str, folder: Path, draw: random.Random) -> None:
        """An example, or a version of it that nobody has uploaded: another alpha."""
        config = json.loads((folder / "adapter_config.json").read_text())
        config["lora_alpha"] = draw.choice([16, 16, draw.randint(1, 10_000) / 1000])
        files = {
            "config": ("adapter_config.json", json.dumps(config).encode()),
            "weights": (
                "adapter_model.safetensors",
                (folder / "adapter_model.safetensors").read_bytes(),
            ),
        }
        await self._change(
            "upload", {200, 201}, "POST", "/v1/adapters", tenant, {"name": name}, files
        )

    async def delete(self, tenant: Tenant, name: str) -> None:
        await self._change("delete", {200, 204, 404}, "DELETE", f"/v1/adapters/{name}", tenant)

    async def _upload_garbage(self, tenant: Tenant, name: str) -> None:
        files = {
            "config": ("adapter_config.json", b'{"peft_type": "LORA"}'),
            "weights": ("adapter_model.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00{}"),
        }
        await self._change(
            "refused upload", {400, 422}, "POST", "/v1/adapters", tenant, {"name": name}, files
        )

    async def _change(
        self, what: str, expected: set[int], method: str, path: str, tenant: Tenant,
        data: Any = None, files: Any = None,
    ) -> None:  # fmt: skip
        reply = await self._http.request(
            method, path, data=data, files=files, headers=tenant.headers
        )
        if reply.status_code in expected:
            self.record.outcomes[what] += 1
        else:
            self.record.fault(f"{what}: {reply.status_code} {reply.text[:200]}")

    async def _ask(self, draw: random.Random) -> str:
        tenant = draw.choice(self._tenants)
        body = {
            "model": draw.choice([BASE, *NAMES, *NAMES]),
            "prompt": draw.choice(PROMPTS),
            "max_tokens": draw.choice([1, 24, 60]),
            "n": draw.choice([1, 1, 2]),
            "temperature": draw.choice([0, 1]),
            "seed": 7,
            "ignore_eos": True,
            "stream": draw.random() < 0.8,
        }
        leaves_after = draw.choice([None, None, None, 0, 1, 8])
        if body["stream"]:
            return await self._stream(tenant, body, leaves_after)
        return await self._whole(tenant, body, leaves_after)

    async def _whole(self, tenant: Tenant, body: dict[str, Any], leaves_after: int | None) -> str:
        seconds = None if leaves_after is None else 0.05 * leaves_after + 0.02
        try:
            async with asyncio.timeout(seconds):
                reply = await self._http.post("/v1/completions", json=body, headers=tenant.headers)
        except TimeoutError:
            return "left before a whole answer"
        if reply.status_code != 200:
            return self._refusal(reply.status_code, reply.json())
        texts = {c["index"]: (c["text"], c["finish_reason"]) for c in reply.json()["choices"]}
        return self._answered(tenant, body, reply, texts)

    async def _stream(self, tenant: Tenant, body: dict[str, Any], leaves_after: int | None) -> str:
        texts: dict[int, tuple[str, str | None]] = dict.fromkeys(range(body["n"]), ("", None))
        request = self._http.stream("POST", "/v1/completions", json=body, headers=tenant.headers)
        num_events = 0
        async with request as reply:
            if reply.status_code != 200:
                return self._refusal(reply.status_code, json.loads(await reply.aread()))
            async for line in reply.aiter_lines():
                if leaves_after is not None and num_events >= leaves_after:
                    return "left a stream"
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return self._answered(tenant, body, reply, texts)
                num_events += 1
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    if event["error"]["code"] == "engine_unavailable":
                        since = time.monotonic() - self.record.killed_at
                        self.record.error_seconds.append(since)
                    return self._refusal(503, event)
                for choice in event["choices"]:
                    text, _ = texts[choice["index"]]
                    texts[choice["index"]] = text + choice["text"], choice["finish_reason"]
        self.record.fault("a stream ended without [DONE] or an error")
        return "torn stream"

    def _refusal(self, status: int, reply: dict[str, Any]) -> str:
        code = reply.get("error", {}).get("code")
        if code not in CLEAN_ERRORS:
            self.record.fault(f"{status}: {reply}")
        return f"error: {code}"

    def _answered(
        self, tenant: Tenant, body: dict[str, Any], reply: httpx.Response, texts: Any
    ) -> str:
        label = reply.headers["x-loraplex-adapter"]
        if label.partition("@")[0] != body["model"]:
            self.record.fault(f"{body['model']} was answered by {label}")
        question = [body[name] for name in ("prompt", "max_tokens", "n")]
        drawn = body["seed"] if body["temperature"] else None
        whose = BASE if body["model"] == BASE else tenant.name
        self.record.compare((whose, label, *question, drawn), texts)
        return "answered"


async def kill_engines(
    traffic: Traffic, find: Callable[[], psutil.Process], every_seconds: float, until: float
) -> None:
    """Kill the engine now and then, and see how long the service needs to be ready again.

    None is killed later than `until` (of `time.monotonic`), nor so late that it could be.
    """
    record = traffic.record
    while time.monotonic() + every_seconds <= until:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(traffic.stopping.wait(), every_seconds)
            return
        victim = find()
        record.killed_at = time.monotonic()
        victim.kill()
        record.recovery_seconds.append(await seconds_until_ready(traffic, record.killed_at))


async def seconds_until_ready(traffic: Traffic, since: float) -> float:
    """Wait until the service is ready, after it has noticed that it was not."""
    saw_unready = False
    while time.monotonic() < since + 120:
        status = await traffic.readiness()
        saw_unready = saw_unready or status == 503
        if saw_unready and status == 200:
            return time.monotonic() - since
        await asyncio.sleep(0.05)
    traffic.record.fault("the service was not ready again within two minutes of a kill")
    return time.monotonic() - since
