"""What a request leaves open, from the version that answers it."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from adapter_store.registry.records import ServingDefaults
from engine.text.template_renderer import TemplateRenderer
from engine.text.tokenizer import Tokenizer
from loraplex.openai.fields import GenerationFields
from loraplex.openai.resolve import Target
from loraplex.services import Services

Fields = TypeVar("Fields", bound=GenerationFields)


def with_defaults(fields: Fields, target: Target, tokenizer: Tokenizer) -> Fields:
    """Return the request with the version's sampling where it says nothing, and its stop tokens.

    Stop tokens are added to the request's own: they end every reply of the version.
    """
    if target.adapter is None:
        return fields
    serving = target.adapter.serving
    changes: dict[str, Any] = {
        name: value
        for name, value in serving.sampling.items()
        if getattr(fields, name, None) is None
    }
    ids = [tokenizer.token_id(token) for token in serving.stop_tokens]
    if ids:
        changes["stop_token_ids"] = [
            *(fields.stop_token_ids or ()),
            *(token_id for token_id in ids if token_id is not None),
        ]
    return msgspec.structs.replace(fields, **changes) if changes else fields


class VersionTemplate:
    """A version's own chat template, in place of the model's."""

    has_chat_template = True

    def __init__(self, renderer: TemplateRenderer, tenant: str, serving: ServingDefaults) -> None:
        self.takes_tools = serving.takes_tools
        self._source = serving.chat_template or ""
        self._renderer = renderer
        self._tenant = tenant

    def template_has(self, text: str) -> bool:
        """Whether the template has this text in it."""
        return text in self._source

    async def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        """Messages to text; raises `ChatTemplateError`."""
        return await self._renderer.render(self._tenant, self._source, messages, options)


def template_of(services: Services, tenant: str, target: Target) -> VersionTemplate | None:
    """Return the template of the version that answers; None where that is the model's."""
    if target.adapter is None or target.adapter.serving.chat_template is None:
        return None
    return VersionTemplate(services.templates, tenant, target.adapter.serving)
