"""Cluster files: YAML or JSON in people's units, one `Cluster` in SI units.

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

Bandwidths are per pair and direction; GB is 10^9 bytes, GiB 2^30. A link may also carry measured values:
``p2p_efficiency`` and ``all_to_all_efficiency``, achieved shares of its bandwidth (``efficiency`` for both; 1 where
left out, `NOMINAL_SHARE` where the link is the catalogue's), and ``all_to_all_latency_us``. A device may name the
kernel whose rates of the catalogue it has (``attention: flash_attn_2``).
All ranks of a node share its ports to the network: one, unless ``nics`` says more; ``nics: per_rank`` gives every
rank one of its own. A `Cluster` is in SI units: reading a file converts its units once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from ds_hetero.cluster.attention_rates import with_attention
from ds_hetero.cluster.catalogue import CATALOGUE, NOMINAL_SHARE, usual_reserve
from ds_hetero.cluster.file_values import (
    DEVICE_KEYS,
    DURATION_US,
    LIKENESS,
    LINK_RATIO,
    OVERHEAD_S,
    POSITIVE,
    SHARE,
    SIZE,
    Bounds,
    expect_keys,
    number,
    whole_number,
)
from ds_hetero.cluster.step_errors import PROFILED_ERROR, UNMEASURED_ERROR
from ds_hetero.cluster.topology import Cluster, DeviceSpec, Efficiency, Link, Node
from ds_hetero.common.reading import (
    MAX_RANKS,
    MAX_SEQ_LEN,
    JsonDict,
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
from ds_hetero.common.units import GB, GIB, MICRO
from ds_hetero.errors import ClusterError

MAX_NAME = 200
MAX_OVERRIDES = 1_000_000  # pairs of nodes
DEFAULT_LATENCY_S = 5e-6  # inside a node, where the link is left to the catalogue
PER_RANK = "per_rank"  # of nics: a port for every rank

_DEVICE_WORDS = ("efficiency", "source", "attention", "measured", "attention_s", "shares_host_memory")
_LINK_KEYS = {
    "bandwidth_gb_per_s",
    "latency_us",
    "efficiency",
    "p2p_efficiency",
    "all_to_all_efficiency",
    "all_to_all_latency_us",
}


def _efficiency_bounds(name: str) -> Bounds:
    if name.endswith("_s"):
        return OVERHEAD_S
    shares = ("matmul", "attention_forward", "attention_backward", "attention_narrow", "memory")
    return SHARE if name in shares else SIZE


_EFFICIENCY_KEYS = {field.name: _efficiency_bounds(field.name) for field in fields(Efficiency)}


def load_cluster(source: str | Path | JsonObject) -> Cluster:
    """A cluster from a file, from a name in ds_configs/clusters, or inline. Raises `ClusterError`."""
    if isinstance(source, Mapping):
        return cluster_from_dict(source)
    ready = next((name for name in cluster_names() if name == str(source)), None)
    path = Path(source)
    if ready is not None and not is_file(path):
        path = config_dir() / "clusters" / f"{ready}.yaml"
    try:
        content = read_file(path, "cluster", ClusterError, yaml=path.suffix != ".json")
    except ClusterError as error:
        if is_file(path) or is_pipe(path):
            raise
        raise ClusterError(
            f"cannot read cluster {shortened(str(source))}: it is neither a readable file nor a known name"
            f"{did_you_mean(str(source), cluster_names(), LIKENESS)}. Known names: {', '.join(cluster_names())}."
        ) from error
    return cluster_from_dict(content)


def cluster_names() -> tuple[str, ...]:
    """Names of the cluster files that come with the package."""
    return tuple(sorted(path.stem for path in (config_dir() / "clusters").glob("*.yaml")))


def cluster_from_dict(data: JsonObject) -> Cluster:
    """A cluster from a file's content. Raises `ClusterError`: the place of what is wrong, and what is accepted."""
    if isinstance(data, Mapping):  # of a profile only the profiler reads the timings
        check_content({key: value for key, value in data.items() if key != "profile"}, "cluster", ClusterError)
    expect_keys(
        "cluster", data, required={"nodes"}, allowed={"nodes", "network", "links", "devices", "description", "profile"}
    )
    catalogue = _devices(data.get("devices") or {})
    entries = data["nodes"]
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ClusterError(f"nodes must be a list with at least one node, got {shortened(entries)}.")
    nodes: list[Node] = []
    num_ranks = 0
    ports_of: dict[range, float | None] = {}
    for i, entry in enumerate(entries):
        copies, ports = _nodes(i, entry, catalogue, MAX_RANKS - num_ranks)
        if copies[0].nic_bytes_per_s is None:
            ports_of[range(len(nodes), len(nodes) + len(copies))] = ports
        nodes += copies
        num_ranks += sum(len(node.devices) for node in copies)
    name, times = Counter(node.name for node in nodes).most_common(1)[0]
    if times > 1:
        raise ClusterError(f"two nodes are named {shortened(name)}. Give every node a name of its own.")
    default_ports = 1.0
    if "network" in data:
        content = data["network"]
        if isinstance(content, Mapping) and "nics" in content:
            default_ports = _ports("network.nics", content["nics"])
            content = {key: value for key, value in content.items() if key != "nics"}
        network = _link("network", "network", content, _LINK_KEYS | {"nics"})
    elif len(nodes) == 1:
        network = replace(nodes[0].link, name="network")
    else:
        raise ClusterError(
            f"network is missing, but there are {len(nodes)} nodes. "
            "Add network: {bandwidth_gb_per_s: ..., latency_us: ...}, the link between two ranks of different nodes."
        )
    links = _overrides(data.get("links") or [], nodes)
    if len(nodes) > 1:
        counts = {members: default_ports if count is None else count for members, count in ports_of.items()}
        fewer = {members: n for members, n in counts.items() if n < len(nodes[members.start].devices)}
        _share_ports(nodes, fewer, network, links)
    return Cluster(nodes=tuple(nodes), network=network, links=links)


