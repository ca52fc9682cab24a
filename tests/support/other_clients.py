"""Talks to a service through litellm or langchain-openai, in a process of its own.

`python -m tests.support.other_clients litellm|langchain URL` with the key in `LORAPLEX_API_KEY`;
prints what came as one JSON object. A process of its own, for both libraries change the one they
are imported into, and litellm leaves sockets open.
"""

import json
import os
import sys
from typing import Any

MESSAGES = [{"role": "user", "content": "Sort this ticket."}]
SCHEMA = {
    "title": "Ticket",
    "type": "object",
    "properties": {"intent": {"type": "string", "enum": ["refund", "invoice"]}},
    "required": ["intent"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "ticket", "description": "File it", "parameters": SCHEMA},
}


def through_litellm(url: str, key: str) -> dict[str, Any]:
    import litellm

    options: dict[str, Any] = {
        "model": "openai/base", "api_base": f"{url}/v1", "api_key": key, "messages": MESSAGES,
        "max_tokens": 600, "seed": 1, "user": "u", "temperature": 1.0,
    }  # fmt: skip
    named = {"name": "ticket", "schema": SCHEMA, "strict": True}
    as_json = {"type": "json_schema", "json_schema": named}
    whole = litellm.completion(**options, response_format=as_json)
    chunks = litellm.completion(
        **options, response_format=as_json, stream=True, stream_options={"include_usage": True}
    )
    streamed = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    called = litellm.completion(**options, tools=[TOOL], tool_choice="required")
    call = called.choices[0].message.tool_calls[0]
    try:
        litellm.completion(**{**options, "model": "openai/nobody"})
        refusal = ""
    except litellm.NotFoundError:
        refusal = "not found"
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(streamed),
        "total_tokens": whole.usage.total_tokens,
        "call": [call.function.name, json.loads(call.function.arguments)],
        "refusal": refusal,
    }


def through_langchain(url: str, key: str) -> dict[str, Any]:
    import openai
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {
        "base_url": f"{url}/v1", "api_key": key, "max_completion_tokens": 600, "seed": 1,
        "max_retries": 0,
    }  # fmt: skip
    chat = ChatOpenAI(model="base", **options)
    structured = chat.with_structured_output(SCHEMA, method="json_schema", strict=True)
    forced = chat.bind_tools([TOOL], tool_choice="ticket")
    called = forced.invoke("Sort this ticket.")
    streamed = None
    for chunk in forced.stream("Sort this ticket."):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    try:
        ChatOpenAI(model="nobody", **options).invoke("x")
        refusal = ""
    except openai.NotFoundError:
        refusal = "not found"
    return {
        "whole": json.dumps(structured.invoke("Sort this ticket.")),
        "streamed": json.dumps(streamed.tool_calls[0]["args"]),
        "total_tokens": called.usage_metadata["total_tokens"],
        "call": [called.tool_calls[0]["name"], called.tool_calls[0]["args"]],
        "refusal": refusal,
    }


if __name__ == "__main__":
    talk = {"litellm": through_litellm, "langchain": through_langchain}[sys.argv[1]]
    print(json.dumps(talk(sys.argv[2], os.environ["LORAPLEX_API_KEY"])))  # noqa: T201
