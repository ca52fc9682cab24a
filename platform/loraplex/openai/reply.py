"""The last step of both endpoints: choose how the reply goes out."""

from typing import Any

from litestar.connection import Request
from litestar.response.base import ASGIResponse

from loraplex.openai.call import Call
from loraplex.openai.fields import GenerationFields
from loraplex.openai.reply_format import ReplyFormat
from loraplex.openai.stream import EventStream, send_whole
from loraplex.services import Services


def includes_usage(fields: GenerationFields) -> bool:
    """Whether the stream ends with a usage event."""
    options = fields.stream_options
    return bool(options and options.include_usage)


async def send_reply(
    request: Request[Any, Any, Any], services: Services, call: Call, fields: GenerationFields,
    reply: ReplyFormat,
) -> ASGIResponse:  # fmt: skip
    """Return the reply of a call that the engine has queued."""
    if not fields.stream:
        return await send_whole(call, reply, request.receive)
    return EventStream(
        call,
        reply,
        include_usage=includes_usage(fields),
        keep_alive_seconds=services.settings.streams.keep_alive_seconds,
    )
