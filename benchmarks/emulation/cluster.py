"""Description of the emulated cluster: nodes, and the speed and memory of each of their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FASTEST_CORES = 0.6
"""Cores of the fastest rank: more, and a rank competes with its own communication threads and with the relay."""

_KEYS = {"speeds", "memory_mib", "bandwidth_gbit_per_s", "latency_us"}


@dataclass(frozen=True, kw_only=True)
class EmulatedNode:
    """One machine of the emulated cluster.

    Args:
        speeds: of its ranks, relative to those of the other nodes.
        memory_bytes: by rank, the bytes that it may allocate beyond those it has when it joins; None for no limit.
        link_bit_per_s: rate of its link to the switch, each way; None for loopback.
        link_delay_s: one-way delay of this link. The delay between two nodes is the sum over both links.
        links: number of its links, each with this rate; its i-th rank uses the i-th link, and so on in turn.
    """

    speeds: tuple[float, ...]
    memory_bytes: tuple[int | None, ...] = ()
    link_bit_per_s: float | None = None
    link_delay_s: float = 0.0
    links: int = 1

    def __post_init__(self) -> None:
        if not self.speeds or not all(0 < speed < float("inf") for speed in self.speeds):
            raise ValueError(f"speeds must be positive numbers, one per rank, got {self.speeds}.")
        if self.memory_bytes and len(self.memory_bytes) != len(self.speeds):
            raise ValueError(f"memory needs an entry for each of {len(self.speeds)} ranks, got {self.memory_bytes}.")


@dataclass(frozen=True, kw_only=True)
class EmulatedCluster:
    """Nodes of an emulated cluster; ranks are numbered in their order.

    Args:
        nodes: all of them have a link, or none.
        fastest_cores: share of a core of the fastest rank.
    """

    nodes: tuple[EmulatedNode, ...]
    fastest_cores: float = FASTEST_CORES

    def __post_init__(self) -> None:
        if len({node.link_bit_per_s is None for node in self.nodes}) != 1:
            raise ValueError("bandwidth_gbit_per_s must be given for all nodes or for none of them.")
        if len({node.links for node in self.nodes}) != 1 or self.nodes[0].links < 1:
            raise ValueError("all nodes must have as many links, at least one.")
        if not 0 < self.fastest_cores <= 1:
            raise ValueError(f"fastest_cores must be in (0, 1], got {self.fastest_cores}.")

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speeds by rank."""
        return tuple(speed for node in self.nodes for speed in node.speeds)

    @property
    def cores(self) -> tuple[float, ...]:
        """Shares of a core by rank."""
        return tuple(self.fastest_cores * speed / max(self.speeds) for speed in self.speeds)

    @property
    def memory_bytes(self) -> tuple[int | None, ...]:
        """Memory limits by rank."""
        return tuple(limit for node in self.nodes for limit in (node.memory_bytes or (None,) * len(node.speeds)))

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """Index of the node of every rank."""
        return tuple(index for index, node in enumerate(self.nodes) for _ in node.speeds)

    @property
    def has_links(self) -> bool:
        """Whether the nodes are connected by links."""
        return self.nodes[0].link_bit_per_s is not None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for result files."""
        return {
            "speeds": self.speeds,
            "cores": [round(cores, 4) for cores in self.cores],
            "nodes": [vars(node) for node in self.nodes],
        }


def pair(fraction: float) -> EmulatedCluster:
    """Return two ranks without a network; the second has ``fraction`` of the speed of the first."""
    return EmulatedCluster(nodes=(EmulatedNode(speeds=(1.0, fraction)),))


def read_cluster(source: Path | Mapping[str, Any]) -> EmulatedCluster:
    """Read a cluster from a YAML or JSON file, or from the same content inline.

        nodes:
          - {speeds: [4, 3], bandwidth_gbit_per_s: 1, latency_us: 100}
          - {speeds: [2, 1], bandwidth_gbit_per_s: 1, latency_us: 100, memory_mib: [800, 400]}
        fastest_cores: 0.6

    Raises:
        ValueError: unknown keys, or invalid values.
    """
    content = yaml.safe_load(source.read_text()) if isinstance(source, Path) else source
    if not isinstance(content, Mapping) or not content.keys() <= {"nodes", "fastest_cores"}:
        raise ValueError("an emulated cluster has the keys nodes and fastest_cores.")
    return EmulatedCluster(
        nodes=tuple(_read_node(node) for node in content["nodes"]),
        fastest_cores=content.get("fastest_cores", FASTEST_CORES),
    )


def _read_node(content: Mapping[str, Any]) -> EmulatedNode:
    if unknown := set(content) - _KEYS:
        raise ValueError(f"unknown keys {sorted(unknown)} of a node; it has {', '.join(sorted(_KEYS))}.")
    rate = content.get("bandwidth_gbit_per_s")
    memory: Sequence[float | None] = content.get("memory_mib", ())
    return EmulatedNode(
        speeds=tuple(content["speeds"]),
        memory_bytes=tuple(None if limit is None else int(limit * 2**20) for limit in memory),
        link_bit_per_s=None if rate is None else rate * 1e9,
        link_delay_s=content.get("latency_us", 0.0) * 1e-6,
    )
