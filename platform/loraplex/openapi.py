"""What the handlers that read their own body tell the OpenAPI page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar.handlers.http_handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, Operation, Parameter, RequestBody, Schema
from litestar.types import Method

OperationId = Callable[[HTTPRouteHandler, Method, Sequence[Any]], str]


class OpenAIErrorBody(msgspec.Struct, frozen=True):
    """What went wrong; `code` is stable, `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(msgspec.Struct, frozen=True):
    """An error under `/v1`."""

    error: OpenAIErrorBody


class Problem(msgspec.Struct, frozen=True):
    """An RFC 9457 problem: an error outside `/v1`."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    param: str | None = None


def operation(name: str) -> OperationId:
    """Return an operation id for a handler that is mounted with and without `/t/{tenant}`."""

    def operation_id(_: HTTPRouteHandler, __: Method, path: Sequence[Any]) -> str:
        of_tenant = any(getattr(part, "name", None) == "tenant_name" for part in path)
        return f"{name}ForTenant" if of_tenant else name

    return operation_id


def json_body(
    struct: type[msgspec.Struct], headers: Mapping[str, str] | None = None
) -> type[Operation]:
    """Return an operation class that documents a JSON body of this type, and optional headers."""
    return _operation({"application/json": _json_schema(struct)}, headers)


def _json_schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    (schema,), parts = msgspec.json.schema_components([struct], ref_template="{name}")
    return _inline(schema, parts)


def multipart_body(
    properties: Mapping[str, Mapping[str, Any]],
    required: Sequence[str],
    headers: Mapping[str, str] | None = None,
    or_json: type[msgspec.Struct] | None = None,
) -> type[Operation]:
    """Return an operation class that documents a multipart body, and optional headers.

    With `or_json`, the body may be JSON of that type instead.
    """
    form = {"type": "object", "properties": dict(properties), "required": list(required)}
    bodies = {"multipart/form-data": form}
    if or_json is not None:
        bodies["application/json"] = _json_schema(or_json)
    return _operation(bodies, headers)


def _operation(
    bodies: Mapping[str, dict[str, Any]], headers: Mapping[str, str] | None = None
) -> type[Operation]:
    @dataclass
    class DocumentedOperation(Operation):
        def __post_init__(self) -> None:
            self.request_body = RequestBody(
                content={
                    media_type: OpenAPIMediaType(schema=_RawSchema(schema))
                    for media_type, schema in bodies.items()
                },
                required=True,
            )
            if headers:
                self.parameters = [
                    *(self.parameters or ()),
                    *(
                        Parameter(name, "header", schema=_RawSchema({}), description=text)
                        for name, text in headers.items()
                    ),
                ]

    return DocumentedOperation


class _RawSchema(Schema):
    """A schema that is JSON already."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        self._raw = raw

    def to_schema(self) -> dict[str, Any]:
        return self._raw


def _inline(schema: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(parts[schema["$ref"]], parts)
    return {key: _inline(value, parts) for key, value in schema.items() if key != "discriminator"}


def generation_responses(reply: type[msgspec.Struct]) -> dict[int, ResponseSpec]:
    """Return the documented replies of a generation endpoint."""
    return {
        200: ResponseSpec(
            reply, description="The reply; with `stream: true`, chunks as server-sent events."
        ),
        **errors(OpenAIError, 400, 401, 403, 404, 429, 503, 504),
    }


def errors(body: type[msgspec.Struct], *statuses: int) -> dict[int, ResponseSpec]:
    """Return the documented errors."""
    return {
        status: ResponseSpec(
            body, description="An error; `code` says why.", generate_examples=False
        )
        for status in statuses
    }
