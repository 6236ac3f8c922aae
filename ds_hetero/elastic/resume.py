"""Resume from the newest save of which all parts are in the memory of the nodes of this world.

1. Every rank asks its node's server for the segments there; the ranks exchange the answers.
2. The newest complete save is fetched to every node, and each part is checked (`ds_hetero.elastic.part_fetching`).
3. If a part is damaged on any node, the next older complete save is tried.
4. The state is loaded. Segments stay until this world has committed a save itself, so that a death during the
restart loses nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from ds_hetero.elastic.content import read_content
from ds_hetero.elastic.node.place import TOKEN
from ds_hetero.elastic.part_fetching import NodeSegments, Parts, fetch_parts, segments_of_node
from ds_hetero.elastic.save_rules import PartCopy, complete_saves
from ds_hetero.elastic.segments import Save
from ds_hetero.elastic.worker import Worker
from ds_hetero.errors import CheckpointError
from ds_hetero.runtime.collectives import on_all_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedSave:
    """A save that was read from memory."""

    save: Save
    contents: tuple[Any, ...]  # the state of every rank of the world that made the save
    fetched_bytes: int  # by this rank, from other nodes
    seconds: float  # for the search and the fetch


@dataclass(frozen=True)
class SavesInMemory:
    """Saves in the memory of all nodes."""

    newest: LoadedSave | None  # the newest save that is complete and undamaged
    models: dict[str, str]  # place of one segment of every model, also of incomplete saves, by the model's fingerprint

    def expect(self, model: str, worker: Worker) -> None:
        """Raise an error if the memory holds saves of another model.

        Args:
            model: fingerprint of the model that this job trains.

        Raises:
            CheckpointError: there are saves of another model.
        """
        other_places = [place for fingerprint, place in self.models.items() if fingerprint != model]
        if other_places:
            raise CheckpointError(
                f"the memory of job {worker.place.job} holds saves of another model ({', '.join(other_places[:3])}). "
                f"Give this job another name (--job), or delete {worker.place.folder} on its nodes."
            )


def find_newest(worker: Worker, group: dist.ProcessGroup) -> SavesInMemory:
    """Find and read the newest save that is complete and undamaged.

    Args:
        group: all ranks, over gloo.

    Caller: every rank.
    Collectives: `on_all_ranks` once, and once more for every save that is tried.

    Raises:
        PeerError: a node was lost while its parts were fetched; on every rank.
    """
    begin_s = time.perf_counter()
    segments_of_ranks = on_all_ranks(lambda: segments_of_node(worker), group)
    # Ranks of one node have got the same answer.
    nodes = {rank_segments.node: rank_segments for rank_segments in segments_of_ranks}
    models = _models(nodes)
    for save, places in complete_saves(_copies_of_parts(nodes)):
        parts_by_rank = on_all_ranks(partial(fetch_parts, worker, nodes, places), group)
        parts = parts_by_rank[dist.get_rank(group)]
        if parts is not None and None not in parts_by_rank:
            contents = _read(parts)
            seconds = time.perf_counter() - begin_s
            return SavesInMemory(LoadedSave(save, contents, parts.fetched_bytes, seconds), models)
        if dist.get_rank(group) == 0:
            logger.warning(
                "the save of step %d is damaged, or was signed with another token; trying an older save. If all fail, "
                "set %s, or the token in the cache folder, to that of the job that made them.",
                save.step,
                TOKEN,
            )
    return SavesInMemory(None, models)


def _models(nodes: Mapping[str, NodeSegments]) -> dict[str, str]:
    """Return the place of one segment of every model, by the model's fingerprint."""
    models = {}
    for node, node_segments in nodes.items():
        for name, header in node_segments.segments:
            models[header.model] = f"{node}: {name}"
    return models


def _copies_of_parts(nodes: Mapping[str, NodeSegments]) -> list[PartCopy]:
    """Return all segments of all nodes, with their places."""
    copies_of_parts = []
    for node, node_segments in nodes.items():
        for name, header in node_segments.segments:
            copies_of_parts.append(PartCopy(header.save, header.rank, (node, name)))
    return copies_of_parts


def _read(parts: Parts) -> tuple[Any, ...]:
    """Load the state of every rank, and free parts that were fetched to memory without a name."""
    contents = tuple(read_content(segment, header) for segment, header in parts.segments)
    for segment, _ in parts.segments:
        if isinstance(segment, int):
            os.close(segment)
    return contents
