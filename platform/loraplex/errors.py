"""Exceptions of the service, and how every exception becomes an answer.

ApiError                 an answer with a status, a reason code and, where one is at fault, a field
├── Unauthenticated      401: no key, or one that is not (or no longer) good
├── Forbidden            403: the key's scopes do not reach so far
├── InvalidRequest       400: a field is wrong; `.param` names it
├── UnsupportedField     400: a field would change the answer, and is not supported
└── UploadError          an upload that was given up: too large, too slow, malformed

Answers are OpenAI-shaped under `/v1` and `/t/{tenant}/v1`, and where vLLM has calls of its own;
RFC 9457 problems elsewhere.
"""

import math
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, cast

from litestar.exceptions import HTTPException
from sqlalchemy.exc import SQLAlchemyError

from adapter_store import errors as store
from adapter_store.json_words import in_json_words
from engine.errors import AdapterUnavailable, ClientClosed, EngineUnavailable, RequestRefused

_OPENAI_PATH = re.compile(r"/(?:t/[^/]+/)?(?:v1|tokenize|detokenize|version)(?:/|$)")
_RETRY = {"retry-after": "1"}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_STORE_STATUS: tuple[tuple[type[store.AdapterStoreError], int], ...] = (
    (store.AdapterFormatError, 422),
    (store.ModelNotFound, 404),
    (store.AdapterNotFound, 404),
    (store.VersionNotFound, 404),
    (store.TenantNotFound, 404),
    (store.KeyNotFound, 404),
    (store.AliasNotFound, 404),
    (store.KeyInactive, 409),
    (store.LastAdminKey, 409),
    (store.IdempotencyKeyReused, 422),
    (store.NameTaken, 409),
    (store.VersionInUse, 409),
    (store.AliasConflict, 409),
    (store.ResidencyLimit, 409),
    (store.QuotaExceeded, 409),
    (store.RegistrationNotFound, 404),
    (store.RegistryError, 400),
)
_FULL_QUEUES = frozenset(("queue_full", "tenant_queue_full", "adapter_queue_full"))
_OUR_FAULTS = frozenset(("duplicate_request_id", "engine_error", "invalid_adapter"))
"""Refusals by the engine that no request of a client can bring about."""
_GONE = "client disconnected prematurely"
"""What Litestar says when a client hangs up while its body is read."""
_HTTP_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
}


class ApiError(Exception):
    """An answer other than success."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's class of error."""
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")


class Unauthenticated(ApiError):
    """No key, or one that is not good: an unknown, an expired and a revoked one are told apart by
    nobody."""

    def __init__(self, *, has_key: bool) -> None:
        super().__init__(
            401,
            "invalid_api_key",
            "this API key is unknown, revoked or past its time"
            if has_key
            else "there is no API key: send one as `Authorization: Bearer <key>`",
            headers={"www-authenticate": "Bearer"},
        )