def _share_ports(
    nodes: list[Node], ports: Mapping[range, float], network: Link, links: Sequence[tuple[tuple[int, int], Link]]
) -> None:
    """Set what the ranks of a node share: the rate of its ports, each as fast as the node's best link.

    Args:
        ports: of the nodes in a range that have fewer of them than ranks.
        network: link of pairs of nodes that ``links`` does not name.
        links: overrides by pair of nodes.
    """
    cluster = Cluster(nodes=tuple(nodes), network=network, links=tuple(links))
    for members, count in ports.items():
        for i in members:
            nodes[i] = replace(nodes[i], nic_bytes_per_s=count * best_rate(cluster, i))


def best_rate(cluster: Cluster, node: int) -> float:
    """Bytes per second of a port of a node to the network: those of its fastest link to another node."""
    rates = [link.bytes_per_s for pair, link in cluster.links if node in pair]
    return max(rates if len(rates) == len(cluster.nodes) - 1 else [*rates, cluster.network.bytes_per_s])


def _ports(where: str, value: object) -> float:
    """Ports of a node to the network: a number, or infinite for ``per_rank``."""
    return inf if value == PER_RANK else whole_number(where, value, f"or {PER_RANK}")


def _devices(data: JsonObject) -> dict[str, DeviceSpec]:
    if not isinstance(data, Mapping):
        raise ClusterError(f"devices must map names to their numbers, got {shortened(data)}.")
    catalogue = {name: entry.device for name, entry in CATALOGUE.items()}
    for name, entry in data.items():
        catalogue[name] = _device(name, entry, catalogue.get(name))
    return catalogue


