"""Wakes a thread that sleeps in poll()."""

import socket


class WakeUp:
    """A flag with a file descriptor: readable from the first `set` until `clear`.

    `set` may be called from any thread and from a signal handler; everything else belongs to the
    thread that sleeps.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Descriptor to poll for reading."""
        return self._reader.fileno()

    def set(self) -> None:
        """Wake the sleeper, or keep it from falling asleep."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            return  # unread bytes are there: it is awake already
        except OSError:
            return  # closed: a reader thread that ends after the loop has nobody to wake

    def clear(self) -> bool:
        """Take the flag down; whether it was up."""
        was_set = False
        try:
            while self._reader.recv(4096):
                was_set = True
        except BlockingIOError:
            pass
        return was_set

    def close(self) -> None:
        """Let go of the descriptors; `set` is harmless from then on."""
        self._writer.close()
        self._reader.close()
