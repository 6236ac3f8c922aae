"""The state that a new world goes on from: the newest save of which every part is held by somebody who is there.

All ranks say what their node's keeper holds. Parts that another node has are fetched before anything is loaded, and
stay until the new world has committed a save of its own: so another death amid the restart loses nothing.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_hetero.elastic.content import read_content
from ds_hetero.elastic.node.keeper import fetch
from ds_hetero.elastic.segments import SUFFIX, Header, Holding, Save, is_undamaged, read_header, whole_saves
from ds_hetero.elastic.worker import Worker
from ds_hetero.errors import CheckpointError, PeerError
from ds_hetero.runtime.collectives import on_all_ranks


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
    """The parts of a save, all on this node."""

    paths: tuple[tuple[Path, Header], ...]  # by rank
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
            contents = tuple(read_content(path, header) for path, header in own.paths)
            return Found(Kept(save, contents, own.fetched_bytes, time.perf_counter() - begin_s), models)
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
    """Bring every part to this node; None where one of them is damaged everywhere."""
    found, fetched = [], 0
    step = _header_of(nodes, next(iter(places.values()))).save.step
    for rank, of_rank in places.items():
        own = [name for node, name in of_rank if node == worker.place.node]
        path = next((p for name in own if _is_sound(p := worker.place.folder / name)), None)
        if path is None:
            path = worker.place.folder / f"got-{step}-{rank}{SUFFIX}"
            with _alone(worker.place.folder / f".got-{rank}"):
                if not _is_part(path, nodes, of_rank):
                    fetched += _fetch(worker, nodes, of_rank, path)
        header = read_header(path)
        if header is None:
            return None
        found.append((path, header))
    return _Parts(tuple(found), fetched)


def _is_sound(path: Path) -> bool:
    header = read_header(path)
    return header is not None and is_undamaged(path, header)


def _is_part(path: Path, nodes: dict[str, _NodeHoldings], places: list[tuple[str, str]]) -> bool:
    """Whether another worker of this node has fetched it already."""
    wanted = _header_of(nodes, places)
    header = read_header(path)
    return header is not None and (header.save, header.rank) == (wanted.save, wanted.rank)


def _header_of(nodes: dict[str, _NodeHoldings], places: list[tuple[str, str]]) -> Header:
    node, name = places[0]
    return dict(nodes[node].segments)[name]


def _fetch(worker: Worker, nodes: dict[str, _NodeHoldings], places: list[tuple[str, str]], path: Path) -> int:
    errors = []
    for node, name in places:
        if node == worker.place.node:
            continue
        try:
            return fetch(nodes[node].keeper, worker.token, name, path).file_bytes
        except OSError as error:
            errors.append(f"{node}: {error}")
    raise PeerError(f"a part of the state could not be fetched: {'; '.join(errors)}")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other workers of this node out."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
