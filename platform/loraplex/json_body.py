"""JSON bodies: bounded in bytes, time and depth, decoded to structs; errors name the field."""

import asyncio
import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from litestar.connection import Request

from adapter_store.json_words import in_json_words
from loraplex.auth import authenticate_again
from loraplex.errors import ApiError, InvalidRequest
from loraplex.settings import RequestLimits

T = TypeVar("T")

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""One that never ends is taken to the end of the body: looked for again at each of its quotes, it
would hold up the event loop for hours."""
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_STEPS.flags.writeable = False
_PATH = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"(missing required|contains unknown) field `([^`]+)`")


async def read_struct(request: Request[Any, Any, Any], type_: type[T], limits: RequestLimits) -> T:
    """Read a whole body as a struct; an empty one counts as `{}`. Raises `InvalidRequest`."""
    body = await read_body(request, limits) or b"{}"
    _check_depth(body, limits.max_json_depth)
    return decode(body, type_)


async def read_body(request: Request[Any, Any, Any], limits: RequestLimits) -> bytes:
    """Read the body; raises 408 when it does not come in time, 401 or 403 if the call has lost its
    right meanwhile. The app caps its size (413)."""
    try:
        async with asyncio.timeout(limits.body_seconds):
            body = await request.body()
    except TimeoutError:
        raise _too_slow(limits) from None
    await authenticate_again(request)
    return body


async def read_capped(
    request: Request[Any, Any, Any], limits: RequestLimits, max_bytes: int
) -> bytes:
    """As `read_body`, JSON of at most `max_bytes`, on a route that has no cap of its own (413).

    Raises `InvalidRequest` for what is nested too deeply.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise ApiError(
                        413, "body_too_large", f"this body may have {max_bytes} bytes at most"
                    )
    except TimeoutError:
        raise _too_slow(limits) from None
    await authenticate_again(request)
    _check_depth(bytes(body), limits.max_json_depth)
    return bytes(body)


def decode_object(body: bytes, limits: RequestLimits) -> dict[str, msgspec.Raw]:
    """Read the top level only; raises `InvalidRequest` for what is no JSON object, or too deep."""
    _check_depth(body, limits.max_json_depth)
    return decode(body, dict[str, msgspec.Raw])


def decode(body: bytes | msgspec.Raw, type_: type[T]) -> T:
    """Decode JSON as a type; raises `InvalidRequest` that names the field at fault."""
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except msgspec.DecodeError as error:
        _raise_non_finite(bytes(body))
        raise InvalidRequest(
            None, f"the body is not valid JSON: {error}", code="invalid_json"
        ) from None
    except RecursionError:
        raise _too_deep() from None


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    found = _PATH.match(str(error))
    assert found is not None
    message, path = in_json_words(found[1]), (found[2] or "").replace("[...]", "")
    named = _NAMED.search(message)
    if named is not None:
        path = f"{path}.{named[2]}" if path else named[2]
        if named[1] == "contains unknown":
            return InvalidRequest(path, f"`{path}` is not a field of this", code="unknown_field")
        return InvalidRequest(path, f"`{path}` is missing", code="missing_field")
    if not path:
        return InvalidRequest(None, message)
    return InvalidRequest(path, f"`{path}`: {message[:1].lower()}{message[1:]}")


def is_too_deep(body: bytes, max_depth: int) -> bool:
    """Whether a JSON text is nested more deeply than that; of what is no JSON, a guess."""
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False
    # Vectorised: a body of nothing but brackets must not hold up the event loop.
    steps = _STEPS[np.frombuffer(_STRING.sub(b"", body), np.uint8)]
    return bool(steps.size) and int(steps.cumsum(dtype=np.int32).max()) > max_depth


def _check_depth(body: bytes, max_depth: int) -> None:
    if is_too_deep(body, max_depth):
        raise _too_deep(max_depth)


def _too_slow(limits: RequestLimits) -> ApiError:
    return ApiError(408, "body_timeout", f"the body did not arrive in {limits.body_seconds:g} s")


def _too_deep(max_depth: int | None = None) -> InvalidRequest:
    limit = "" if max_depth is None else f"; at most {max_depth} levels are allowed"
    return InvalidRequest(None, f"the JSON is nested too deeply{limit}", code="json_too_deep")


def _raise_non_finite(body: bytes) -> None:
    """NaN and Infinity are no JSON, but some clients send them: name the field all the same."""
    if b"NaN" not in body and b"Infinity" not in body:
        return
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return
    for path in _non_finite(value, ""):
        raise InvalidRequest(path, f"`{path}` must be a finite number")


def _non_finite(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, dict):
        for key, item in cast(dict[str, Any], value).items():
            yield from _non_finite(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(cast(list[Any], value)):
            yield from _non_finite(item, f"{path}[{index}]")
