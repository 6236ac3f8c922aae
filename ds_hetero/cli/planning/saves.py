"""Shared memory that the saves of an elastic job need, for ``fit`` and ``doctor``; see docs/elastic.md."""

from __future__ import annotations

import numpy as np

from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import bytes_text
from ds_hetero.cost import CostModel
from ds_hetero.cost.terms.model_states import saved_bytes
from ds_hetero.elastic.save_rules import Part, place_copies, slot_bytes

_DEFAULT_SHM_SHARE = 0.5  # of a machine's memory, which Linux lets /dev/shm take by default


def shared_memory(cost: CostModel, copies: int) -> JsonDict:
    """Return the bytes that every node of a cluster needs, as plain data.

    Args:
        copies: of each rank's part on other nodes.
    """
    cluster = cost.cluster
    names = [node.name for node in cluster.nodes]
    sizes = np.ceil(saved_bytes(cluster, cost.model, cost.workload)).astype(np.int64).tolist()
    parts = []
    for rank, (node, size) in enumerate(zip(cluster.node_of_rank, sizes, strict=True)):
        parts.append(Part(rank=rank, node=names[node], num_bytes=size))
    free_bytes = {node.name: int(_DEFAULT_SHM_SHARE * (node.host_memory_bytes or 0)) for node in cluster.nodes}
    needed_bytes = slot_bytes(parts, place_copies(parts, free_bytes, copies))
    return {"copies": copies, "part_bytes": sizes, "shared_memory_bytes": needed_bytes}


def saves_line(cost: CostModel, saves: JsonDict) -> str:
    """Return a line on the node whose memory the saves fill most."""
    host_bytes_of = {node.name: node.host_memory_bytes for node in cost.cluster.nodes}
    needed_bytes_of = saves["shared_memory_bytes"]

    def fullness(name: str) -> tuple[float, float]:
        """Needed share of the node's memory; if that is unknown, the needed bytes decide."""
        needed_bytes, host_bytes = needed_bytes_of[name], host_bytes_of[name]
        return (needed_bytes / host_bytes if host_bytes else 0.0), needed_bytes

    name = max(needed_bytes_of, key=fullness)
    needed_bytes, host_bytes = needed_bytes_of[name], host_bytes_of[name]
    of = "" if host_bytes is None else f" of {bytes_text(host_bytes)}"
    warning = ""
    if host_bytes is not None and needed_bytes > _DEFAULT_SHM_SHARE * host_bytes:
        warning = ", which is more than the half that /dev/shm may have by default"
    copies = saves["copies"]
    copies_text = f"{copies} {'copy' if copies == 1 else 'copies'} of each part"
    return (
        f"saves:      an elastic job with {copies_text} takes {bytes_text(needed_bytes)}{of} GiB of the memory of "
        f"{name}{warning}"
    )
