"""The engine killed under load: how long until clients know, and until they are served again.

    python -m benchmarks.restart [--kills N] [--json FILE]

A real service with streams of an adapter and of the base under way; the engine gets SIGKILL.
Seconds from there to the last pending stream's error event, to the first call that is served again,
and to the first call of the adapter.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.figures import machine, markdown, write_json
from benchmarks.serving.load import client
from benchmarks.serving.options import make_parser, model_dir
from benchmarks.serving.ours import BASE, OurService, our_service
from benchmarks.serving.random_adapters import adapter_names, write_adapters

STREAMS = 16
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds since the kill."""

    last_error: float
    """Until every pending stream had its error event."""
    base_again: float
    adapter_again: float


class Pending:
    """One stream that the kill is to interrupt."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.error_at: float | None = None
        """When its error event came; None if it ended in any other way."""

    async def run(self, http: httpx.AsyncClient, model: str) -> None:
        """Read the stream to its end."""
        async with http.stream("POST", "completions", json=_body(model, 1000, True)) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                    continue
                if "error" in json.loads(line[5:]):
                    self.error_at = time.perf_counter()
                self.has_begun.set()


async def kill_once(service: OurService, adapter: str) -> Restart:
    """Kill the engine while streams run; raises RuntimeError if one of them gets no error event."""
    async with client(service.url, service.key) as http:
        pending = [Pending() for _ in range(STREAMS)]
        models = (BASE, adapter)
        tasks = [
            asyncio.create_task(stream.run(http, models[number % 2]))
            for number, stream in enumerate(pending)
        ]
        await asyncio.gather(*(stream.has_begun.wait() for stream in pending))
        service.process("engine").kill()
        killed = time.perf_counter()
        base, again = await asyncio.gather(*(_served(http, model) for model in models))
        await asyncio.gather(*tasks)
        errors = [stream.error_at for stream in pending if stream.error_at is not None]
        if len(errors) < STREAMS:
            raise RuntimeError(f"{STREAMS - len(errors)} streams ended without an error event")
        return Restart(max(errors) - killed, base - killed, again - killed)


async def _served(http: httpx.AsyncClient, model: str) -> float:
    """When a new call of a model was first served."""
    deadline = time.perf_counter() + PATIENCE_SECONDS
    while time.perf_counter() < deadline:
        reply = await http.post("completions", json=_body(model, 1, False))
        if reply.status_code == 200:
            return time.perf_counter()
        await asyncio.sleep(0.05)
    raise RuntimeError(f"{model} was not served again in {PATIENCE_SECONDS:.0f} s")


def _body(model: str, max_tokens: int, stream: bool) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
    }


def table(restarts: Sequence[Restart]) -> str:
    """One line a kill."""
    columns = ("kill", "last error event s", "base served again s", "adapter served again s")
    rows = [
        [str(number), f"{r.last_error:.2f}", f"{r.base_again:.1f}", f"{r.adapter_again:.1f}"]
        for number, r in enumerate(restarts, 1)
    ]
    return markdown(columns, rows)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    model = model_dir(options)
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as folder:
        adapters = write_adapters(model, Path(folder), adapter_names(1))
        with our_service(model) as service:
            service.push(adapters)
            restarts = [
                asyncio.run(kill_once(service, adapters[0].name)) for _ in range(options.kills)
            ]
    print(f"{machine()}\n\n{table(restarts)}")
    write_json(
        options.json,
        {
            "machine": machine(),
            "last_error_s": [r.last_error for r in restarts],
            "base_again_s": [r.base_again for r in restarts],
            "adapter_again_s": [r.adapter_again for r in restarts],
        },
    )


if __name__ == "__main__":
    main()
