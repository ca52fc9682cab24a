"""The engine in the caller's own process and event loop: for tests."""

from engine.adapter_host import AdapterHost
from engine.client import FetchAdapter
from engine.core import EngineCore
from engine.messages import EngineInfo


class InlineEngineClient:
    """`engine.client.EngineClient` around an `EngineCore`, without sockets.

    `async with InlineEngineClient(core, info) as client: ...`
    """

    def __init__(
        self,
        core: EngineCore,
        info: EngineInfo,
        *,
        host: AdapterHost | None = None,
        fetch: FetchAdapter | None = None,
        threaded: bool = False,
    ) -> None: ...
