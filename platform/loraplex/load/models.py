"""What an endpoint serves, asked before load is sent.

EndpointError        the load cannot be sent; the message says why
├── NoAnswer         nothing answers at the address
└── KeyRefused       the endpoint does not take a key
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import quote

import httpx
import msgspec

from loraplex.load.client import open_client

_SHOWN_MODELS = 8


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


class EndpointError(Exception):
    """The endpoint cannot do what is asked of it."""


class NoAnswer(EndpointError):
    """Nothing answers at its address."""


class KeyRefused(EndpointError):
    """It takes no call with this key, or none about models."""


async def first_model(base_url: str, key: str | None, silence: float) -> str:
    """The first model that an endpoint lists. Raises `EndpointError`.

    `base_url` ends with `/v1/`; `silence`: seconds of it after which nothing answers.
    """
    async with _asking(base_url, key, silence) as http:
        response = await http.get("models")
    _check_key(response, key)
    if response.status_code == 403:
        raise KeyRefused(
            f"{response.url} answers 403: give a key that may call models (a tenant's, with the "
            "scope inference) as --api-key or LORAPLEX_API_KEY, or give --model"
        )
    names = _names(response)
    if not names:
        raise EndpointError(f"{base_url}models names no model (it answers {response.status_code})")
    return names[0]


async def check_models(
    base_url: str, asked: Iterable[tuple[str | None, str]], silence: float
) -> None:
    """Raise `EndpointError` if a pair of key and model would only be refused.

    A model is served that the endpoint lists, or tells of at `models/{model}`. Where a key may not
    ask that, or the endpoint has no such pages, nobody knows, and nothing is raised.
    """
    by_key: dict[str | None, list[str]] = {}
    for key, model in dict.fromkeys(asked):
        by_key.setdefault(key, []).append(model)
    for key, models in by_key.items():
        async with _asking(base_url, key, silence) as http:
            response = await http.get("models")
            _check_key(response, key)
            listed = _names(response)
            for model in models:
                if listed and model not in listed:
                    await _check_unlisted(http, model, listed)


async def _check_unlisted(http: httpx.AsyncClient, model: str, listed: list[str]) -> None:
    response = await http.get(f"models/{quote(model, safe='')}")
    if response.status_code != 404:
        return
    shown = ", ".join(listed[:_SHOWN_MODELS])
    more = f" and {len(listed) - _SHOWN_MODELS} more" if len(listed) > _SHOWN_MODELS else ""
    said = _message(response)
    raise EndpointError(
        f"{http.base_url} serves no model {model!r} to this key: {said + ' ' if said else ''}"
        f"It lists {shown}{more}"
    )


@asynccontextmanager
async def _asking(
    base_url: str, key: str | None, silence: float
) -> AsyncGenerator[httpx.AsyncClient]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        async with open_client(base_url, headers, silence) as http:
            yield http
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise NoAnswer(f"no answer from {base_url}: {reason}") from error


def _check_key(response: httpx.Response, key: str | None) -> None:
    if response.status_code != 401:
        return
    if key is None:
        raise KeyRefused(f"{response.url} needs a key: set LORAPLEX_API_KEY, or give --api-key")
    raise KeyRefused(
        f"{response.url} does not take this API key (LORAPLEX_API_KEY, --api-key or --tenant-key): "
        "it is unknown, revoked or past its time"
    )


def _names(response: httpx.Response) -> list[str]:
    """Of the models in a list; none if it is no list."""
    if not response.is_success:
        return []
    try:
        listed = msgspec.json.decode(response.content, type=_ModelList)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    return [model.id for model in listed.data]


def _message(response: httpx.Response) -> str:
    """What an OpenAI error object says; "" if there is none."""
    try:
        return msgspec.json.decode(response.content, type=_Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
