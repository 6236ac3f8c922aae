"""Reader of cluster files: from YAML or JSON with units such as GB/s to a `Cluster` in SI units.

```yaml
description: anything                                   # optional
nodes:
  - name: h100
    device: H100-SXM-80GB                               # with count: n devices of one kind
    count: 8
    link: {bandwidth_gb_per_s: 450, latency_us: 5}      # inside the node; left out, the catalogue's
    nics: {count: 4, bandwidth_gb_per_s: 25}            # optional: what the node's ranks share towards other nodes;
                                                        # nics: 4 is four ports, each as fast as the network
    repeat: 2                                           # optional: number of nodes like this, h100-0, h100-1
  - name: mixed
    devices: [RTX-4090, RTX-4090, RTX-3090]             # instead of device and count
    link: {bandwidth_gb_per_s: 25, latency_us: 5, total_gb_per_s: 50}   # total: a switch that all pairs share
network: {bandwidth_gb_per_s: 25, latency_us: 10, nics: 1}   # one port, between any two nodes; needed when there are
                                                        # several. nics: ports of a node, 1 where left out, or per_rank
links:   [{between: [h100, mixed], bandwidth_gb_per_s: 1.25, latency_us: 50}]     # optional, for both directions
devices:                                                # optional: new devices, or measured values of known ones
  my-gpu: {peak_tflops: 120, memory_gib: 24, memory_bandwidth_gb_per_s: 900}
  H100-SXM-80GB: {efficiency: {matmul: 0.68}}           # the rest stays as in the catalogue
  L40S: {price_per_hour: 0.9, watts: 350, idle_watts: 35}   # for the objectives cost and energy
profile: {...}                                          # optional: raw measurements, written by ds-hetero profile
```

Bandwidths are per pair and direction; GB is 10^9 bytes, GiB 2^30. A link may also have measured values:
``p2p_efficiency`` and ``all_to_all_efficiency``, achieved shares of its bandwidth (``efficiency`` sets both; if left
out, they are 1, or `LINK_EFFICIENCY` for a link of the catalogue), and ``all_to_all_latency_us``. A device may name an
attention kernel, whose rates in the catalogue it then has (``attention: flash_attn_2``). All ranks of a node share its
NICs: one, unless ``nics`` says more; with ``nics: per_rank`` every rank has its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from ds_hetero.cluster.catalogue import CATALOGUE, LINK_EFFICIENCY
from ds_hetero.cluster.file_devices import read_devices
from ds_hetero.cluster.file_links import DEFAULT_LATENCY_S, LINK_KEYS, read_link, read_links
from ds_hetero.cluster.file_values import MIN_SIMILARITY, expect_keys, read_number, read_whole_number
from ds_hetero.cluster.topology import Cluster, DeviceSpec, Link, Node
from ds_hetero.common.reading import (
    MAX_RANKS,
    JsonObject,
    check_content,
    config_dir,
    is_file,
    is_pipe,
    read_file,
    shortened,
)
from ds_hetero.common.spelling import did_you_mean
from ds_hetero.common.text import listed
from ds_hetero.common.units import GB, GIB
from ds_hetero.errors import ClusterError

MAX_NODE_NAME = 200  # characters of a node's name
PER_RANK = "per_rank"  # value of nics that gives every rank a NIC


def load_cluster(source: str | Path | JsonObject) -> Cluster:
    """Read a cluster from a file, by a name in ds_configs/clusters, or from inline content.

    A user's file is preferred to a file of the package with the same name.

    Raises:
        ClusterError: there is no such file or name, or the content is wrong.
    """
    if isinstance(source, Mapping):
        return cluster_from_dict(source)
    path = Path(source)
    if str(source) in cluster_names() and not is_file(path):
        path = config_dir() / "clusters" / f"{source}.yaml"
    try:
        content = read_file(path, "cluster", ClusterError, yaml=path.suffix != ".json")
    except ClusterError as error:
        if is_file(path) or is_pipe(path):
            raise
        raise ClusterError(
            f"cannot read cluster {shortened(str(source))}: it is neither a readable file nor a known name"
            f"{did_you_mean(str(source), cluster_names(), MIN_SIMILARITY)}. Known names: {', '.join(cluster_names())}."
        ) from error
    return cluster_from_dict(content)


def cluster_names() -> tuple[str, ...]:
    """Return the names of the cluster files that come with the package, in alphabetical order."""
    return tuple(sorted(path.stem for path in (config_dir() / "clusters").glob("*.yaml")))


def cluster_from_dict(data: JsonObject) -> Cluster:
    """Return the cluster that the content of a cluster file describes.

    Raises:
        ClusterError: the content is wrong; the message names the place in the file and the accepted values.
    """
    if isinstance(data, Mapping):  # only the profiler reads the raw timings of a profile, and checks them
        check_content({key: value for key, value in data.items() if key != "profile"}, "cluster", ClusterError)
    expect_keys(
        "cluster", data, required={"nodes"}, allowed={"nodes", "network", "links", "devices", "description", "profile"}
    )
    catalogue = read_devices(data.get("devices") or {})
    nodes, nics_by_node = _read_nodes(data["nodes"], catalogue)
    name, times = Counter(node.name for node in nodes).most_common(1)[0]
    if times > 1:
        raise ClusterError(f"{times} nodes are named {shortened(name)}. Give every node a different name.")
    network, default_nics = _read_network(data, nodes)
    links = read_links(data.get("links") or [], nodes)
    if len(nodes) > 1:
        shared_nics = {}
        for index, nics in nics_by_node.items():
            count = default_nics if nics is None else nics
            if count < len(nodes[index].devices):  # with a NIC for every rank nothing is shared
                shared_nics[index] = count
        _share_nics(nodes, shared_nics, network, links)
    return Cluster(nodes=tuple(nodes), network=network, links=links)


def _read_nodes(entries: Any, catalogue: Mapping[str, DeviceSpec]) -> tuple[list[Node], dict[int, float | None]]:
    """Return the nodes of all entries, and by index of a node the number of NICs that its entry gives.

    The number is None if the entry gives none. Nodes whose entry gives the bandwidth of their NICs are left out, since
    that bandwidth is already in their `Node.nic_bytes_per_s`.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ClusterError(f"nodes must be a list with at least one node, got {shortened(entries)}.")
    nodes: list[Node] = []
    num_ranks = 0
    nics_by_node: dict[int, float | None] = {}
    for i, entry in enumerate(entries):
        copies, nics = _read_node_entry(i, entry, catalogue, MAX_RANKS - num_ranks)
        if copies[0].nic_bytes_per_s is None:
            nics_by_node.update(dict.fromkeys(range(len(nodes), len(nodes) + len(copies)), nics))
        nodes += copies
        num_ranks += sum(len(node.devices) for node in copies)
    return nodes, nics_by_node


