"""One file over HTTP, from a host that is not to be trusted.

Bounded in bytes received, whatever the headers announce. A redirect is followed to listed hosts
only, with the same checks again, and takes no credential to another host. The connection goes to
the very address that was checked; the certificate is still checked for the host's name.
"""

import asyncio
import fnmatch
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import certifi
import httpx

from adapter_store.disk_space import write_all
from adapter_store.errors import SourceError
from adapter_store.references.addresses import Resolver, callable_addresses

_MAX_REDIRECTS = 5
_MAX_ADDRESSES = 3
"""Of a host; the first ones are tried, no others."""
_WRITE_BYTES = 1 << 20
_TIMEOUT = httpx.Timeout(20.0, connect=10.0)
"""Seconds without a byte; the caller has a deadline for the whole."""
_PORTS = {"https": 443, "http": 80}

Progress = Callable[[int, int | None], None]
"""Told the bytes received so far and, where they are announced, the bytes to come in all."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What to get, and where a redirect of it may lead."""

    url: str = field(repr=False)  # it may be signed
    redirect_hosts: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


def default_tls() -> ssl.SSLContext:
    """Certificates of the machine (`SSL_CERT_FILE` counts), and those that come with Python."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


@dataclass(frozen=True, slots=True)
class Downloader:
    """Fetches files under the operator's rules."""

    private_hosts: frozenset[str]
    resolve: Resolver
    tls: ssl.SSLContext

    async def download(
        self, file: RemoteFile, target: Path, *, max_bytes: int, progress: Progress
    ) -> httpx.Headers:
        """Write the file to `target`, a new path; return the headers of the first reply.

        Raises `SourceError`, or `OSError` where the disk is at fault; what came stays at `target`.
        """
        origin = httpx.URL(file.url)
        url, headers, first = origin, dict(file.headers), None
        for _ in range(_MAX_REDIRECTS + 1):
            self._check(url, origin, file.redirect_hosts)
            async with self._reply(url, headers) as reply:
                first = first or reply.headers
                if reply.has_redirect_location:
                    following = url.join(reply.headers["location"])
                    if _place(following) != _place(url):
                        headers = {}
                    url = following
                    continue
                _check_status(reply.status_code)
                await _save(reply, target, max_bytes, progress)
                return first
        raise SourceError("source_unavailable", f"more than {_MAX_REDIRECTS} redirects")

    def _check(self, url: httpx.URL, origin: httpx.URL, redirect_hosts: Sequence[str]) -> None:
        if url.userinfo or url.scheme not in _PORTS or not url.host:
            raise SourceError("redirect_not_allowed", "a redirect leads to no plain https URL")
        if _place(url) == _place(origin):
            return
        is_private = url.host in self.private_hosts
        if not any(fnmatch.fnmatchcase(url.host, pattern) for pattern in redirect_hosts):
            raise SourceError(
                "redirect_not_allowed", f"a redirect leads to {url.host[:255]}, which is not listed"
            )
        if not is_private and (url.scheme != "https" or url.port not in (None, 443)):
            raise SourceError("redirect_not_allowed", "a redirect leads to no https on port 443")

    @asynccontextmanager
    async def _reply(
        self, url: httpx.URL, headers: Mapping[str, str]
    ) -> AsyncGenerator[httpx.Response]:
        """The headers of a reply, its body to be read."""
        addresses = await callable_addresses(
            url.host,
            url.port or _PORTS[url.scheme],
            self.resolve,
            may_be_private=url.host in self.private_hosts,
        )
        async with httpx.AsyncClient(
            timeout=_TIMEOUT, verify=self.tls, trust_env=False, follow_redirects=False
        ) as client:
            reply = await _send(client, url, headers, addresses[:_MAX_ADDRESSES])
            try:
                yield reply
            except httpx.HTTPError as error:
                raise _unavailable(url.host, error) from None
            finally:
                await reply.aclose()


async def _send(
    client: httpx.AsyncClient, url: httpx.URL, headers: Mapping[str, str], addresses: Sequence[str]
) -> httpx.Response:
    for address in addresses:
        request = client.build_request(
            "GET",
            url.copy_with(host=address),
            headers={
                "host": url.netloc.decode("ascii"),
                "accept-encoding": "identity",
                "user-agent": "loraplex",
                **headers,
            },
            extensions={"sni_hostname": url.host},
        )
        try:
            return await client.send(request, stream=True)
        except httpx.ConnectError as error:
            if address == addresses[-1]:
                raise _unavailable(url.host, error) from None
        except httpx.HTTPError as error:
            raise _unavailable(url.host, error) from None
    raise AssertionError("a host without addresses has been refused")


async def _save(reply: httpx.Response, target: Path, max_bytes: int, progress: Progress) -> None:
    if reply.headers.get("content-encoding", "identity").lower() != "identity":
        raise SourceError("source_unavailable", "the file comes compressed, which was not asked")
    announced = _announced(reply.headers)
    if announced is not None and announced > max_bytes:
        raise _too_large(max_bytes)
    received, buffer = 0, bytearray()
    with target.open("xb", buffering=0) as file:
        async for chunk in reply.aiter_raw():
            received += len(chunk)
            if received > max_bytes:
                raise _too_large(max_bytes)
            buffer += chunk
            if len(buffer) >= _WRITE_BYTES:
                await asyncio.to_thread(write_all, file, buffer, target.parent)
                progress(received, announced)
                buffer = bytearray()
        await asyncio.to_thread(write_all, file, buffer, target.parent)
    progress(received, announced)


def _announced(headers: httpx.Headers) -> int | None:
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _check_status(status: int) -> None:
    if status == 200:
        return
    if status in (404, 410):
        raise SourceError("source_not_found", "the source has no such file, bucket or revision")
    if status in (401, 403):
        raise SourceError(
            "source_denied", f"the source answers {status}: it is private, or there is no such file"
        )
    raise SourceError("source_unavailable", f"the source answers {status}")


def _place(url: httpx.URL) -> tuple[str, str, int]:
    return url.scheme, url.host, url.port or _PORTS.get(url.scheme, 0)


def _too_large(max_bytes: int) -> SourceError:
    return SourceError("source_too_large", f"a source may have {max_bytes} bytes at most")


def _unavailable(host: str, error: httpx.HTTPError) -> SourceError:
    # The exception's own text may quote the URL, which may be signed.
    code = "source_timeout" if isinstance(error, httpx.TimeoutException) else "source_unavailable"
    return SourceError(code, f"{host[:255]} does not answer as it should: {type(error).__name__}")
