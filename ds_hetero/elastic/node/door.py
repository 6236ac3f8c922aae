"""Door of a keeper: connections that have not shown the job's token, few at a time and none for long.

    waiting    one of at most `MAX_WAITING`; the oldest has to go for a new one
    inside     has shown the token; at most `MAX_INSIDE`

A member of the job shows the token in milliseconds, so the oldest one that waits is none of them, however many come.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from ds_hetero.elastic.node.wire import Wire, close, welcome

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_WAITING = 128  # threads that others can cause; they read 64 bytes and parse nothing
MAX_INSIDE = 8192  # an agent and a worker of each rank of the largest jobs, and some that ask


class Door:
    """Lets in who has the token.

    Args:
        timeout_s: of the connections that are let in.
        serve: serves one of them, in a thread of its own.
    """

    def __init__(self, token: bytes, timeout_s: float, serve: Callable[[Wire], None]) -> None:
        self._token, self._timeout_s, self._serve = token, timeout_s, serve
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}  # in the order in which they came
        self._num_inside = 0

    def admit(self, connected: socket.socket) -> None:
        """Take a connection that was accepted; never waits for it."""
        with self._lock:
            self._waiting[connected] = None
            oldest = next(iter(self._waiting)) if len(self._waiting) > MAX_WAITING else None
            if oldest is not None:
                del self._waiting[oldest]
        if oldest is not None:
            close(oldest)  # its thread ends by that
        try:
            threading.Thread(target=self._welcome, args=(connected,), daemon=True).start()
        except RuntimeError:  # no further thread
            self._leave(connected)
            close(connected)

    def _welcome(self, connected: socket.socket) -> None:
        try:
            wire = welcome(connected, self._token, HANDSHAKE_S, self._timeout_s)
        except (OSError, ValueError):  # ValueError: it was closed for a new one, and has no descriptor
            close(connected)
            return
        finally:
            self._leave(connected)
        with self._lock:
            self._num_inside += 1
            has_room = self._num_inside <= MAX_INSIDE
        try:
            if has_room:
                self._serve(wire)
            else:
                logger.warning("%d connections are open; one more is closed", MAX_INSIDE)
        finally:
            wire.close()
            with self._lock:
                self._num_inside -= 1

    def _leave(self, connected: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(connected, None)