def _read_network(data: JsonObject, nodes: Sequence[Node]) -> tuple[Link, float]:
    """Return the link between nodes, and the number of NICs of nodes whose entry does not give it.

    Raises:
        ClusterError: there are several nodes, and no network.
    """
    if "network" in data:
        default_nics = 1.0
        content = data["network"]
        if isinstance(content, Mapping) and "nics" in content:
            default_nics = _read_num_nics("network.nics", content["nics"])
            content = {key: value for key, value in content.items() if key != "nics"}
        return read_link("network", "network", content, LINK_KEYS | {"nics"}), default_nics
    if len(nodes) == 1:  # nothing uses the network, but a `Cluster` has one
        return replace(nodes[0].link, name="network"), 1.0
    raise ClusterError(
        f"network is missing, but there are {len(nodes)} nodes. "
        "Add network: {bandwidth_gb_per_s: ..., latency_us: ...}, the link between two ranks of different nodes."
    )


def _share_nics(
    nodes: list[Node], nics: Mapping[int, float], network: Link, links: Sequence[tuple[tuple[int, int], Link]]
) -> None:
    """Set the rate that the ranks of a node share: the sum over its NICs, each as fast as the node's fastest link.

    Args:
        nodes: nodes of the cluster, which are replaced in place.
        nics: number of NICs, by index of the nodes that have fewer NICs than ranks.
        network: link between nodes for which ``links`` has no entry.
        links: links by pair of node indices.
    """
    cluster = Cluster(nodes=tuple(nodes), network=network, links=tuple(links))
    for i, count in nics.items():
        nodes[i] = replace(nodes[i], nic_bytes_per_s=count * best_rate(cluster, i))


def best_rate(cluster: Cluster, node: int) -> float:
    """Return the bytes per second of a node's NIC: the rate of its fastest link to another node."""
    rates = [link.bytes_per_s for pair, link in cluster.links if node in pair]
    has_links_to_all = len(rates) == len(cluster.nodes) - 1
    return max(rates if has_links_to_all else [*rates, cluster.network.bytes_per_s])


def _read_num_nics(where: str, value: object) -> float:
    """Read the number of NICs of a node; ``per_rank`` is infinitely many."""
    return inf if value == PER_RANK else read_whole_number(where, value, f"or {PER_RANK}")


