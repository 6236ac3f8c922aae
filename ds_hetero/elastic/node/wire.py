"""Messages between the processes of an elastic job: lines of JSON over TCP, behind a token, never pickles.

Who connects is sent a random text and answers with its HMAC under the job's token; then it asks for the same in return.
Neither sends the token. Contents travel raw, after a line that says how many bytes follow.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
from typing import Any

Message = dict[str, Any]
"""An object of JSON."""

MAX_LINE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20


class WireError(OSError):
    """The other side does not hold to the protocol, or has another token."""


class Wire:
    """One connection.

    Args:
        connected: a socket; its timeout bounds every call.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = connected.makefile("rb")

    def send(self, message: Message) -> None:
        """Send a message."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message:
        """Wait for a message.

        Raises:
            WireError: the connection has ended, or what came is no message.
        """
        line = self._file.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise WireError("the connection was closed" if len(line) < MAX_LINE_BYTES else "a line has no end")
        try:
            message = json.loads(line)
        except ValueError:
            raise WireError("what came is no JSON") from None
        if not isinstance(message, dict):
            raise WireError("what came is no object")
        return message

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the bytes that follow."""
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done : done + _CHUNK_BYTES])
            if not count:
                raise WireError(f"the connection was closed after {done:,} of {len(view):,} bytes")
            done += count

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self.socket.close()


def connect(host: str, port: int, token: bytes, timeout_s: float) -> Wire:
    """Connect to a server of the job, which shows that it has the token, too.

    Raises:
        OSError: nobody listens there, or it has another token.
    """
    wire = Wire(socket.create_connection((host, port), timeout=timeout_s))
    try:
        question = wire.receive().get("question")
        own = secrets.token_hex(16)
        wire.send({"answer": _answer(token, "client", question), "question": own})
        if not _is_answer(wire.receive().get("answer"), token, "server", own):
            raise WireError(f"{host}:{port} has another token: it is of another job, or of somebody else")
    except BaseException:
        wire.close()
        raise
    return wire


def welcome(connected: socket.socket, token: bytes) -> Wire:
    """The server's part of `connect`.

    Raises:
        OSError: the other side does not have the token.
    """
    wire = Wire(connected)
    question = secrets.token_hex(16)
    wire.send({"question": question})
    reply = wire.receive()
    if not _is_answer(reply.get("answer"), token, "client", question):
        wire.close()
        raise WireError("the token does not fit")
    wire.send({"answer": _answer(token, "server", reply.get("question"))})
    return wire


def _answer(token: bytes, side: str, question: object) -> str:
    return hmac.new(token, f"{side}:{question}".encode(), hashlib.sha256).hexdigest()


def _is_answer(given: object, token: bytes, side: str, question: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given, _answer(token, side, question))
