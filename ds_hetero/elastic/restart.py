"""The state that a new world goes on from: the newest save of which every part is held by somebody who is there.

All ranks say what their node's keeper holds. Parts that another node has are fetched before anything is loaded, and
stay until the new world has committed a save of its own: so another death amid the restart loses nothing.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_hetero.common.private_files import open_file
from ds_hetero.elastic.content import read_content
from ds_hetero.elastic.node.keeper import DamagedError, fetch
from ds_hetero.elastic.node.place import TOKEN, is_full
from ds_hetero.elastic.segments import (
    SUFFIX,
    Header,
    Holding,
    Save,
    SegmentFile,
    is_undamaged,
    read_header,
    whole_saves,
)
from ds_hetero.elastic.worker import Worker
from ds_hetero.errors import CheckpointError, PeerError
from ds_hetero.runtime.collectives import on_all_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """A save that was found."""

    save: Save
    contents: tuple[Any, ...]  # the state of every rank that took part in it
    fetched_bytes: int  # that came from other nodes
    seconds: float  # that finding and fetching took


@dataclass(frozen=True)
class Found:
    """Saves that the memory of all nodes holds."""

    kept: Kept | None  # the newest save whose parts are all there and undamaged
    models: dict[str, str]  # fingerprints of the models that there are saves of, whole or not, and where one of each is

    def expect(self, model: str, worker: Worker) -> None:
        """Refuse saves of other models.

        Raises:
            CheckpointError: there are some.
        """
        others = [place for known, place in self.models.items() if known != model]
        if others:
            raise CheckpointError(
                f"the memory of job {worker.place.job} holds saves of another model ({', '.join(others[:3])}). Give "
                f"this job another name (--job), or delete {worker.place.folder} on its nodes."
            )


@dataclass(frozen=True)
class _NodeHoldings:
    """The segments of a rank's node."""

    node: str
    keeper: tuple[str, int]
    segments: tuple[tuple[str, Header], ...]  # name and header of each


@dataclass(frozen=True)
class _Parts:
    """The parts of a save, all on this node and all found to be genuine by this process."""

    segments: tuple[tuple[Path | int, Header], ...]  # by rank; a descriptor where the shared memory had no room
    fetched_bytes: int


def find_newest(worker: Worker, group: dist.ProcessGroup) -> Found:
    """Find and read the newest save whose parts are all there and undamaged.

    Args:
        group: all ranks, over gloo.

    Caller: every rank.
    Collectives: `on_all_ranks` once, and once more for every save that is tried.

    Raises:
        PeerError: a node was lost while its parts were fetched; on every rank.
    """
    begin_s = time.perf_counter()
    nodes = {holdings.node: holdings for holdings in on_all_ranks(lambda: _own_holdings(worker), group)}
    models = {header.model: f"{node}: {name}" for node, one in nodes.items() for name, header in one.segments}
    holdings = [
        Holding(header.save, header.rank, (node, name)) for node, one in nodes.items() for name, header in one.segments
    ]
    for save, places in whole_saves(holdings):
        found = on_all_ranks(lambda p=places: _get_parts(worker, nodes, p), group)  # type: ignore[misc]
        own = found[dist.get_rank(group)]
        if own is not None and None not in found:
            contents = tuple(read_content(segment, header) for segment, header in own.segments)
            for segment, _ in own.segments:
                if isinstance(segment, int):
                    os.close(segment)
            return Found(Kept(save, contents, own.fetched_bytes, time.perf_counter() - begin_s), models)
        if dist.get_rank(group) == 0:
            logger.warning(
                "the save of step %d cannot be used: a part of it is damaged, or was signed with another token (%s, or "
                "the one in the cache folder, has to be that of the job that made it). An older one is looked for.",
                save.step,
                TOKEN,
            )
    return Found(None, models)


def _own_holdings(worker: Worker) -> _NodeHoldings:
    segments = worker.ask_keeper({"do": "list"})["segments"]
    read = [(one.pop("name"), Header(save=Save(**one.pop("save")), **one)) for one in segments]
    address = worker.place.address()
    assert address is not None
    return _NodeHoldings(worker.place.node, address, tuple(read))


def _get_parts(
    worker: Worker, nodes: dict[str, _NodeHoldings], places: dict[int, list[tuple[str, str]]]
) -> _Parts | None:
    """Bring every part to this node; None where one of them is damaged everywhere.

    Each is checked here by its HMAC before anything of it is unpickled.
    """
    found: list[tuple[Path | int, Header]] = []
    fetched = 0
    step = _header_of(nodes, next(iter(places.values()))).save.step
    for rank, of_rank in places.items():
        paths = [worker.place.folder / name for node, name in of_rank if node == worker.place.node]
        part = next((one for path in paths if (one := _sound_part(path, worker)) is not None), None)
        if part is None:
            path = worker.place.folder / f"got-{step}-{rank}{SUFFIX}"
            with _alone(worker.place.folder / f".got-{rank}"):
                part = _fetched_before(path, worker, _header_of(nodes, of_rank))
                if part is None:
                    part = _fetch(worker, nodes, of_rank, path)
                    fetched += 0 if part is None else part[1].file_bytes
        if part is None:
            return None
        found.append(part)
    return _Parts(tuple(found), fetched)


_Segment = tuple[Path | int, Header]


def _sound_part(path: Path, worker: Worker) -> _Segment | None:
    header = read_header(path)
    return None if header is None or not is_undamaged(path, header, worker.token) else (path, header)


def _fetched_before(path: Path, worker: Worker, wanted: Header) -> _Segment | None:
    """The part that another worker of this node has fetched already, if one has."""
    header = read_header(path)
    if header is None or (header.save, header.rank) != (wanted.save, wanted.rank):
        return None
    return _sound_part(path, worker)


def _header_of(nodes: dict[str, _NodeHoldings], places: list[tuple[str, str]]) -> Header:
    node, name = places[0]
    return dict(nodes[node].segments)[name]


def _fetch(
    worker: Worker, nodes: dict[str, _NodeHoldings], places: list[tuple[str, str]], path: Path
) -> _Segment | None:
    """Fetch a part from a node that has it; None where those that have it have none that is genuine.

    Raises:
        PeerError: a node cannot be reached.
    """
    errors, num_damaged = [], 0
    elsewhere = [(node, name) for node, name in places if node != worker.place.node]
    for node, name in elsewhere:
        try:
            return _fetch_from(nodes[node].keeper, worker, name, path)
        except OSError as error:  # noqa: PERF203  the next node is asked
            num_damaged += isinstance(error, DamagedError)
            errors.append(f"{node}: {error}")
    if num_damaged == len(elsewhere):
        return None
    raise PeerError(f"a part of the state could not be fetched: {'; '.join(errors)}")


def _fetch_from(keeper: tuple[str, int], worker: Worker, name: str, path: Path) -> _Segment:
    """Fetch into the shared memory; where it is full, into memory of this process, for it is held elsewhere as well."""
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
def _alone(path: Path) -> Iterator[None]:
    """Keep other workers of this node out."""
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
