"""``--what-if``: the same cluster with a card more, a card less, or another network.

add=3090      cards beside those of the last node, as in `ds_hetero.cluster.notation`
remove=1      without rank 1
network=10    10 GB/s between any two nodes, or 80Gbit/s
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
    """The cluster after a change.

    Raises:
        ClusterError: no such change, card, rank or rate.
    """
    key, equals, value = text.partition("=")
    makers = {"add": _added, "remove": _removed, "network": _networked}
    if not equals or key.strip() not in makers:
        raise ClusterError(
            f"--what-if is add=CARDS, remove=RANK or network=GB/s, got {shortened(text)}. Give one of these."
        )
    return makers[key.strip()](cluster, value.strip())


def _added(cluster: Cluster, value: str) -> Cluster:
    if "|" in value:
        raise ClusterError("--what-if add=... adds cards to the last node. Give another node in --gpus.")
    new = cluster_from_dict(read_notation(value).content).nodes[0]
    last = cluster.nodes[-1]
    slowest = min(last.link, new.link, key=lambda link: link.bytes_per_s)
    link = replace(slowest, name=last.link.name, latency_s=max(last.link.latency_s, new.link.latency_s))
    nic_bytes_per_s = last.nic_bytes_per_s
    if len(cluster.nodes) > 1 and len(last.devices) == 1 and nic_bytes_per_s is None:
        # Of one rank its port is not said; cards that are added share it.
        nic_bytes_per_s = best_rate(cluster, len(cluster.nodes) - 1)
    grown = replace(last, devices=(*last.devices, *new.devices), link=link, nic_bytes_per_s=nic_bytes_per_s)
    return replace(cluster, nodes=(*cluster.nodes[:-1], grown))


def _removed(cluster: Cluster, value: str) -> Cluster:
    if not value.isdecimal() or int(value) >= cluster.num_ranks:
        raise ClusterError(
            f"--what-if remove=RANK: got {shortened(value)}. Give a rank from 0 to {cluster.num_ranks - 1}."
        )
    if cluster.num_ranks == 1:
        raise ClusterError("--what-if remove=0 would leave no card. Give a cluster of several cards.")
    return cluster.without([int(value)])


def _networked(cluster: Cluster, value: str) -> Cluster:
    if len(cluster.nodes) == 1:
        raise ClusterError(
            "--what-if network=... changes the links between nodes, and the cluster has one node. Leave it out."
        )
    network = replace(cluster.network, bytes_per_s=network_gb_per_s("--what-if network", value) * GB)
    nodes = list(cluster.nodes)
    for i, node in enumerate(nodes):
        if node.nic_bytes_per_s is not None:  # so many ports as before, each as fast as the network
            ports = node.nic_bytes_per_s / best_rate(cluster, i)
            nodes[i] = replace(node, nic_bytes_per_s=ports * network.bytes_per_s)
    return replace(cluster, nodes=tuple(nodes), network=network, links=())
