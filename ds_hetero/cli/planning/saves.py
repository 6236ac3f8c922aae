"""The shared memory that an elastic job takes for its saves, for ``fit`` and ``doctor``; see docs/elastic.md."""

from __future__ import annotations

import numpy as np

from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import bytes_text
from ds_hetero.cost import CostModel
from ds_hetero.cost.terms.model_states import saved_bytes
from ds_hetero.elastic.save_rules import Part, place_copies, slot_bytes

_OF_DEFAULT = 0.5  # of a machine's memory, that Linux lets /dev/shm take


def shared_memory(cost: CostModel, copies: int) -> JsonDict:
    """Bytes that every node of a cluster needs, as plain data; ``copies`` of each rank's part on other nodes."""
    cluster = cost.cluster
    names = [node.name for node in cluster.nodes]
    sizes = np.ceil(saved_bytes(cluster, cost.model, cost.workload)).astype(int).tolist()
    parts = [
        Part(rank=rank, node=names[node], num_bytes=size)
        for rank, (node, size) in enumerate(zip(cluster.node_of_rank, sizes, strict=True))
    ]
    free = {node.name: int(_OF_DEFAULT * (node.host_memory_bytes or 0)) for node in cluster.nodes}
    need = slot_bytes(parts, place_copies(parts, free, copies))
    return {"copies": copies, "part_bytes": sizes, "shared_memory_bytes": need}


def saves_line(cost: CostModel, saves: JsonDict) -> str:
    """The fullest node, as a line."""
    host = {node.name: node.host_memory_bytes for node in cost.cluster.nodes}
    name, need = max(saves["shared_memory_bytes"].items(), key=lambda each: _share(each[1], host[each[0]]))
    has = host[name]
    of = "" if has is None else f" of {bytes_text(has)}"
    warning = ""
    if has is not None and need > _OF_DEFAULT * has:
        warning = ", which is more than the half that /dev/shm may have by default"
    copies = saves["copies"]
    kept = f"{copies} {'copy' if copies == 1 else 'copies'} of each part"
    return f"saves:      an elastic job with {kept} takes {bytes_text(need)}{of} GiB of the memory of {name}{warning}"


def _share(need: int, has: float | None) -> tuple[float, float]:
    return (need / has, need) if has else (0.0, need)
