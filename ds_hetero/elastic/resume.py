"""Resume from the newest save whose parts are all in the memory of nodes that are here.

All ranks say what their node's keeper holds. Saves are tried from the newest on: the parts of one are brought to every
node (`ds_hetero.elastic.part_fetching`) and checked before anything is loaded. They stay until the new world has
committed a save of its own: so another death amid the restart loses nothing.
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
from ds_hetero.elastic.part_fetching import NodeHoldings, Parts, fetch_parts, held_by_node
from ds_hetero.elastic.save_rules import Holding, whole_saves
from ds_hetero.elastic.segments import Save
from ds_hetero.elastic.worker import Worker
from ds_hetero.errors import CheckpointError
from ds_hetero.runtime.collectives import on_all_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedSave:
    """A save that was found and read."""

    save: Save
    contents: tuple[Any, ...]  # the state of every rank that took part in it
    fetched_bytes: int  # that came from other nodes
    seconds: float  # that finding and fetching took


@dataclass(frozen=True)
class SavesInMemory:
    """Saves that the memory of all nodes holds."""

    newest: LoadedSave | None  # whose parts are all there and undamaged
    models: dict[str, str]  # fingerprints of the models that there are saves of, whole or not, and where one of each is

    def expect(self, model: str, worker: Worker) -> None:
        """Refuse saves of other models.

        Raises:
            CheckpointError: there are some.
        """
        others = [place for fingerprint, place in self.models.items() if fingerprint != model]
        if others:
            raise CheckpointError(
                f"the memory of job {worker.place.job} holds saves of another model ({', '.join(others[:3])}). Give "
                f"this job another name (--job), or delete {worker.place.folder} on its nodes."
            )


def find_newest(worker: Worker, group: dist.ProcessGroup) -> SavesInMemory:
    """Find and read the newest save whose parts are all there and undamaged.

    Args:
        group: all ranks, over gloo.

    Caller: every rank.
    Collectives: `on_all_ranks` once, and once more for every save that is tried.

    Raises:
        PeerError: a node was lost while its parts were fetched; on every rank.
    """
    begin_s = time.perf_counter()
    of_ranks = on_all_ranks(lambda: held_by_node(worker), group)
    nodes = {holdings.node: holdings for holdings in of_ranks}  # ranks of one node say the same
    models = _models(nodes)
    for save, places in whole_saves(_holdings(nodes)):
        parts_by_rank = on_all_ranks(partial(fetch_parts, worker, nodes, places), group)
        parts = parts_by_rank[dist.get_rank(group)]
        if parts is not None and None not in parts_by_rank:
            contents = _read(parts)
            seconds = time.perf_counter() - begin_s
            return SavesInMemory(LoadedSave(save, contents, parts.fetched_bytes, seconds), models)
        if dist.get_rank(group) == 0:
            logger.warning(
                "the save of step %d cannot be used: a part of it is damaged, or was signed with another token (%s, or "
                "the one in the cache folder, has to be that of the job that made it). An older one is looked for.",
                save.step,
                TOKEN,
            )
    return SavesInMemory(None, models)


def _models(nodes: Mapping[str, NodeHoldings]) -> dict[str, str]:
    models = {}
    for node, holdings in nodes.items():
        for name, header in holdings.segments:
            models[header.model] = f"{node}: {name}"
    return models


def _holdings(nodes: Mapping[str, NodeHoldings]) -> list[Holding]:
    """Every part that a node holds, and where it is."""
    return [
        Holding(header.save, header.rank, (node, name))
        for node, holdings in nodes.items()
        for name, header in holdings.segments
    ]


def _read(parts: Parts) -> tuple[Any, ...]:
    """Load the state of every rank, and close memory that was taken where the shared memory was full."""
    contents = tuple(read_content(segment, header) for segment, header in parts.segments)
    for segment, _ in parts.segments:
        if isinstance(segment, int):
            os.close(segment)
    return contents
