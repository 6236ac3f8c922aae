"""Assumptions behind a plan, in one line that is printed below every result of the planner."""

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
    nodes = _nodes(scenario)
    texts = network_assumptions(scenario)
    states = f"{work.optimizer_bytes:g} bytes of optimizer state a parameter"
    texts.append(f"ZeRO stage {work.zero_stage}, {8 * work.element_bytes}-bit parameters, {states}")
    texts += work.memory_savers or ["no activation checkpointing"]
    texts += _offload_assumptions(nodes, work)
    if not work.tiled_logits:
        texts.append("the whole loss at once")
    return texts


def network_assumptions(scenario: PlanScenario) -> list[str]:
    """Return the assumptions on links inside and between machines, each in a few words."""
    network: list[str] = []
    for cluster in dict.fromkeys(scenario.clusters):
        if len(cluster.nodes) > 1:
            network += _network_assumptions(cluster.nodes)
    words = [*dict.fromkeys(network)]
    if any(map(_exchanges_through_host, _nodes(scenario))):
        words.append("GeForce cards exchange through the host's memory")
    return words


def _nodes(scenario: PlanScenario) -> list[Node]:
    """Return the nodes of all clusters of a plan; equal clusters count once."""
    return [node for cluster in dict.fromkeys(scenario.clusters) for node in cluster.nodes]


def assumed_line(scenario: PlanScenario) -> str:
    """Return the line ``assumed:    ...`` with all assumptions, separated by semicolons."""
    return f"assumed:    {'; '.join(assumptions(scenario))}"


def _network_assumptions(nodes: Sequence[Node]) -> list[str]:
    """Return the assumptions on the NICs of the nodes, for a cluster of several nodes."""
    texts = []
    rates = [node.nic_bytes_per_s for node in nodes if node.nic_bytes_per_s is not None]
    if rates:
        rate_texts = dict.fromkeys(f"{rate / GB:.3g}" for rate in rates)
        texts.append(f"cards of a node share {' or '.join(rate_texts)} GB/s of network (--nics, nics)")
    if any(node.nic_bytes_per_s is None and len(node.devices) > 1 for node in nodes):
        texts.append("a network port for every card")
    return texts


def _offload_assumptions(nodes: Sequence[Node], work: Workload) -> list[str]:
    """Return the assumptions on the hosts' memory, to which devices offload."""
    texts = []
    sharing_devices: dict[str, None] = {}  # names of devices that use the host's memory
    offloading_nodes = []  # nodes with a device that has its own memory
    for node in nodes:
        sharing_devices.update(dict.fromkeys(device.name for device in node.devices if device.shares_host_memory))
        if not all(device.shares_host_memory for device in node.devices):
            offloading_nodes.append(node)
    if sharing_devices:
        texts.append(f"offloads free nothing of {' and '.join(sharing_devices)}, whose memory is the machine's")
    if work.offloads and offloading_nodes:
        if any(node.host_memory_bytes is None for node in offloading_nodes):
            texts.append("machines have the memory that offloads need (--host-memory, host_memory_gib)")
        else:
            texts.append(f"offloads may take {100 * USABLE_HOST_FRACTION:.0f} % of a machine's memory")
    return texts


def _exchanges_through_host(node: Node) -> bool:
    """Return True if devices of a node exchange data through the host's memory: their driver lacks peer-to-peer."""
    names = [device.name for device in node.devices]
    return len(names) > 1 and any(name in CATALOGUE and not CATALOGUE[name].peer_to_peer for name in names)
