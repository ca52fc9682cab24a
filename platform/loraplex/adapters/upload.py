"""A multipart upload on its way to disk: bounded in bytes and time, flat in memory.

Litestar's own form parser is not used: it answers invalid UTF-8 with a 500, spools parts to the
system's temporary folder, and takes whatever parts there are.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import anyio.to_thread
import structlog
from litestar.connection import Request

from adapter_store.disk_space import write_all
from loraplex.adapters.multipart_events import PartEnd, PartStart, multipart_events
from loraplex.errors import InvalidRequest, UploadError, client_gone
from loraplex.settings import UploadLimits

_log = structlog.get_logger("loraplex.adapters")
_MAX_TEXT_BYTES = 1024
_WRITE_BYTES = 1 << 20
MAX_TEMPLATE_BYTES = 64 << 10
_MAX_DEFAULTS_BYTES = 4096
_SERVING_PARTS = ("chat_template", "stop_tokens", "defaults")
_TEXT_PARTS = ("name", "publish", *_SERVING_PARTS)
_FILE_PARTS = ("weights", "archive")
_PARTS = (*_TEXT_PARTS, "config", *_FILE_PARTS)
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Upload:
    """What came: `config` and `weights`, or `archive`. Files lie in the caller's folder.

    `stop_tokens` and `defaults` are JSON, not looked at yet.
    """

    name: str
    publish: bool
    config: bytes | None
    weights: Path | None
    archive: Path | None
    chat_template: str | None = None
    stop_tokens: str | None = None
    defaults: str | None = None


async def receive_upload(
    request: Request[Any, Any, Any],
    folder: Path,
    limits: UploadLimits,
    check_name: Callable[[str], None],
) -> Upload:
    """Receive the parts into `folder`, under names of our own.

    `check_name` is called as soon as the name is known, so that a bad one ends the upload early.
    Raises `UploadError` (408, 413), `InvalidRequest`, or what `check_name` raises.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limits.max_upload_bytes:
        raise _too_large(limits.max_upload_bytes)
    receiver = _Receiver(folder, limits, check_name)
    try:
        async with asyncio.timeout(limits.upload_seconds):
            content_type = request.headers.get("content-type", "")
            async for event in multipart_events(content_type, _chunks(request, limits)):
                await receiver.take(event)
    except TimeoutError:
        raise UploadError(
            408, "upload_timeout",
            f"an upload must arrive in {limits.upload_seconds:g} s, without a pause of more than "
            f"{limits.upload_idle_seconds:g} s",
        ) from None  # fmt: skip
    except OSError as error:
        _log.warning("upload_not_stored", error=error.strerror)
        raise UploadError(
            503, "upload_storage", f"the upload cannot be stored: {error.strerror}"
        ) from error
    finally:
        receiver.close()
    return receiver.result()


async def _chunks(request: Request[Any, Any, Any], limits: UploadLimits) -> AsyncIterator[bytes]:
    received, is_last = 0, False
    while not is_last:
        async with asyncio.timeout(limits.upload_idle_seconds):
            message = await request.receive()
        if message["type"] != "http.request":
            raise client_gone()
        received += len(message["body"])
        if received > limits.max_upload_bytes:
            raise _too_large(limits.max_upload_bytes)
        yield message["body"]
        is_last = not message["more_body"]


def _too_large(limit: int, part: str | None = None) -> UploadError:
    what = "an upload" if part is None else f"the part `{part}`"
    return UploadError(
        413, "upload_too_large", f"{what} may have {limit} bytes at most", param=part
    )


class _Receiver:
    """Puts parts where they belong, one after the other."""

    def __init__(
        self, folder: Path, limits: UploadLimits, check_name: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._check_name = check_name
        self._part = ""
        self._texts: dict[str, bytes] = {}
        self._paths: dict[str, Path] = {}
        self._file: BinaryIO | None = None
        self._buffer = bytearray()

    async def take(self, event: PartStart | bytes | PartEnd) -> None:
        """Take one event of the body."""
        if isinstance(event, PartStart):
            await self._begin(event.name)
        elif isinstance(event, PartEnd):
            await self._end()
        else:
            self._buffer += event
            await self._add()

    async def _begin(self, part: str) -> None:
        if part not in _PARTS:
            raise InvalidRequest(
                part[:64], f"the part `{part[:64]}` is not one of {', '.join(_PARTS)}",
                code="unknown_part",
            )  # fmt: skip
        if part in self._texts or part in self._paths:
            raise InvalidRequest(part, f"the part `{part}` comes twice", code="duplicate_part")
        self._part = part
        self._buffer = bytearray()
        if part in _FILE_PARTS:
            path = self._paths[part] = self._folder / f"{part}.part"
            self._file = await anyio.to_thread.run_sync(lambda: path.open("xb", buffering=0))

    async def _add(self) -> None:
        if self._file is not None:
            if len(self._buffer) >= _WRITE_BYTES:
                await self._flush()
            return
        limit = {
            "config": self._limits.max_upload_config_bytes,
            "chat_template": MAX_TEMPLATE_BYTES,
            "stop_tokens": _MAX_DEFAULTS_BYTES,
            "defaults": _MAX_DEFAULTS_BYTES,
        }.get(self._part, _MAX_TEXT_BYTES)
        if len(self._buffer) > limit:
            raise _too_large(limit, self._part)

    async def _flush(self) -> None:
        file, data = self._file, self._buffer
        assert file is not None
        self._buffer = bytearray()
        await anyio.to_thread.run_sync(write_all, file, data, self._folder)

    async def _end(self) -> None:
        if self._file is not None:
            await self._flush()
            self.close()
            return
        self._texts[self._part] = bytes(self._buffer)
        if self._part == "name":
            self._check_name(self._text("name"))

    def close(self) -> None:
        """Close a file that is still open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def result(self) -> Upload:
        """Return the upload, complete; raises `InvalidRequest` that names the part at fault."""
        if "name" not in self._texts:
            raise InvalidRequest("name", "the part `name` is missing", code="missing_field")
        has_archive = "archive" in self._paths
        for part, has_part in (
            ("config", "config" in self._texts),
            ("weights", "weights" in self._paths),
        ):
            if has_archive and has_part:
                raise InvalidRequest(part, f"send `{part}` or `archive`, not both")
            if not has_archive and not has_part:
                raise InvalidRequest(
                    part, f"the part `{part}` is missing (or send `archive`)", code="missing_field"
                )
        flag = self._text("publish").strip().lower() if "publish" in self._texts else "true"
        if flag not in _FLAGS:
            raise InvalidRequest("publish", "`publish` must be `true` or `false`")
        return Upload(
            name=self._text("name"),
            publish=_FLAGS[flag],
            config=self._texts.get("config"),
            weights=self._paths.get("weights"),
            archive=self._paths.get("archive"),
            **{part: self._text(part) or None for part in _SERVING_PARTS},
        )

    def _text(self, part: str) -> str:
        try:
            return self._texts.get(part, b"").decode()
        except UnicodeDecodeError:
            raise InvalidRequest(part, f"the part `{part}` is not UTF-8") from None
