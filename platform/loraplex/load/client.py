"""One streamed call over HTTP, timed event by event."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from loraplex.load.calls import Call
from loraplex.load.outcome import Outcome


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(
            self.text or (delta and (delta.content or delta.reasoning_content or delta.tool_calls))
        )


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Timing(msgspec.Struct):
    queue: dict[str, float] = {}
    load_ms: float = 0.0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    loraplex: _Timing | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class _Reading:
    """A stream so far."""

    token_times: list[float]
    num_events: int = 0
    first_event: float | None = None
    usage: _Usage | None = None
    timing: _Timing | None = None
    finish_reason: str | None = None
    error: str | None = None
    is_done: bool = False

    def take(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.is_done = True
            return
        try:
            event = _decode(payload)
        except msgspec.MsgspecError as error:
            self.error = f"not an event: {error}"
            return
        if event.error is not None:
            self.error = reason(event.error)
        for choice in event.choices:
            self.first_event = now if self.first_event is None else self.first_event
            if choice.has_text:
                self.token_times.append(now)
            self.finish_reason = choice.finish_reason or self.finish_reason
        self.usage = event.usage or self.usage
        self.timing = event.loraplex or self.timing


@asynccontextmanager
async def open_client(
    url: str, headers: Mapping[str, str], silence: float | None = None
) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of an OpenAI base URL without limits of its own; `silence`: seconds of it."""
    async with httpx.AsyncClient(
        base_url=url,
        headers={"accept-encoding": "identity", **headers},
        timeout=httpx.Timeout(silence),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    ) as http:
        yield http


async def stream(
    http: httpx.AsyncClient,
    call: Call,
    *,
    key: str | None,
    due: float,
    now: Callable[[], float],
) -> Outcome:
    """Send a call and read its stream to the end. What fails is in the outcome, never raised."""
    sent = now()
    reading = _Reading([])
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        async with http.stream("POST", call.path, json=call.body, headers=headers) as response:
            if response.status_code == 200:
                await _read(response, reading, now)
            else:
                reading.error = _refusal(response.status_code, await response.aread())
    except httpx.TimeoutException:
        reading.error = "timeout"
    except httpx.HTTPError as error:
        reading.error = type(error).__name__
    if reading.error is None and not reading.is_done and reading.finish_reason is None:
        reading.error = "the stream broke off"
    times = reading.token_times
    if not times and reading.first_event is not None:
        times = [reading.first_event]  # of tokens that are no text
    usage, timing = reading.usage or _Usage(), reading.timing or _Timing()
    return Outcome(
        model=call.model,
        tenant=call.tenant,
        due=due,
        sent=sent,
        ended=now(),
        token_times=times,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens or len(times),
        finish_reason=reading.finish_reason,
        error=reading.error,
        queue=timing.queue,
        load_ms=timing.load_ms,
    )


def reason(error: Any) -> str:
    """The code of an OpenAI error object, else what is said."""
    if isinstance(error, dict):
        fields: dict[str, Any] = error  # pyright: ignore[reportUnknownVariableType]
        return str(fields.get("code") or fields.get("type") or fields.get("message") or fields)
    return str(error)


async def _read(response: httpx.Response, reading: _Reading, now: Callable[[], float]) -> None:
    rest = b""
    async for data in response.aiter_bytes():
        at = now()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                reading.take(line[5:].strip(), at)


def _refusal(status: int, body: bytes) -> str:
    try:
        error = _decode(body).error
    except msgspec.MsgspecError:
        error = None
    return f"{status}" if error is None else f"{status} {reason(error)}"
