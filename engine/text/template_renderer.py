"""Renders the chat templates of adapters off the event loop, in processes that may die.

A tenant has one job at a time, so that a slow template occupies only one of the workers.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from engine.tenant_turns import TenantTurns
from engine.text.errors import ChatTemplateError
from engine.text.template_worker import LENGTH_BYTES

NUM_WORKERS = 2
_START_SECONDS = 20.0
_WALL_SECONDS = 5.0
"""The worker itself limits its CPU time; this is for a machine on which it gets none."""


class TemplateRenderer:
    """For one event loop; to be entered. Workers start when they are first needed."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._turns = TenantTurns(NUM_WORKERS)
        self._idle: list[Process] = []
        self._dying: set[asyncio.Task[int]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        while self._idle:
            self._kill(self._idle.pop())
        await asyncio.gather(*self._dying)

    async def takes_tools(self, tenant: str, source: str) -> bool:
        """Compile a template; raises ChatTemplateError (`invalid_chat_template`)."""
        reply = await self._ask(tenant, {"source": source})
        return bool(reply["takes_tools"])

    async def render(
        self,
        tenant: str,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """Messages to prompt text; `options` are those of `ChatTemplate.render`.

        Raises ChatTemplateError: what that raises, or `chat_template_failed` where a limit ends it.
        """
        job = {"source": source, "messages": list(messages), "options": dict(options)}
        reply = await self._ask(tenant, job)
        return str(reply["text"])

    async def _ask(self, tenant: str, job: Mapping[str, Any]) -> dict[str, Any]:
        async with self._turns.of(tenant):
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(_WALL_SECONDS):
                    reply = await _exchange(worker, {**job, "special_tokens": self._special_tokens})
            except (TimeoutError, EOFError, ConnectionError):
                self._kill(worker)
                raise ChatTemplateError(
                    "chat_template_failed",
                    "the adapter's chat template takes too much time or memory",
                ) from None
            except BaseException:
                self._kill(worker)
                raise
            self._idle.append(worker)
        if "code" in reply:
            raise ChatTemplateError(reply["code"], reply["message"])
        return reply

    async def _start(self) -> Process:
        # Without the service's environment, which holds keys.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "engine.text.template_worker",
            stdin=PIPE, stdout=PIPE, env={"PYTHONPATH": path, "PYTHONUTF8": "1"},
        )  # fmt: skip
        try:
            async with asyncio.timeout(_START_SECONDS):
                await _read(worker)
        except BaseException:
            self._kill(worker)
            raise
        return worker

    def _kill(self, worker: Process) -> None:
        if worker.returncode is None:
            worker.kill()
        dying = asyncio.create_task(_end(worker))
        self._dying.add(dying)
        dying.add_done_callback(self._dying.discard)


async def _exchange(worker: Process, job: Mapping[str, Any]) -> dict[str, Any]:
    data = json.dumps(job).encode()
    assert worker.stdin is not None
    worker.stdin.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    await worker.stdin.drain()
    return await _read(worker)


async def _read(worker: Process) -> dict[str, Any]:
    assert worker.stdout is not None
    length = int.from_bytes(await worker.stdout.readexactly(LENGTH_BYTES), "little")
    reply: dict[str, Any] = json.loads(await worker.stdout.readexactly(length))
    return reply


async def _end(worker: Process) -> int:
    assert worker.stdin is not None
    worker.stdin.close()
    return await worker.wait()