def _device(name: str, entry: JsonObject, known: DeviceSpec | None) -> DeviceSpec:
    """One entry of ``devices``: a new device, or other values of a known one."""
    where = f"devices.{shortened(name)[1:-1]}"
    required = set() if known else {"peak_tflops", "memory_gib", "memory_bandwidth_gb_per_s"}
    expect_keys(where, entry, required=required, allowed={*DEVICE_KEYS, *_DEVICE_WORDS})
    values: JsonDict = {
        field: number(f"{where}.{key}", entry[key], bounds) * unit
        for key, (field, unit, bounds) in DEVICE_KEYS.items()
        if key in entry
    }
    for field in ("memory_bytes", "reserved_bytes"):
        if field in values:
            values[field] = int(values[field])
    if "attention_s" in entry:
        values["attention_s"] = _attention_times(f"{where}.attention_s", entry["attention_s"])
    if "source" in entry:
        values["source"] = str(entry["source"])
    for key in ("measured", "shares_host_memory"):
        if key in entry:
            values[key] = entry[key] is True
    if "attention" in entry:
        values["attention_kernel"] = str(entry["attention"])
        if known and name in CATALOGUE and entry["attention"]:
            known = with_attention(known, str(entry["attention"]), CATALOGUE[name].attention)
    elif "attention_forward" in entry.get("efficiency", ()):
        values["attention_kernel"] = ""
    if "efficiency" in entry:
        base = known.efficiency if known else Efficiency()
        values["efficiency"] = _efficiency(f"{where}.efficiency", entry["efficiency"], base)
    device = replace(known, **values) if known else _new_device(name, values)
    if device.reserved_bytes >= device.memory_bytes:
        raise ClusterError(
            f"{where}.reserved_gib is {device.reserved_bytes / GIB:g}, but memory_gib is "
            f"{device.memory_bytes / GIB:g}; something must be left for tensors."
        )
    return device


def _new_device(name: str, values: JsonObject) -> DeviceSpec:
    """A device of which the catalogue knows nothing: what is left out is usual, and how sure it is follows from it."""
    is_measured = "efficiency" in values
    usual = {
        "reserved_bytes": usual_reserve(values["memory_bytes"]),
        "error": PROFILED_ERROR if is_measured else UNMEASURED_ERROR,
        "measured": is_measured,
    }
    return DeviceSpec(name=name, **{**usual, **values})


def _attention_times(where: str, data: object) -> tuple[tuple[int, float], ...]:
    """Measured times of attention by tokens, ``{4096: 0.01}``; tokens are texts in JSON."""
    if not isinstance(data, Mapping) or not data:
        raise ClusterError(f"{where} must map tokens to seconds, got {shortened(data)}.")
    times = []
    for tokens, seconds in data.items():
        if not str(tokens).isdecimal() or not 1 <= int(tokens) <= MAX_SEQ_LEN:
            raise ClusterError(
                f"{where}: tokens must be whole numbers from 1 to {MAX_SEQ_LEN:,}, got {shortened(tokens)}."
            )
        times.append((int(tokens), number(f"{where}.{tokens}", seconds, POSITIVE)))
    return tuple(sorted(times))


def _efficiency(where: str, data: Any, base: Efficiency) -> Efficiency:
    expect_keys(where, data, required=set(), allowed=set(_EFFICIENCY_KEYS))
    return replace(base, **{key: number(f"{where}.{key}", data[key], _EFFICIENCY_KEYS[key]) for key in data})


