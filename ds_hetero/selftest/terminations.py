"""See a SIGTERM from another thread, while the main thread hangs in a collective.

Python runs signal handlers in the main thread, between two instructions of Python; a main thread that waits inside a
collective runs none. But Python's C code writes the number of the signal to a file descriptor at once
(`signal.set_wakeup_fd`), and any thread can read that.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from typing import Any


class Terminations:
    """Keeps SIGTERM from ending this process, and records that it arrived.

    It has to be made in the main thread; made in another one it has no effect.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._former_handler: Any = None
        self._has_arrived = False
        if threading.current_thread() is threading.main_thread():
            self._former_handler = signal.signal(signal.SIGTERM, _ignore)
            self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def arrived(self) -> bool:
        """Return whether a SIGTERM has arrived. Caller: any thread."""
        with contextlib.suppress(BlockingIOError):
            self._has_arrived |= signal.SIGTERM in self._reader.recv(64)
        return self._has_arrived

    def close(self) -> None:
        """Restore the former handler of the signal. Caller: the main thread."""
        if self._former_handler is not None:
            signal.set_wakeup_fd(self._former_fd)
            signal.signal(signal.SIGTERM, self._former_handler)
        self._reader.close()
        self._writer.close()


def _ignore(number: int, frame: object) -> None:
    """Handle SIGTERM by doing nothing: `Terminations.arrived` reads the signal's number instead."""
