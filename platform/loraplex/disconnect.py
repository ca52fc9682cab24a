"""When a client goes away: what is left of its call need not be made."""

from typing import Any

from litestar.types import Receive


async def until_disconnect(receive: Receive) -> None:
    """Return once the client has hung up. What it still sends is taken and dropped."""
    message: Any = None
    while message is None or message["type"] != "http.disconnect":
        message = await receive()
