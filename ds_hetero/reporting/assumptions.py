"""Assumptions of a plan, in a line that stands beside every answer."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.topology import Node
from ds_hetero.common.text import GB
from ds_hetero.reporting.described_plan import PlanScenario


def assumptions(scenario: PlanScenario) -> list[str]:
    """Assumptions about network, cards and training, each as a few words."""
    work = scenario.workload
    clusters = dict.fromkeys(scenario.clusters)
    ports = [words for cluster in clusters if len(cluster.nodes) > 1 for words in _ports(cluster.nodes)]
    nodes = [node for cluster in clusters for node in cluster.nodes]
    states = f"{work.optimizer_bytes:g} bytes of optimizer state a parameter"
    return [
        *dict.fromkeys(ports),
        *(["GeForce cards exchange through the host's memory"] if any(map(_through_host, nodes)) else []),
        f"ZeRO stage {work.zero_stage}, {8 * work.element_bytes}-bit parameters, {states}",
        *(work.memory_savers or ["no activation checkpointing"]),
        *([] if work.tiled_logits else ["the whole loss at once"]),
    ]


def assumed_line(scenario: PlanScenario) -> str:
    """The line of `assumptions`."""
    return f"assumed:    {'; '.join(assumptions(scenario))}"


def _ports(nodes: Sequence[Node]) -> list[str]:
    """The ports of nodes with several cards."""
    rates = dict.fromkeys(f"{node.nic_bytes_per_s / GB:.3g}" for node in nodes if node.nic_bytes_per_s is not None)
    words = [f"cards of a node share {' or '.join(rates)} GB/s of network (--nics, nics)"] if rates else []
    alone = any(node.nic_bytes_per_s is None and len(node.devices) > 1 for node in nodes)
    return [*words, *(["a network port for every card"] if alone else [])]


def _through_host(node: Node) -> bool:
    names = [device.name for device in node.devices]
    return len(names) > 1 and any(name in CATALOGUE and not CATALOGUE[name].peer_to_peer for name in names)