class Forbidden(ApiError):
    """The key is good, but not for this."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(403, code, message)


class InvalidRequest(ApiError):
    """A field of the request is wrong."""

    def __init__(self, param: str | None, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(400, code, message, param=param)


class UnsupportedField(InvalidRequest):
    """A field that would change the answer, and that this service does not support."""

    def __init__(self, param: str, hint: str = "leave it out") -> None:
        super().__init__(param, f"`{param}` is not supported: {hint}", code="unsupported_field")


class UploadError(ApiError):
    """An upload that was given up before it was stored."""


def as_api_error(error: Exception) -> ApiError:
    """Return the answer that an exception deserves; a 500 that tells nothing if unforeseen."""
    match error:
        case ApiError():
            return error
        case RequestRefused() if error.code in _FULL_QUEUES:
            return _full_queue(error)
        case RequestRefused() if error.code in _OUR_FAULTS:
            return ApiError(500, error.code, error.message)
        case RequestRefused():
            return ApiError(400, error.code, error.message, param=error.param)
        case ClientClosed():
            return shutting_down()
        case EngineUnavailable():
            return ApiError(503, "engine_unavailable", str(error), headers=_RETRY)
        case AdapterUnavailable() | store.BlobError():
            return adapter_unavailable()
        case store.RegistryUnavailable() | SQLAlchemyError():
            return ApiError(
                503, "registry_unavailable", "the registry does not answer", headers=_RETRY
            )
        case store.TooManyRegistrations():
            return ApiError(429, error.code, error.message, headers=_RETRY)
        case store.SourceError(code="source_not_allowed"):
            return ApiError(403, error.code, error.message, param=error.field)
        case store.SourceError(code="upload_storage"):
            return ApiError(503, error.code, error.message)
        case store.SourceError():
            return ApiError(400, error.code, error.message, param=error.field)
        case store.AdapterStoreError():
            return _from_store(error)
        case HTTPException():
            return _from_http(error)
        case _:
            return ApiError(500, "internal_error", "an unexpected error; it has been logged")


def client_gone() -> ApiError:
    """Return the answer that nobody will read."""
    return ApiError(499, "client_closed_request", "the client went away")


def shutting_down() -> ApiError:
    """Return the answer for what still runs, or comes, when the time of a stop is over."""
    return ApiError(
        503, "shutting_down", "the service is shutting down; send it again", headers=_RETRY
    )


def adapter_unavailable() -> ApiError:
    """Return the answer for an adapter whose files cannot be brought to the engine."""
    return ApiError(503, "adapter_unavailable", "the adapter's files cannot be loaded now")


def _full_queue(error: RequestRefused) -> ApiError:
    headers = dict(_RETRY)
    if error.limit is not None:
        headers["x-loraplex-queue-limit"] = str(error.limit)
    if (found := error.congestion) is not None:
        headers["retry-after"] = str(math.ceil(found.retry_after))
    if found is not None and error.code != "queue_full":  # how busy all others are is not told
        headers["x-loraplex-queue-length"] = str(found.queued)
        headers["x-loraplex-queue-drain-per-second"] = f"{found.drain_per_second:.3f}"
    return ApiError(429, error.code, error.message, headers=headers)


def _from_store(error: store.AdapterStoreError) -> ApiError:
    status = next((status for kind, status in _STORE_STATUS if isinstance(error, kind)), 500)
    code = cast(str, getattr(error, "code", "internal_error"))
    return ApiError(status, code, str(error), param=getattr(error, "field", None))


def _from_http(error: HTTPException) -> ApiError:
    status = error.status_code
    if status == 500 and error.detail == _GONE:
        return client_gone()
    if status >= 500:
        return ApiError(status, "internal_error", HTTPStatus(status).phrase)
    param: str | None = None
    message = error.detail or HTTPStatus(status).phrase
    extra = cast(Any, error.extra)
    if isinstance(extra, list) and extra and isinstance(extra[0], dict):
        first = cast(dict[str, Any], extra[0])
        param, message = first.get("key"), in_json_words(str(first.get("message", message)))
    return ApiError(
        status, _HTTP_CODES.get(status, "invalid_request"), message,
        param=param, headers=error.headers,
    )  # fmt: skip


def is_openai_path(path: str) -> bool:
    """Whether errors at this path have OpenAI's shape."""
    return _OPENAI_PATH.match(path) is not None


def openai_body(error: ApiError) -> dict[str, Any]:
    """Return `{"error": {"message", "type", "param", "code"}}`."""
    return {
        "error": {
            "message": error.message, "type": error.type, "param": error.param, "code": error.code,
        }
    }  # fmt: skip


def problem_body(error: ApiError) -> dict[str, Any]:
    """Return an RFC 9457 problem document."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": "Client Closed Request"
        if error.status == 499
        else HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": error.message,
        "code": error.code,
    }
    if error.param is not None:
        body["param"] = error.param
    return body
