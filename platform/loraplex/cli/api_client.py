"""The command line's view of a running service: HTTP calls whose failures read like sentences."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import quote

import click
import httpx
from rich.progress import Progress, TaskID

from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE
from adapter_store.errors import RegistryError
from adapter_store.model_ref import check_adapter_name

KEY_SOURCES = (
    "An admin's comes from the first start of `loraplex serve` (printed in a terminal, else in "
    "admin.key under its data directory) or from `loraplex admin-keys create` on its machine, a "
    "tenant's from `loraplex keys create TENANT`"
)
START_ONE = (
    "start a service with `loraplex serve --model DIR`, or say where one is with --url or "
    "LORAPLEX_URL"
)
_KEY_REFUSED = "invalid_api_key"
_TENANT_REQUIRED = "tenant_required"
_LARGE_TIMEOUT = httpx.Timeout(60.0, connect=5.0, read=600.0)
"""The service inspects large uploads, and checks what it exports, one after the other."""


class CallFailed(click.ClickException):
    """The service said no, or did not answer. `code` is its reason code, where it gave one."""

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def segment(name: str) -> str:
    """Return a name as one segment of a path, whatever is in it."""
    return quote(name, safe="").replace(".", "%2E")  # or clients resolve `..`


class ApiClient:
    """A context manager around one HTTP connection pool. Every method raises `CallFailed`."""

    def __init__(self, url: str, key: str, *, timeout: float = 60.0) -> None:
        self._url = url.rstrip("/")
        if not key.isascii() or not key.isprintable():
            raise CallFailed("the API key has characters that no key has")
        try:
            self._http = httpx.Client(
                base_url=self._url,
                headers={"authorization": f"Bearer {key}"},
                timeout=httpx.Timeout(timeout, connect=5.0),
            )
        except httpx.InvalidURL as error:
            raise CallFailed(f"--url {url} is no URL: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    def call(self, method: str, path: str, **kwargs: Any) -> Any:
        """Send one request and return the decoded reply; None for an empty one."""
        response = self._send(method, path, **kwargs)
        try:
            return response.json() if response.content else None
        except ValueError:
            raise CallFailed(f"what answers at {self._url} is not Loraplex; see --url") from None

    def text(self, method: str, path: str, **kwargs: Any) -> str:
        """Send one request and return the reply as it came."""
        return self._send(method, path, **kwargs).text

    def _send(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **kwargs)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._silence(error) from None
        if not response.is_success:
            raise self._refusal(response)
        return response

    def _refusal(self, response: httpx.Response) -> CallFailed:
        error = _error_of(response)
        if error.code == _KEY_REFUSED:
            return _key_refused(self._url)
        return _tenant_required() if error.code == _TENANT_REQUIRED else error

    def _silence(self, error: Exception) -> CallFailed:
        reason = str(error) or type(error).__name__
        fix = f"; {START_ONE}" if isinstance(error, httpx.ConnectError) else ""
        return CallFailed(f"no answer from {self._url}: {reason}{fix}")

    def download(self, path: str, file: Path) -> int:
        """Write what is at `path` into a new file, whole or not at all; returns its bytes."""
        if file.exists():
            raise CallFailed(f"{file} is there already")
        part = file.with_name(file.name + ".part")
        try:
            with self._http.stream("GET", path, timeout=_LARGE_TIMEOUT) as response:
                if not response.is_success:
                    response.read()
                    raise self._refusal(response)
                with part.open("wb") as opened:
                    for chunk in response.iter_bytes():
                        opened.write(chunk)
                part.rename(file)
                return response.num_bytes_downloaded
        except httpx.TransportError as error:
            raise self._silence(error) from None
        except OSError as error:
            raise CallFailed(f"{file} cannot be written: {error.strerror}") from None
        finally:
            part.unlink(missing_ok=True)

    def list_all(self, path: str) -> dict[str, list[dict[str, Any]]]:
        """Return a list that comes in pages, whole."""
        found: list[dict[str, Any]] = []
        params: dict[str, str] = {}
        while True:
            page: dict[str, Any] = self.call("GET", path, params=params)
            found += page["data"]
            if "next" not in page:
                return {"data": found}
            params = {"after": page["next"], "limit": "1000"}

    def push_adapter(
        self,
        name: str,
        source: Path,
        *,
        publish: bool = True,
        serving: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Upload a PEFT folder, or a zip of one, as the next version of `name`.

        `serving` are the parts that say how the version is served, such as `chat_template`. What
        no service takes is refused before anything is sent, and a key before its upload.
        """
        try:
            check_adapter_name(name)
        except RegistryError as error:
            raise CallFailed(f"{error.message} ({error.code})", code=error.code) from None
        if source.is_dir():
            paths = {"config": source / CONFIG_FILE, "weights": source / WEIGHTS_FILE}
            for path in paths.values():
                if not path.is_file():
                    raise CallFailed(f"{source} is no PEFT adapter: it has no {path.name}")
        elif source.suffix == ".zip":
            paths = {"archive": source}
        else:
            raise CallFailed(f"{source} is neither a folder nor a .zip file")
        self.call("GET", "/v1/adapters", params={"limit": "1"})  # needs the rights of an upload
        total = sum(path.stat().st_size for path in paths.values())
        task = progress.add_task(f"Uploading {name}", total=total) if progress else None
        opened: dict[str, IO[bytes]] = {}
        try:
            for field, path in paths.items():
                opened[field] = path.open("rb")
            files = {
                field: (paths[field].name, _Watched(file, progress, task))
                for field, file in opened.items()
            }
            data = {"name": name, "publish": "true" if publish else "false", **(serving or {})}
            return self.call("POST", "/v1/adapters", data=data, files=files, timeout=_LARGE_TIMEOUT)
        except OSError as error:
            raise CallFailed(f"{source} cannot be read: {error.strerror}") from None
        finally:
            for file in opened.values():
                file.close()


class _Watched:
    """A file whose reads move a progress bar. Not seekable for httpx's purposes but sized."""

    def __init__(self, file: IO[bytes], progress: Progress | None, task: TaskID | None) -> None:
        self._file = file
        self._progress = progress
        self._task = task

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self, size: int = -1) -> bytes:
        chunk = self._file.read(size)
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, len(chunk))
        return chunk

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def __iter__(self) -> Any:
        while chunk := self.read(64 * 1024):
            yield chunk


def _key_refused(url: str) -> CallFailed:
    return CallFailed(
        f"the service at {url} does not take this API key (LORAPLEX_API_KEY, or --api-key): it is "
        f"unknown, revoked or past its time. {KEY_SOURCES} (401, {_KEY_REFUSED})",
        status=401, code=_KEY_REFUSED,
    )  # fmt: skip


def _tenant_required() -> CallFailed:
    return CallFailed(
        "this is an admin's key, which belongs to no tenant: name the tenant by --tenant "
        f"(403, {_TENANT_REQUIRED})",
        status=403, code=_TENANT_REQUIRED,
    )  # fmt: skip


def _error_of(response: httpx.Response) -> CallFailed:
    """Read either error shape: OpenAI's under /v1, RFC 9457 elsewhere."""
    try:
        body: dict[str, Any] = response.json()
    except ValueError:
        body = {}
    inner = body.get("error")
    found: dict[str, Any] = inner if isinstance(inner, dict) else body
    text = found.get("message") or found.get("detail") or found.get("title")
    code = found.get("code")
    message = (
        f"{text or response.reason_phrase} ({response.status_code}{f', {code}' if code else ''})"
    )
    return CallFailed(message, status=response.status_code, code=code)
