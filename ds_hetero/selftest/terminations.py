"""The launcher's signal to end (SIGTERM), seen by a thread while the main thread stands in a call below Python.

Python runs handlers of signals in its main thread, between two instructions; one that waits in a collective runs none.
Its C code writes the number of the signal to a file descriptor at once, though, and that any thread can read.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from typing import Any


class Terminations:
    """Keeps SIGTERM from ending this process, and notes it; made in the main thread, and without effect elsewhere."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: Any = None
        self._was_told = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _note)
            self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def arrived(self) -> bool:
        """Whether the signal has come; any thread may ask."""
        with contextlib.suppress(BlockingIOError):
            self._was_told |= signal.SIGTERM in self._reader.recv(64)
        return self._was_told

    def close(self) -> None:
        """Let the signal do what it did before. Caller: the main thread."""
        if self._before is not None:
            signal.set_wakeup_fd(self._former_fd)
            signal.signal(signal.SIGTERM, self._before)
        self._reader.close()
        self._writer.close()


def _note(number: int, frame: object) -> None:
    """The handler: what follows is the reading thread's matter."""
