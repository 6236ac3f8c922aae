"""Bring the parts of a save to this node, from its own shared memory or from the node servers of other nodes.

    state of the part                                   action
    in this node's shared memory, undamaged             use it there
    fetched by another worker of this node              use it there
    on other nodes only                                 fetch it; the nodes that have it are tried in turn
    the same, and the shared memory is full             fetch it to memory of this process

The HMAC of a part is checked before any of it is unpickled.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ds_hetero.common.private_files import open_file
from ds_hetero.elastic.node.node_server_requests import SegmentDamagedError, fetch
from ds_hetero.elastic.node.place import is_full
from ds_hetero.elastic.segments import SUFFIX, Header, Save, SegmentFile, is_undamaged, read_header
from ds_hetero.elastic.worker import Worker
from ds_hetero.errors import PeerError

logger = logging.getLogger(__name__)

Segment = tuple[Path | int, Header]
"""Part of a save on this node: its file, or a descriptor if the shared memory was full; and its header."""
Places = Sequence[tuple[str, str]]
"""Node and file name of every copy of a part."""


@dataclass(frozen=True)
class NodeSegments:
    """The segments in the shared memory of one node, as the node's server lists them."""

    node: str
    node_server: tuple[str, int]  # host and port
    segments: tuple[tuple[str, Header], ...]  # name and header of each


@dataclass(frozen=True)
class Parts:
    """All parts of a save, on this node; this process has checked the HMAC of each."""

    segments: tuple[Segment, ...]  # by rank of the world that made the save
    fetched_bytes: int  # from other nodes, by this process


def segments_of_node(worker: Worker) -> NodeSegments:
    """Ask the node server of this rank's node for its segments."""
    segments = []
    for content in worker.ask_node_server({"do": "list"})["segments"]:
        name, save = content.pop("name"), Save(**content.pop("save"))
        segments.append((name, Header(save=save, **content)))
    address = worker.place.address()
    assert address is not None
    return NodeSegments(worker.place.node, address, tuple(segments))


def fetch_parts(worker: Worker, nodes: Mapping[str, NodeSegments], places: Mapping[int, Places]) -> Parts | None:
    """Bring every part to this node; return None if one part is damaged on every node that has it.

    Args:
        nodes: segments of all nodes, by node.
        places: places of each part, by rank of the world that made the save.

    Raises:
        PeerError: a node cannot be reached.
    """
    segments: list[Segment] = []
    fetched_bytes = 0
    for places_of_part in places.values():
        segment = _find_on_this_node(worker, places_of_part)
        if segment is None:
            segment, num_bytes = _fetch_once(worker, nodes, places_of_part)
            fetched_bytes += num_bytes
        if segment is None:
            return None
        segments.append(segment)
    return Parts(tuple(segments), fetched_bytes)


def _find_on_this_node(worker: Worker, places: Places) -> Segment | None:
    """Return a part's segment in this node's shared memory; None if it has no undamaged segment."""
    for node, name in places:
        if node != worker.place.node:
            continue
        segment = _undamaged_segment(worker.place.folder / name, worker)
        if segment is not None:
            return segment
    return None


def _fetch_once(worker: Worker, nodes: Mapping[str, NodeSegments], places: Places) -> tuple[Segment | None, int]:
    """Fetch a part from another node, unless another worker of this node has done so.

    Returns:
        The segment, None if it is damaged everywhere; and the bytes that this worker has fetched.
    """
    header = _header_of(nodes, places)
    path = worker.place.folder / f"got-{header.save.step}-{header.rank}{SUFFIX}"
    with _locked(worker.place.folder / f".got-{header.rank}"):
        segment = _find_fetched(path, worker, header)
        if segment is not None:
            return segment, 0
        segment = _fetch_from_any(worker, nodes, places, path)
    if segment is None:
        return None, 0
    _, fetched_header = segment
    return segment, fetched_header.file_bytes


def _undamaged_segment(path: Path, worker: Worker) -> Segment | None:
    """Return the segment in a file; None if the segment is dirty, or its HMAC shows damage."""
    header = read_header(path)
    if header is None or not is_undamaged(path, header, worker.token):
        return None
    return path, header


def _find_fetched(path: Path, worker: Worker, expected: Header) -> Segment | None:
    """Return the part that another worker of this node has fetched; None if no worker has."""
    header = read_header(path)
    if header is None or (header.save, header.rank) != (expected.save, expected.rank):
        return None
    return _undamaged_segment(path, worker)


def _header_of(nodes: Mapping[str, NodeSegments], places: Places) -> Header:
    """Return a part's header, from the first node that has it."""
    node, name = places[0]
    return dict(nodes[node].segments)[name]


def _fetch_from_any(worker: Worker, nodes: Mapping[str, NodeSegments], places: Places, path: Path) -> Segment | None:
    """Fetch a part from the first node that sends it undamaged; None if it is damaged on all of them.

    Raises:
        PeerError: a node cannot be reached, so that it is not known whether its part is damaged.
    """
    errors: list[str] = []
    num_damaged = 0
    other_places = [(node, name) for node, name in places if node != worker.place.node]
    for node, name in other_places:
        try:
            return _fetch_from(nodes[node].node_server, worker, name, path)
        except OSError as error:  # noqa: PERF203  try the next node
            num_damaged += isinstance(error, SegmentDamagedError)
            errors.append(f"{node}: {error}")
    if num_damaged == len(other_places):
        return None
    raise PeerError(f"{name}, a part of the state, could not be fetched from any node: {'; '.join(errors)}")


def _fetch_from(node_server: tuple[str, int], worker: Worker, name: str, path: Path) -> Segment:
    """Fetch a part to the shared memory, or to memory of this process if the former is full."""
    try:
        return path, fetch(node_server, worker.token, name, SegmentFile(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        if not is_full(error):
            raise
    # Memory of this process ends with it; that is safe, because the node that sends the part keeps it.
    logger.warning(
        "The shared memory of node %s is full, so %s is read into memory of this process.", worker.place.node, name
    )
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        return descriptor, fetch(node_server, worker.token, name, SegmentFile(path, descriptor))
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock of a file, which all workers of this node use, for the duration of the block."""
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
