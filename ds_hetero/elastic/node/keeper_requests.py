"""Requests to a keeper: ask it one thing, give it a copy of a segment, fetch a segment from it."""

from __future__ import annotations

from ds_hetero.elastic.node.wire import Message, Wire, WireError, connect
from ds_hetero.elastic.segments import Header, SegmentFile, is_genuine, parse_header

REQUEST_TIMEOUT_S = 20.0


class DamagedError(WireError):
    """A segment came whole, and does not have the HMAC of its header."""


def _expect(reply: Message, key: str) -> None:
    if key not in reply:
        raise WireError(str(reply.get("error", reply)))


def ask(address: tuple[str, int], token: bytes, message: Message, timeout_s: float = REQUEST_TIMEOUT_S) -> Message:
    """Ask a keeper one thing.

    Raises:
        OSError: it cannot be reached, has another token, or refuses.
    """
    wire = connect(*address, token, timeout_s)
    try:
        wire.send(message)
        reply = wire.receive()
    finally:
        wire.close()
    if "error" in reply:
        raise WireError(reply["error"])
    return reply


def put(wire: Wire, name: str, header: Header, content: memoryview) -> None:
    """Give a keeper a copy of a segment, over a connection that can be used again.

    Raises:
        OSError: the connection has ended, or the copy is refused.
    """
    wire.send({"do": "put", "name": name, "header": header.to_bytes().hex()})
    _expect(wire.receive(), "ready")
    wire.send_content(content)
    _expect(wire.receive(), "stored")


def fetch(address: tuple[str, int], token: bytes, name: str, file: SegmentFile) -> Header:
    """Get a segment from a keeper; nobody else has it in hand before it was found to be right.

    Raises:
        OSError: it cannot be reached, does not have it, or it came damaged.
    """
    wire = connect(*address, token, REQUEST_TIMEOUT_S)
    try:
        wire.send({"do": "get", "name": name})
        reply = wire.receive()
        _expect(reply, "header")
        header = parse_header(bytes.fromhex(reply["header"]))
        if header is None:
            raise WireError(f"{name} has no sound header")
        content = file.begin(header.end_bytes)
        try:
            wire.receive_into(content)
            if not is_genuine(header, content, token):
                raise DamagedError(f"{name} came damaged, or is not of this job")
        finally:
            content.release()
        file.finish(header)
    finally:
        file.close()
        wire.close()
    return header
