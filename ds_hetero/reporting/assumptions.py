"""Assumptions of a plan in one line, printed below every result of the planner."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.topology import Node
from ds_hetero.common.units import GB
from ds_hetero.cost import Workload
from ds_hetero.cost.terms.host_memory import USABLE_HOST_FRACTION
from ds_hetero.reporting.scenario import PlanScenario


def assumptions(scenario: PlanScenario) -> list[str]:
    """Return the assumptions on network, devices and training, each in a few words."""
    work = scenario.workload
    nodes: list[Node] = []
    network: list[str] = []
    for cluster in dict.fromkeys(scenario.clusters):
        nodes += cluster.nodes
        if len(cluster.nodes) > 1:
            network += _ports(cluster.nodes)
    words = [*dict.fromkeys(network)]
    if any(map(_through_host, nodes)):
        words.append("GeForce cards exchange through the host's memory")
    states = f"{work.optimizer_bytes:g} bytes of optimizer state a parameter"
    words.append(f"ZeRO stage {work.zero_stage}, {8 * work.element_bytes}-bit parameters, {states}")
    words += work.memory_savers or ["no activation checkpointing"]
    words += _hosts(nodes, work)
    if not work.tiled_logits:
        words.append("the whole loss at once")
    return words


def assumed_line(scenario: PlanScenario) -> str:
    """Join the assumptions in one line."""
    return f"assumed:    {'; '.join(assumptions(scenario))}"


def _ports(nodes: Sequence[Node]) -> list[str]:
    """Assumptions on the NICs of the nodes."""
    words = []
    rates = [node.nic_bytes_per_s for node in nodes if node.nic_bytes_per_s is not None]
    if rates:
        rate_texts = dict.fromkeys(f"{rate / GB:.3g}" for rate in rates)
        words.append(f"cards of a node share {' or '.join(rate_texts)} GB/s of network (--nics, nics)")
    if any(node.nic_bytes_per_s is None and len(node.devices) > 1 for node in nodes):
        words.append("a network port for every card")
    return words


def _hosts(nodes: Sequence[Node], work: Workload) -> list[str]:
    """Assumptions on the hosts' memory, into which devices offload."""
    words = []
    sharing_devices: dict[str, None] = {}  # names of devices whose memory is the machine's
    offloading_nodes = []  # nodes with a device that has its own memory
    for node in nodes:
        sharing_devices.update(dict.fromkeys(device.name for device in node.devices if device.shares_host_memory))
        if not all(device.shares_host_memory for device in node.devices):
            offloading_nodes.append(node)
    if sharing_devices:
        words.append(f"offloads free nothing of {' and '.join(sharing_devices)}, whose memory is the machine's")
    if work.offloads and offloading_nodes:
        if any(node.host_memory_bytes is None for node in offloading_nodes):
            words.append("machines have the memory that offloads need (--host-memory, host_memory_gib)")
        else:
            words.append(f"offloads may take {USABLE_HOST_FRACTION:.0%} of a machine's memory")
    return words


def _through_host(node: Node) -> bool:
    """Whether devices of a node exchange data through the host's memory, as their driver has no peer-to-peer."""
    names = [device.name for device in node.devices]
    return len(names) > 1 and any(name in CATALOGUE and not CATALOGUE[name].peer_to_peer for name in names)
