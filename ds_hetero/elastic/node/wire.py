"""Authenticated connections between the processes of an elastic job: both sides prove that they have the token.

    server -> client   magic 8 bytes, nonce 32
    client -> server   nonce 32, HMAC(token, "client", both nonces) 32
    server -> client   HMAC(token, "server", both nonces) 32
    then, each way     length 4, HMAC(key, number of the message, text) 32, text: JSON

    attack                                      prevented by
    a stranger sends data that break a parser   before the handshake, sizes are fixed and nothing is parsed
    a stranger listens to the token             it is never sent
    a message of another connection is sent     keys are derived from the token and both nonces
    a message is sent back to its sender        there is one key for each direction
    a message is sent a second time             both sides count messages; the number is in the HMAC, but is not sent

Contents of segments are sent raw, after a message that gives their length; the receiver checks their HMAC
(`segments`). Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import select
import socket
import struct
import threading
import time
from typing import Any

Message = dict[str, Any]
"""An object of JSON."""

MAX_MESSAGE_BYTES = 1 << 20
MAX_MESSAGE_DEPTH = 32  # of nested lists and objects; messages of this package have 5
_CHUNK_BYTES = 1 << 20  # of a content that have to be transferred within the timeout
_MAGIC = b"dshet/2\n"
_NONCE_BYTES = _MAC_BYTES = 32
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class WireError(OSError):
    """The other side violates the protocol, or has another token."""


class Wire:
    """An authenticated connection, made by `connect` and `welcome`.

    Args:
        connected: its socket.
        timeout_s: time in which a message has to be received, or sent, completely.
        keys: (of messages to send, of messages to receive).
    """

    def __init__(self, connected: socket.socket, timeout_s: float, keys: tuple[bytes, bytes]) -> None:
        self.timeout_s = timeout_s
        self._socket = connected
        self._send_key, self._receive_key = keys
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()  # two threads that send at the same time would mix up the numbers

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the connection is lost, and is closed.
        """
        text = json.dumps(message).encode()
        with self._sending:
            mac = _mac_of(self._send_key, self._num_sent, text)
            self._num_sent += 1
            try:
                _send_all(self._socket, memoryview(_LENGTH.pack(len(text)) + mac + text), self.timeout_s)
            except BaseException:
                self.close()  # the other side would take the next message for the rest of this one
                raise

    def receive(self) -> Message:
        """Wait for a message, `timeout_s` at most, even if its bytes arrive one by one.

        Raises:
            TimeoutError: the message is not complete in time.
            WireError: the connection has ended, or the message is not the other side's next one.
        """
        deadline_s = time.monotonic() + self.timeout_s
        head = _receive_exactly(self._socket, _LENGTH.size + _MAC_BYTES, deadline_s)
        (length,) = _LENGTH.unpack(head[: _LENGTH.size])
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {length:,} bytes is longer than {MAX_MESSAGE_BYTES:,}")
        text = _receive_exactly(self._socket, length, deadline_s)
        if not hmac.compare_digest(head[_LENGTH.size :], _mac_of(self._receive_key, self._num_received, text)):
            raise WireError("a message does not have the HMAC of the other side")
        self._num_received += 1
        return parse_message(text)

    def send_content(self, content: memoryview) -> None:
        """Send the bytes that a message has announced; `timeout_s` is for each MiB."""
        with self._sending:
            for start in range(0, len(content), _CHUNK_BYTES):
                _send_all(self._socket, content[start : start + _CHUNK_BYTES], self.timeout_s)

    def receive_into(self, view: memoryview) -> None:
        """Receive the announced bytes into ``view``; `timeout_s` is for each MiB."""
        for start in range(0, len(view), _CHUNK_BYTES):
            part = view[start : start + _CHUNK_BYTES]
            try:
                _fill(self._socket, part, time.monotonic() + self.timeout_s)
            except WireError:
                raise WireError(f"the connection was closed before {len(view):,} bytes were received") from None

    def close(self) -> None:
        """End the connection."""
        close(self._socket)


