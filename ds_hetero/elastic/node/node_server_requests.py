"""Requests to a node server: a message and its answer, storing a copy of a segment, fetching a segment."""

from __future__ import annotations

from ds_hetero.elastic.node.wire import Message, Wire, WireError, connect
from ds_hetero.elastic.segments import Header, SegmentFile, is_genuine, parse_header

REQUEST_TIMEOUT_S = 20.0


class SegmentDamagedError(WireError):
    """A fetched segment is complete, but does not have the HMAC of its header."""


def _expect(reply: Message, key: str) -> None:
    """Raise the error in a reply, unless it has the expected key."""
    if key not in reply:
        raise WireError(str(reply.get("error", reply)))


def ask(address: tuple[str, int], token: bytes, message: Message, timeout_s: float = REQUEST_TIMEOUT_S) -> Message:
    """Send a node server one message over a connection of its own, and return the answer.

    Raises:
        OSError: the node server cannot be reached, has another token, or refuses.
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
    """Store a copy of a segment at a node server, over an open connection, which stays open.

    Raises:
        OSError: the connection is lost, or the node server refuses the copy.
    """
    wire.send({"do": "put", "name": name, "header": header.to_bytes().hex()})
    _expect(wire.receive(), "ready")
    wire.send_content(content)
    _expect(wire.receive(), "stored")


def fetch(address: tuple[str, int], token: bytes, name: str, file: SegmentFile) -> Header:
    """Fetch a segment from a node server into a file. The file stays dirty until the HMAC has been checked.

    Raises:
        SegmentDamagedError: the segment does not have the HMAC of its header.
        OSError: the node server cannot be reached, or does not have the segment.
    """
    wire = connect(*address, token, REQUEST_TIMEOUT_S)
    try:
        wire.send({"do": "get", "name": name})
        reply = wire.receive()
        _expect(reply, "header")
        header = parse_header(bytes.fromhex(reply["header"]))
        if header is None:
            raise WireError(f"{name} has a malformed header")
        content = file.begin(header.end_bytes)
        try:
            wire.receive_into(content)
            if not is_genuine(header, content, token):
                raise SegmentDamagedError(f"{name} is damaged, or belongs to another job")
        finally:
            content.release()
        file.finish(header)
    finally:
        file.close()
        wire.close()
    return header
