"""`x-request-timeout`: how long a call may take, from its arrival to its last token."""

import asyncio
import re
from types import TracebackType
from typing import Any, Self

from litestar.connection import Request

from loraplex.errors import ApiError, InvalidRequest
from loraplex.settings import RequestLimits

TIMEOUT_HEADER = "x-request-timeout"
REQUEST_HEADERS = {
    TIMEOUT_HEADER: "Seconds that the call may take, its wait included; then it ends with 504."
}
"""For the OpenAPI page."""
_SECONDS = re.compile(r"\d{1,9}(\.\d{0,9})?|\.\d{1,9}", re.ASCII)


class Deadline:
    """Made when a call arrives. `async with` it until the engine has queued the call: what takes
    longer than that raises 504. From then on the call's `Generation` looks to it.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self.at = None if seconds is None else asyncio.get_running_loop().time() + seconds
        """On the event loop's clock; None: the call may take for ever."""
        self._limit = asyncio.timeout_at(self.at)

    def exceeded(self) -> ApiError:
        """Return the answer for a call that has not ended in time."""
        return ApiError(
            504,
            "deadline_exceeded",
            f"the request did not end within the {self._seconds:g} s of its {TIMEOUT_HEADER}",
        )

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._limit.__aexit__(exc_type, exc, traceback)
        except TimeoutError:
            raise self.exceeded() from None


def read_deadline(request: Request[Any, Any, Any], limits: RequestLimits) -> Deadline:
    """Read the header, in seconds; raises `InvalidRequest` that names it."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return Deadline(None)
    seconds = float(text) if _SECONDS.fullmatch(text.strip()) else 0.0
    if not 0 < seconds <= limits.max_request_timeout:
        raise InvalidRequest(
            TIMEOUT_HEADER,
            f"`{TIMEOUT_HEADER}` must be a number of seconds above 0 and up to "
            f"{limits.max_request_timeout:g}",
        )
    return Deadline(seconds)