def close(connected: socket.socket) -> None:
    """Close a connection, and wake a thread that waits for it."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
    connected.close()


def connect(host: str, port: int, token: bytes, timeout_s: float) -> Wire:
    """Connect to a server of the job.

    Raises:
        OSError: no process listens there, or it has another token.
    """
    deadline_s = time.monotonic() + timeout_s
    connected = socket.create_connection((host, port), timeout=timeout_s)
    try:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _receive_exactly(connected, len(_MAGIC) + _NONCE_BYTES, deadline_s)
        if hello[: len(_MAGIC)] != _MAGIC:
            raise WireError(f"{host}:{port} is not a node server of this release of ds_hetero")
        client_nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = hello[len(_MAGIC) :] + client_nonce
        connected.sendall(client_nonce + _derive(token, b"client", nonces))
        answer = _receive_exactly(connected, _MAC_BYTES, deadline_s)
        if not hmac.compare_digest(answer, _derive(token, b"server", nonces)):
            raise WireError(f"{host}:{port} has another token: it belongs to another job or to another user")
    except BaseException:
        close(connected)
        raise
    to_server, to_client = _derive(token, b"to server", nonces), _derive(token, b"to client", nonces)
    return Wire(connected, timeout_s, (to_server, to_client))


def welcome(connected: socket.socket, token: bytes, handshake_s: float, timeout_s: float) -> Wire:
    """Do the server's part of `connect`.

    Args:
        handshake_s: time in which the other side has to show the token, in total.
        timeout_s: of the connection afterwards.

    Raises:
        OSError: the other side does not have the token.
    """
    deadline_s = time.monotonic() + handshake_s
    connected.settimeout(handshake_s)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server_nonce = secrets.token_bytes(_NONCE_BYTES)
    connected.sendall(_MAGIC + server_nonce)
    answer = _receive_exactly(connected, _NONCE_BYTES + _MAC_BYTES, deadline_s)
    nonces = server_nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _derive(token, b"client", nonces)):
        raise WireError("the other side has another token")
    connected.sendall(_derive(token, b"server", nonces))
    to_server, to_client = _derive(token, b"to server", nonces), _derive(token, b"to client", nonces)
    return Wire(connected, timeout_s, (to_client, to_server))


def parse_message(text: bytes) -> Message:
    """Parse a message. Raises `WireError`: it is not a JSON object, or nested too deep."""
    # Checked before, because json.loads recurses: a deep text could overflow the stack of C.
    if _depth_of(text) > MAX_MESSAGE_DEPTH:
        raise WireError(f"a message is nested deeper than {MAX_MESSAGE_DEPTH}")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("a message is not JSON") from None
    if not isinstance(message, dict):
        raise WireError("a message is not a JSON object")
    return message


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


def _depth_of(text: bytes) -> int:
    """Return how deep lists and objects are nested; brackets inside strings do not count."""
    deepest = depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", text)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _derive(token: bytes, purpose: bytes, nonces: bytes) -> bytes:
    """Return a key, or a proof of the token, for one purpose and one connection."""
    return hmac.digest(token, purpose + b"\0" + nonces, hashlib.sha256)


def _mac_of(key: bytes, number: int, text: bytes) -> bytes:
    """Return the HMAC of a message and its number."""
    return hmac.digest(key, _NUMBER.pack(number) + text, hashlib.sha256)


def _receive_exactly(connected: socket.socket, count: int, deadline_s: float) -> bytes:
    """Receive ``count`` bytes until a deadline; see `_fill`."""
    buffer = bytearray(count)
    _fill(connected, memoryview(buffer), deadline_s)
    return bytes(buffer)


def _fill(connected: socket.socket, view: memoryview, deadline_s: float) -> None:
    """Receive into ``view`` until a deadline. The socket's own timeout would start again with every byte."""
    done = 0
    while done < len(view):
        _wait(connected, select.POLLIN, deadline_s)
        count = connected.recv_into(view[done:])
        if not count:
            raise WireError("the connection was closed")
        done += count


def _send_all(connected: socket.socket, view: memoryview, timeout_s: float) -> None:
    """Send all bytes of ``view`` within ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    done = 0
    while done < len(view):
        _wait(connected, select.POLLOUT, deadline_s)
        done += connected.send(view[done:])


def _wait(connected: socket.socket, event: int, deadline_s: float) -> None:
    """Wait until the socket is ready. Raises `TimeoutError` at the deadline."""
    remaining_s = deadline_s - time.monotonic()
    poll = select.poll()
    if connected.fileno() < 0:
        raise WireError("the connection was closed")
    poll.register(connected, event)
    if remaining_s <= 0 or not poll.poll(remaining_s * 1e3):  # in milliseconds
        raise TimeoutError("the other side did not answer in time")