def _read_node_entry(
    index: int, data: Any, catalogue: Mapping[str, DeviceSpec], max_devices: int
) -> tuple[list[Node], float | None]:
    """Return the nodes of one entry (``repeat`` of them), and their number of NICs; None if the entry gives none.

    Args:
        index: place of the entry in ``nodes``.
        catalogue: devices by name.
        max_devices: largest number of devices of all these nodes together.
    """
    where = f"nodes[{index}]"
    expect_keys(
        where,
        data,
        required={"name"},
        allowed={"name", "device", "count", "devices", "link", "nics", "repeat", "host_memory_gib"},
    )
    name = data["name"]
    if not isinstance(name, str) or not name or len(name) > MAX_NODE_NAME or not name.isprintable():
        raise ClusterError(
            f"{where}.name must be a word of at most {MAX_NODE_NAME} printable characters, got {shortened(name)}."
        )
    where = f"{where} ({name})"
    repeat = read_whole_number(f"{where}.repeat", data.get("repeat", 1))
    devices = _read_devices_of_node(where, data, catalogue, max_devices // repeat)
    link, switch_bytes_per_s = _read_link_inside(where, name, data.get("link"), devices)
    nic_bytes_per_s, num_nics = None, None
    if isinstance(data.get("nics"), Mapping):
        nic_bytes_per_s = _read_nics_bytes_per_s(f"{where}.nics", data["nics"])
    elif "nics" in data:
        num_nics = _read_num_nics(f"{where}.nics", data["nics"])
    host_memory_bytes = None
    if "host_memory_gib" in data:
        host_memory_bytes = read_number(f"{where}.host_memory_gib", data["host_memory_gib"]) * GIB
    make_node = partial(
        Node,
        devices=devices,
        link=link,
        group=name,
        nic_bytes_per_s=nic_bytes_per_s,
        switch_bytes_per_s=switch_bytes_per_s,
        host_memory_bytes=host_memory_bytes,
    )
    names = [name] if repeat == 1 else [f"{name}-{i}" for i in range(repeat)]
    return [make_node(name=node_name) for node_name in names], num_nics


def _read_link_inside(where: str, name: str, link: Any, devices: Sequence[DeviceSpec]) -> tuple[Link, float | None]:
    """Return the link inside a node, and the bytes per second of the switch that all pairs share; None without one."""
    if link is None:
        return _catalogue_link(where, name, devices), None
    switch_bytes_per_s = None
    if isinstance(link, Mapping) and "total_gb_per_s" in link:
        switch_bytes_per_s = read_number(f"{where}.link.total_gb_per_s", link["total_gb_per_s"]) * GB
        link = {key: value for key, value in link.items() if key != "total_gb_per_s"}
    return read_link(f"{where}.link", f"inside {name}", link), switch_bytes_per_s


def _read_nics_bytes_per_s(where: str, nics: JsonObject) -> float:
    """Return the bytes per second of all NICs of a node together."""
    expect_keys(where, nics, required={"bandwidth_gb_per_s"}, allowed={"count", "bandwidth_gb_per_s"})
    one_nic = read_number(f"{where}.bandwidth_gb_per_s", nics["bandwidth_gb_per_s"]) * GB
    return read_whole_number(f"{where}.count", nics.get("count", 1)) * one_nic


def _read_devices_of_node(
    where: str, data: JsonObject, catalogue: Mapping[str, DeviceSpec], max_devices: int
) -> tuple[DeviceSpec, ...]:
    """Return the devices of one node in rank order.

    Raises:
        ClusterError: a device is unknown, there are more than ``max_devices``, or the keys contradict each other.
    """
    if ("device" in data) == ("devices" in data) or ("devices" in data and "count" in data):
        raise ClusterError(
            f"{where} takes either device and count, or devices with one name per rank. Give one of the two."
        )
    if "device" in data:
        names: Any = [data["device"]]
        count = read_whole_number(f"{where}.count", data.get("count", 1))
    else:
        names, count = data["devices"], 1
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise ClusterError(f"{where}.devices must be a list of device names, one per rank, got {shortened(names)}.")
    if len(names) * count > max_devices:
        raise ClusterError(
            f"{where}: with this count and repeat the cluster has more than {MAX_RANKS:,} devices. Lower one of them."
        )
    for device in names:
        if not isinstance(device, str) or device not in catalogue:
            hint = did_you_mean(str(device), catalogue, MIN_SIMILARITY)
            raise ClusterError(
                f"{where}: device {shortened(device)} is not known{hint}. "
                f"Use one of {listed(catalogue)}, or describe it under devices."
            )
    return tuple(catalogue[device] for device in names) * count


def _catalogue_link(where: str, name: str, devices: Sequence[DeviceSpec]) -> Link:
    """Return the catalogue's link between these devices, at the rate of the slowest device's link.

    Raises:
        ClusterError: the catalogue lacks one of the devices.
    """
    entries = [CATALOGUE[device.name] for device in devices if device.name in CATALOGUE]
    if len(entries) < len(devices):
        raise ClusterError(
            f"{where}.link is missing, and the catalogue lacks one of the node's devices. "
            "Add link: {bandwidth_gb_per_s: ..., latency_us: ...}, the link between two ranks inside the node."
        )
    slowest_bytes_per_s = min(entry.link_bytes_per_s for entry in entries)
    return Link(
        name=f"inside {name}",
        latency_s=DEFAULT_LATENCY_S,
        bytes_per_s=slowest_bytes_per_s,
        p2p_efficiency=LINK_EFFICIENCY,
        all_to_all_efficiency=LINK_EFFICIENCY,
    )