def _nodes(index: int, data: Any, catalogue: Mapping[str, DeviceSpec], room: int) -> tuple[list[Node], float | None]:
    """The nodes of one entry, which together may have ``room`` devices, and its number of ports, if it says one."""
    where = f"nodes[{index}]"
    expect_keys(
        where,
        data,
        required={"name"},
        allowed={"name", "device", "count", "devices", "link", "nics", "repeat", "host_memory_gib"},
    )
    name = data["name"]
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not name.isprintable():
        raise ClusterError(
            f"{where}.name must be a word of at most {MAX_NAME} printable characters, got {shortened(name)}."
        )
    where = f"{where} ({name})"
    repeat = whole_number(f"{where}.repeat", data.get("repeat", 1))
    devices = _devices_of_node(where, data, catalogue, room // repeat)
    link = data.get("link")
    switch = None
    if link is None:
        inside = _catalogue_link(where, name, devices)
    else:
        if isinstance(link, Mapping) and "total_gb_per_s" in link:
            switch = number(f"{where}.link.total_gb_per_s", link["total_gb_per_s"]) * GB
            link = {key: value for key, value in link.items() if key != "total_gb_per_s"}
        inside = _link(f"{where}.link", f"inside {name}", link)
    nic, ports = None, None
    if "nics" in data and not isinstance(data["nics"], Mapping):
        ports = _ports(f"{where}.nics", data["nics"])
    elif "nics" in data:
        expect_keys(
            f"{where}.nics", data["nics"], required={"bandwidth_gb_per_s"}, allowed={"count", "bandwidth_gb_per_s"}
        )
        one_nic = number(f"{where}.nics.bandwidth_gb_per_s", data["nics"]["bandwidth_gb_per_s"]) * GB
        nic = whole_number(f"{where}.nics.count", data["nics"].get("count", 1)) * one_nic
    host = number(f"{where}.host_memory_gib", data["host_memory_gib"]) * GIB if "host_memory_gib" in data else None
    copies = [name] if repeat == 1 else [f"{name}-{i}" for i in range(repeat)]
    shared: JsonDict = {"nic_bytes_per_s": nic, "switch_bytes_per_s": switch, "host_memory_bytes": host}
    make = partial(Node, devices=devices, link=inside, group=name, **shared)
    return [make(name=copy) for copy in copies], ports


def _devices_of_node(
    where: str, data: JsonObject, catalogue: Mapping[str, DeviceSpec], room: int
) -> tuple[DeviceSpec, ...]:
    """The devices of one node, of which there may be ``room``."""
    if ("device" in data) == ("devices" in data) or ("devices" in data and "count" in data):
        raise ClusterError(f"{where} takes either device and count, or devices with one name per rank.")
    if "device" in data:
        names: Any = [data["device"]]
        count = whole_number(f"{where}.count", data.get("count", 1))
    else:
        names, count = data["devices"], 1
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise ClusterError(f"{where}.devices must be a list of device names, one per rank, got {shortened(names)}.")
    if len(names) * count > room:
        raise ClusterError(f"{where}: count and repeat bring the cluster to more than {MAX_RANKS:,} devices.")
    for device in names:
        if not isinstance(device, str) or device not in catalogue:
            raise ClusterError(
                f"{where}: device {shortened(device)} is not known{did_you_mean(str(device), catalogue, LIKENESS)}. "
                f"Use one of {listed(catalogue)}, or describe it under devices."
            )
    return tuple(catalogue[device] for device in names) * count


def _catalogue_link(where: str, name: str, devices: Sequence[DeviceSpec]) -> Link:
    entries = [CATALOGUE[device.name] for device in devices if device.name in CATALOGUE]
    if len(entries) < len(devices):
        raise ClusterError(
            f"{where}.link is missing, and the catalogue does not know the device. "
            "Add link: {bandwidth_gb_per_s: ..., latency_us: ...}, the link between two ranks inside the node."
        )
    slowest = min(entry.link_bytes_per_s for entry in entries)
    return Link(
        name=f"inside {name}",
        latency_s=DEFAULT_LATENCY_S,
        bytes_per_s=slowest,
        p2p_efficiency=NOMINAL_SHARE,
        all_to_all_efficiency=NOMINAL_SHARE,
    )


def _link(where: str, name: str, data: Any, allowed: Set[str] = _LINK_KEYS) -> Link:
    expect_keys(where, data, required={"bandwidth_gb_per_s"}, allowed=set(allowed))
    shares = {
        key: number(f"{where}.{given}", data[given], LINK_RATIO)
        for key in ("p2p_efficiency", "all_to_all_efficiency")
        for given in ("efficiency", key)
        if given in data
    }
    latencies = {
        key: number(f"{where}.{key}", data[key], DURATION_US) * MICRO
        for key in ("latency_us", "all_to_all_latency_us")
        if key in data
    }
    return Link(
        name=name,
        latency_s=latencies.get("latency_us", DEFAULT_LATENCY_S),
        all_to_all_latency_s=latencies.get("all_to_all_latency_us"),
        bytes_per_s=number(f"{where}.bandwidth_gb_per_s", data["bandwidth_gb_per_s"]) * GB,
        **shares,
    )


def _overrides(data: Any, nodes: Sequence[Node]) -> tuple[tuple[tuple[int, int], Link], ...]:
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise ClusterError(f"links must be a list of {{between: [node, node], ...}}, got {shortened(data)}.")
    indices: dict[str, list[int]] = {}  # by the names of nodes, and of entries that stand for several
    for i, node in enumerate(nodes):
        for name in {node.group, node.name}:
            indices.setdefault(name, []).append(i)
    table: dict[tuple[int, int], Link] = {}
    entry_of: dict[tuple[int, int], int] = {}
    num_pairs = 0
    for i, entry in enumerate(data):
        where = f"links[{i}]"
        expect_keys(where, entry, required={"between", "bandwidth_gb_per_s"}, allowed={"between", *_LINK_KEYS})
        between = entry["between"]
        if not isinstance(between, Sequence) or isinstance(between, str) or len(between) != 2:
            raise ClusterError(f"{where}.between must name two nodes, got {shortened(between)}.")
        ends = [_nodes_named(f"{where}.between", name, indices) for name in between]
        num_pairs += len(ends[0]) * len(ends[1])
        if num_pairs > MAX_OVERRIDES:
            raise ClusterError(f"{where}.between: links name more than {MAX_OVERRIDES:,} pairs of nodes. Use network.")
        pairs = {(min(a, b), max(a, b)) for a in ends[0] for b in ends[1] if a != b}
        if not pairs:
            raise ClusterError(
                f"{where}.between names {between[0]!r} twice, which is one node. Its inner link is nodes[].link."
            )
        link = _link(where, f"{between[0]} - {between[1]}", {k: v for k, v in entry.items() if k != "between"})
        # Not by operators of sets: ``pairs - table.keys()`` goes over the whole table, for every one of 45,000 links.
        for pair in sorted(pair for pair in pairs if pair in table):
            if replace(link, name=table[pair].name) != table[pair]:
                _refuse_second_link(where, nodes, pair, entry_of[pair], entry, data[entry_of[pair]])
        for pair in sorted(pair for pair in pairs if pair not in table):
            table[pair], entry_of[pair] = link, i
    return tuple(sorted(table.items(), key=lambda item: item[0]))


def _refuse_second_link(
    where: str, nodes: Sequence[Node], pair: tuple[int, int], first: int, entry: Any, first_entry: Any
) -> None:
    keys = sorted(_LINK_KEYS & (entry.keys() | first_entry.keys()))
    unlike = [
        f"{key} {first_entry.get(key, 'unset')} and {entry.get(key, 'unset')}"
        for key in keys
        if entry.get(key) != first_entry.get(key)
    ]
    raise ClusterError(
        f"{where} joins {shortened(nodes[pair[0]].name)} and {shortened(nodes[pair[1]].name)}, which links[{first}] "
        f"joins already, with other values: {', '.join(unlike)}. A link has one value for both directions, and links "
        "that differ by direction cannot be said. Name two nodes once, with the rate of the slower direction."
    )


def _nodes_named(where: str, name: Any, indices: Mapping[str, list[int]]) -> list[int]:
    """Indices of the node ``name``, or of all copies of the entry ``name``."""
    if not isinstance(name, str) or name not in indices:
        raise ClusterError(
            f"{where}: there is no node {shortened(name)}{did_you_mean(str(name), indices, LIKENESS)}. "
            f"The nodes are {listed(indices)}."
        )
    return indices[name]
