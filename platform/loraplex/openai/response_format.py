"""`response_format`: replies that are JSON, or JSON of a schema."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loraplex.errors import InvalidRequest
from loraplex.openai.schema_grammar import check_schema, json_schema_grammar
from loraplex.settings import RequestLimits

_SCHEMA_FIELD = "response_format.json_schema.schema"


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Whatever the model says."""


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    """A JSON object."""


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A schema with its name. `strict` or not, replies are held to it."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """JSON of a schema."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


def response_grammar(
    response_format: ResponseFormat | None, limits: RequestLimits
) -> tuple[str, dict[str, Any]] | None:
    """Return the grammar that replies are held to and its schema by the field it came in.

    None for free text. Raises `InvalidRequest` for a schema that is missing, too large or too deep.
    """
    match response_format:
        case JsonSchemaFormat():
            schema = response_format.json_schema.schema
            if schema is None:
                raise InvalidRequest(
                    _SCHEMA_FIELD, f"`{_SCHEMA_FIELD}` is missing", code="missing_field"
                )
            check_schema(schema, _SCHEMA_FIELD, limits)
            return json_schema_grammar(schema), {_SCHEMA_FIELD: schema}
        case JsonObjectFormat():
            return json_schema_grammar({"type": "object"}), {"response_format": {}}
        case _:
            return None
