"""Admission of connections to a node server: limit the connections that have not shown the job's token yet.

    connections                limit            beyond the limit
    that wait for the token    `MAX_WAITING`    the oldest one is closed
    that were admitted         `MAX_INSIDE`     the new one is closed

A member of the job shows the token within milliseconds. So the oldest waiting connection is not a member's, however
many connections a stranger opens.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from ds_hetero.elastic.node.wire import Wire, close, welcome

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_WAITING = 128  # threads that strangers can cause; each reads 64 bytes and parses nothing
MAX_INSIDE = 8192  # more than the agents and workers of the largest jobs; chosen


class Admission:
    """Admits connections whose other side has the token.

    Args:
        token: of the job.
        timeout_s: of admitted connections.
        serve: called with each admitted connection, in a thread of its own.
    """

    def __init__(self, token: bytes, timeout_s: float, serve: Callable[[Wire], None]) -> None:
        self._token, self._timeout_s, self._serve = token, timeout_s, serve
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}  # in order of arrival; the values mean nothing
        self._num_inside = 0

    def admit(self, connected: socket.socket) -> None:
        """Start the handshake of an accepted connection in a thread, and return at once."""
        with self._lock:
            self._waiting[connected] = None
            oldest = next(iter(self._waiting)) if len(self._waiting) > MAX_WAITING else None
            if oldest is not None:
                del self._waiting[oldest]
        if oldest is not None:
            close(oldest)  # which also ends its thread
        try:
            threading.Thread(target=self._welcome, args=(connected,), daemon=True).start()
        except RuntimeError:  # the system allows no further thread
            self._leave(connected)
            close(connected)

    def _welcome(self, connected: socket.socket) -> None:
        """Do the handshake, then serve the connection; runs in a thread."""
        try:
            wire = welcome(connected, self._token, HANDSHAKE_S, self._timeout_s)
        except (OSError, ValueError):  # ValueError: `admit` has closed it, so it has no descriptor
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
                logger.warning("%d connections are open, which is the maximum; a new one was closed.", MAX_INSIDE)
        finally:
            wire.close()
            with self._lock:
                self._num_inside -= 1

    def _leave(self, connected: socket.socket) -> None:
        """Remove a connection from those that wait for the handshake."""
        with self._lock:
            self._waiting.pop(connected, None)
