"""``--what-if``: change a cluster by one more card, one card less, or another network.

add=3090      add cards to the last node, as in `ds_hetero.cluster.notation`
remove=1      remove rank 1
network=10    10 GB/s between any two nodes, also written 80Gbit/s
"""

from __future__ import annotations

from dataclasses import replace

from ds_hetero.cluster.files import best_rate, cluster_from_dict
from ds_hetero.cluster.notation import network_gb_per_s, read_notation
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import shortened
from ds_hetero.common.units import GB
from ds_hetero.errors import ClusterError


def read_what_if(text: str, cluster: Cluster) -> Cluster:
    """Return the cluster after the change that ``text`` describes.

    Raises:
        ClusterError: the change, the card, the rank or the rate does not exist.
    """
    key, equals, value = text.partition("=")
    makers = {"add": _with_cards, "remove": _without_rank, "network": _with_network}
    if not equals or key.strip() not in makers:
        raise ClusterError(
            f"--what-if is add=CARDS, remove=RANK or network=GB/s, got {shortened(text)}. Give one of these."
        )
    return makers[key.strip()](cluster, value.strip())


def _with_cards(cluster: Cluster, value: str) -> Cluster:
    """Return the cluster with more cards on its last node, joined by the slower one of the old and the new link.

    Args:
        value: cards in the notation of ``--gpus``.
    """
    if "|" in value:
        raise ClusterError("--what-if add=... adds cards to the last node. Give another node in --gpus.")
    added = cluster_from_dict(read_notation(value, is_one_machine=True).content).nodes[0]
    last = cluster.nodes[-1]
    slower_link = min(last.link, added.link, key=lambda link: link.bytes_per_s)
    link = replace(slower_link, name=last.link.name, latency_s=max(last.link.latency_s, added.link.latency_s))
    nic_bytes_per_s = last.nic_bytes_per_s
    if len(cluster.nodes) > 1 and len(last.devices) == 1 and nic_bytes_per_s is None:
        # A cluster with one rank on a node does not describe the NIC; added cards share it.
        nic_bytes_per_s = best_rate(cluster, len(cluster.nodes) - 1)
    enlarged = replace(last, devices=(*last.devices, *added.devices), link=link, nic_bytes_per_s=nic_bytes_per_s)
    return replace(cluster, nodes=(*cluster.nodes[:-1], enlarged))


def _without_rank(cluster: Cluster, value: str) -> Cluster:
    """Return the cluster without one rank."""
    if not value.isdecimal() or int(value) >= cluster.num_ranks:
        raise ClusterError(
            f"--what-if remove=RANK: got {shortened(value)}. Give a rank from 0 to {cluster.num_ranks - 1}."
        )
    if cluster.num_ranks == 1:
        raise ClusterError("--what-if remove=0 would leave no card. Give a cluster of several cards.")
    return cluster.without([int(value)])


def _with_network(cluster: Cluster, value: str) -> Cluster:
    """Return the cluster with another rate between any two nodes; nodes keep their numbers of NIC ports."""
    if len(cluster.nodes) == 1:
        raise ClusterError(
            "--what-if network=... changes the links between nodes, and the cluster has one node. Leave it out."
        )
    network = replace(cluster.network, bytes_per_s=network_gb_per_s("--what-if network", value) * GB)
    nodes = list(cluster.nodes)
    for i, node in enumerate(nodes):
        if node.nic_bytes_per_s is not None:  # as many ports as before, each as fast as the new network
            ports = node.nic_bytes_per_s / best_rate(cluster, i)
            nodes[i] = replace(node, nic_bytes_per_s=ports * network.bytes_per_s)
    return replace(cluster, nodes=tuple(nodes), network=network, links=())
