"""What a client still has to tell its engine: messages that must arrive, and refusal counts."""

from collections.abc import Callable

from engine.messages import ClientMessage
from engine.refusal_notes import RefusalNotes


class Outbox:
    """Sends messages in order, and keeps those for which the socket has no room.

    The `send` that it is given returns whether there was room for a message.
    """

    def __init__(self, send: Callable[[ClientMessage], bool]) -> None:
        self._send = send
        self._unsent: list[ClientMessage] = []
        self.refusals = RefusalNotes()
        """Sent with the next `flush`, to whichever engine is there then."""

    def send(self, message: ClientMessage) -> None:
        """Send now, or with a later `flush`."""
        if self._unsent or not self._send(message):
            self._unsent.append(message)

    def flush(self) -> None:
        """Send what there is room for."""
        self.refusals.tell(self._send)
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.pop(0)

    def clear(self) -> None:
        """Forget the messages: the engine that they were meant for is gone."""
        self._unsent.clear()
