"""A child process that ends with its parent, however that one ended."""

import os
import threading
import time

POLL_SECONDS = 0.5
ORPHANED_EXIT_CODE = 3


def die_with_parent(parent_pid: int | None = None) -> None:
    """End this process, at once and without cleaning up, when its parent is gone.

    `parent_pid` should come from the parent itself: then a parent that ended before this call is
    noticed too. A thread polls, because the kernel's own signal (PR_SET_PDEATHSIG) is already sent
    when the *thread* of the parent ends that started this process.
    """
    expected = parent_pid or os.getppid()

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(POLL_SECONDS)
        os._exit(ORPHANED_EXIT_CODE)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
