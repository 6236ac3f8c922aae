"""Bring the parts of a save to this node, from its own shared memory or from the keepers of other nodes.

    part in this node's shared memory, and sound            it is used where it is
    another worker of this node has fetched it already      likewise
    else                                                    fetched from one node after the other that holds it
    the shared memory is full                               fetched into memory of this process

A part is checked by its HMAC before anything of it is unpickled.
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
from ds_hetero.elastic.node.keeper_requests import DamagedError, fetch
from ds_hetero.elastic.node.place import is_full
from ds_hetero.elastic.segments import SUFFIX, Header, Save, SegmentFile, is_undamaged, read_header
from ds_hetero.elastic.worker import Worker
from ds_hetero.errors import PeerError

logger = logging.getLogger(__name__)

Segment = tuple[Path | int, Header]
"""A part of a save: its file, or a descriptor where the shared memory had no room; and its header."""
Places = Sequence[tuple[str, str]]
"""Node and file of every copy of a part."""


@dataclass(frozen=True)
class NodeHoldings:
    """The segments of a rank's node."""

    node: str
    keeper: tuple[str, int]
    segments: tuple[tuple[str, Header], ...]  # name and header of each


@dataclass(frozen=True)
class Parts:
    """The parts of a save, all on this node and all found to be genuine by this process."""

    segments: tuple[Segment, ...]  # by rank
    fetched_bytes: int


def held_by_node(worker: Worker) -> NodeHoldings:
    """What the keeper of this rank's node holds."""
    segments = []
    for content in worker.ask_keeper({"do": "list"})["segments"]:
        name, save = content.pop("name"), Save(**content.pop("save"))
        segments.append((name, Header(save=save, **content)))
    address = worker.place.address()
    assert address is not None
    return NodeHoldings(worker.place.node, address, tuple(segments))


def fetch_parts(worker: Worker, nodes: Mapping[str, NodeHoldings], places: Mapping[int, Places]) -> Parts | None:
    """Bring every part to this node; None where one of them is damaged everywhere.

    Args:
        nodes: holdings by node.
        places: by rank of the save, where its part is.

    Raises:
        PeerError: a node cannot be reached.
    """
    segments: list[Segment] = []
    fetched_bytes = 0
    for of_part in places.values():
        segment = _on_this_node(worker, of_part)
        if segment is None:
            segment, num_bytes = _brought(worker, nodes, of_part)
            fetched_bytes += num_bytes
        if segment is None:
            return None
        segments.append(segment)
    return Parts(tuple(segments), fetched_bytes)


def _on_this_node(worker: Worker, places: Places) -> Segment | None:
    for node, name in places:
        if node != worker.place.node:
            continue
        segment = _sound_segment(worker.place.folder / name, worker)
        if segment is not None:
            return segment
    return None


def _brought(worker: Worker, nodes: Mapping[str, NodeHoldings], places: Places) -> tuple[Segment | None, int]:
    """A part from another node, and the bytes that this worker has fetched for it."""
    wanted = _header_of(nodes, places)
    path = worker.place.folder / f"got-{wanted.save.step}-{wanted.rank}{SUFFIX}"
    with _locked(worker.place.folder / f".got-{wanted.rank}"):
        segment = _fetched_before(path, worker, wanted)
        if segment is not None:
            return segment, 0
        segment = _fetch_from_any(worker, nodes, places, path)
    return segment, 0 if segment is None else segment[1].file_bytes


def _sound_segment(path: Path, worker: Worker) -> Segment | None:
    header = read_header(path)
    if header is None or not is_undamaged(path, header, worker.token):
        return None
    return path, header


def _fetched_before(path: Path, worker: Worker, wanted: Header) -> Segment | None:
    """The part that another worker of this node has fetched already, if one has."""
    header = read_header(path)
    if header is None or (header.save, header.rank) != (wanted.save, wanted.rank):
        return None
    return _sound_segment(path, worker)


def _header_of(nodes: Mapping[str, NodeHoldings], places: Places) -> Header:
    node, name = places[0]
    return dict(nodes[node].segments)[name]


def _fetch_from_any(worker: Worker, nodes: Mapping[str, NodeHoldings], places: Places, path: Path) -> Segment | None:
    """Fetch a part from a node that has it; None where those that have it have none that is genuine.

    Raises:
        PeerError: a node cannot be reached.
    """
    errors, num_damaged = [], 0
    other_places = [(node, name) for node, name in places if node != worker.place.node]
    for node, name in other_places:
        try:
            return _fetch_from(nodes[node].keeper, worker, name, path)
        except OSError as error:  # noqa: PERF203  the next node is asked
            num_damaged += isinstance(error, DamagedError)
            errors.append(f"{node}: {error}")
    if num_damaged == len(other_places):
        return None
    raise PeerError(f"a part of the state could not be fetched: {'; '.join(errors)}")


def _fetch_from(keeper: tuple[str, int], worker: Worker, name: str, path: Path) -> Segment:
    """Fetch into the shared memory; where it is full, into memory of this process: another node has it, too."""
    try:
        return path, fetch(keeper, worker.token, name, SegmentFile(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        if not is_full(error):
            raise
    logger.warning("the shared memory of node %s is full; %s is read into other memory", worker.place.node, name)
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        return descriptor, fetch(keeper, worker.token, name, SegmentFile(path, descriptor))
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other workers of this node out."""
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
