"""Shared memory that the saves of an elastic job need, for ``ds-hetero fit`` and ``ds-hetero doctor``.

docs/elastic.md says what a save holds, and where copies of it lie.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import bytes_text
from ds_hetero.cost import CostModel
from ds_hetero.cost.terms.model_states import saved_bytes
from ds_hetero.elastic.save_rules import Part, choose_copy_nodes, slot_bytes

_DEFAULT_SHM_SHARE = 0.5  # share of a machine's memory that Linux lets /dev/shm take by default


def shared_memory(cost: CostModel, copies: int) -> JsonDict:
    """Return the bytes of shared memory that every node of a cluster needs for saves, as plain data.

    Args:
        copies: number of copies of each rank's part that lie on other nodes.
    """
    cluster = cost.cluster
    names = [node.name for node in cluster.nodes]
    sizes = np.ceil(saved_bytes(cluster, cost.model, cost.workload)).astype(np.int64).tolist()
    parts = []
    for rank, (node, size) in enumerate(zip(cluster.node_of_rank, sizes, strict=True)):
        parts.append(Part(rank=rank, node=names[node], num_bytes=size))
    free_bytes = {node.name: int(_DEFAULT_SHM_SHARE * (node.host_memory_bytes or 0)) for node in cluster.nodes}
    needed_bytes = slot_bytes(parts, choose_copy_nodes(parts, free_bytes, copies))
    return {"copies": copies, "part_bytes": sizes, "shared_memory_bytes": needed_bytes}


def saves_line(cost: CostModel, saves: JsonDict) -> str:
    """Return a line on the node whose memory the saves fill most.

    Args:
        saves: result of `shared_memory`.
    """
    host_bytes_of = {node.name: node.host_memory_bytes for node in cost.cluster.nodes}
    needed_bytes_of = saves["shared_memory_bytes"]

    def fullness(name: str) -> tuple[float, float]:
        """Return the needed share of a node's memory, 0 if that is unknown, and the needed bytes, which break ties."""
        needed_bytes, host_bytes = needed_bytes_of[name], host_bytes_of[name]
        return (needed_bytes / host_bytes if host_bytes else 0.0), needed_bytes

    name = max(needed_bytes_of, key=fullness)
    needed_bytes, host_bytes = needed_bytes_of[name], host_bytes_of[name]
    host_text = "" if host_bytes is None else f" of {bytes_text(host_bytes)}"
    warning = ""
    if host_bytes is not None and needed_bytes > _DEFAULT_SHM_SHARE * host_bytes:
        warning = ", which is more than the half that /dev/shm may have by default"
    copies = saves["copies"]
    copies_text = f"{copies} {'copy' if copies == 1 else 'copies'} of each part"
    return (
        f"saves:      an elastic job with {copies_text} takes {bytes_text(needed_bytes)}{host_text} GiB of the memory "
        f"of {name}{warning}"
    )
