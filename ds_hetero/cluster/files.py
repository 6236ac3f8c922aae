"""Reader of cluster files: YAML or JSON in people's units, one `Cluster` in SI units.

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
``p2p_efficiency`` and ``all_to_all_efficiency``, achieved shares of its bandwidth (``efficiency`` sets both; left out,
they are 1, or `NOMINAL_SHARE` if the link is the catalogue's), and ``all_to_all_latency_us``. A device may name the
kernel whose rates of the catalogue are used for it (``attention: flash_attn_2``).
All ranks of a node share its NICs: one, unless ``nics`` says more; with ``nics: per_rank`` every rank has one to
itself. Reading a file converts its units once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import partial
from itertools import product
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

MAX_NAME = 200  # characters
MAX_OVERRIDES = 1_000_000  # pairs of nodes that links may name; chosen, never measured
DEFAULT_LATENCY_S = 5e-6  # of a link without latency_us; chosen, never measured: `ds-hetero profile` measures it
PER_RANK = "per_rank"  # value of nics: one for every rank

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
    """Bounds of a field of `Efficiency`: a time, a share of the peak, or a number of tokens, rows or keys."""
    if name.endswith("_s"):
        return OVERHEAD_S
    shares = ("matmul", "attention_forward", "attention_backward", "attention_narrow", "memory")
    return SHARE if name in shares else SIZE


_EFFICIENCY_KEYS = {field.name: _efficiency_bounds(field.name) for field in fields(Efficiency)}


def load_cluster(source: str | Path | JsonObject) -> Cluster:
    """Read a cluster from a file, by a name in ds_configs/clusters, or from inline content. Raises `ClusterError`.

    A file of the user comes before a name of the package.
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
            f"{did_you_mean(str(source), cluster_names(), LIKENESS)}. Known names: {', '.join(cluster_names())}."
        ) from error
    return cluster_from_dict(content)


def cluster_names() -> tuple[str, ...]:
    """Names of the cluster files that come with the package."""
    return tuple(sorted(path.stem for path in (config_dir() / "clusters").glob("*.yaml")))


def cluster_from_dict(data: JsonObject) -> Cluster:
    """Read a cluster from a file's content. Raises `ClusterError`: the place of the fault, and what is accepted."""
    if isinstance(data, Mapping):  # raw timings of a profile are checked by the profiler, which alone reads them
        check_content({key: value for key, value in data.items() if key != "profile"}, "cluster", ClusterError)
    expect_keys(
        "cluster", data, required={"nodes"}, allowed={"nodes", "network", "links", "devices", "description", "profile"}
    )
    catalogue = _devices(data.get("devices") or {})
    nodes, nics_by_node = _all_nodes(data["nodes"], catalogue)
    name, times = Counter(node.name for node in nodes).most_common(1)[0]
    if times > 1:
        raise ClusterError(f"two nodes are named {shortened(name)}. Give every node a name of its own.")
    network, default_nics = _network(data, nodes)
    links = _overrides(data.get("links") or [], nodes)
    if len(nodes) > 1:
        shared_nics = {}
        for index, nics in nics_by_node.items():
            count = default_nics if nics is None else nics
            if count < len(nodes[index].devices):  # with one for every rank, ranks do not share any
                shared_nics[index] = count
        _share_nics(nodes, shared_nics, network, links)
    return Cluster(nodes=tuple(nodes), network=network, links=links)


def _all_nodes(entries: Any, catalogue: Mapping[str, DeviceSpec]) -> tuple[list[Node], dict[int, float | None]]:
    """Return the nodes of all entries, and the number of NICs by node whose entry does not set their bandwidth.

    The number is None if the entry does not set it either.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ClusterError(f"nodes must be a list with at least one node, got {shortened(entries)}.")
    nodes: list[Node] = []
    num_ranks = 0
    nics_by_node: dict[int, float | None] = {}
    for i, entry in enumerate(entries):
        copies, nics = _nodes(i, entry, catalogue, MAX_RANKS - num_ranks)
        if copies[0].nic_bytes_per_s is None:
            nics_by_node.update(dict.fromkeys(range(len(nodes), len(nodes) + len(copies)), nics))
        nodes += copies
        num_ranks += sum(len(node.devices) for node in copies)
    return nodes, nics_by_node


def _network(data: JsonObject, nodes: Sequence[Node]) -> tuple[Link, float]:
    """Return the link between nodes, and the NICs of a node that sets none. Raises `ClusterError`: it is missing."""
    if "network" in data:
        default_nics = 1.0
        content = data["network"]
        if isinstance(content, Mapping) and "nics" in content:
            default_nics = _num_nics("network.nics", content["nics"])
            content = {key: value for key, value in content.items() if key != "nics"}
        return _link("network", "network", content, _LINK_KEYS | {"nics"}), default_nics
    if len(nodes) == 1:  # nothing uses the network, but a `Cluster` has one
        return replace(nodes[0].link, name="network"), 1.0
    raise ClusterError(
        f"network is missing, but there are {len(nodes)} nodes. "
        "Add network: {bandwidth_gb_per_s: ..., latency_us: ...}, the link between two ranks of different nodes."
    )


def _share_nics(
    nodes: list[Node], nics: Mapping[int, float], network: Link, links: Sequence[tuple[tuple[int, int], Link]]
) -> None:
    """Set the rate that the ranks of a node share: that of its NICs, each as fast as the node's fastest link.

    Args:
        nics: number by node, of nodes that have fewer NICs than ranks.
        network: link of pairs of nodes that ``links`` does not name.
        links: overrides by pair of nodes.
    """
    cluster = Cluster(nodes=tuple(nodes), network=network, links=tuple(links))
    for i, count in nics.items():
        nodes[i] = replace(nodes[i], nic_bytes_per_s=count * best_rate(cluster, i))


def best_rate(cluster: Cluster, node: int) -> float:
    """Return the bytes per second of a node's NIC: the rate of its fastest link to another node."""
    rates = [link.bytes_per_s for pair, link in cluster.links if node in pair]
    has_links_to_all = len(rates) == len(cluster.nodes) - 1
    return max(rates if has_links_to_all else [*rates, cluster.network.bytes_per_s])


def _num_nics(where: str, value: object) -> float:
    """NICs of a node: a number, or infinite for ``per_rank``."""
    return inf if value == PER_RANK else whole_number(where, value, f"or {PER_RANK}")


def _devices(data: JsonObject) -> dict[str, DeviceSpec]:
    if not isinstance(data, Mapping):
        raise ClusterError(f"devices must map names to their numbers, got {shortened(data)}.")
    catalogue = {name: entry.device for name, entry in CATALOGUE.items()}
    for name, entry in data.items():
        catalogue[name] = _device(name, entry, catalogue.get(name))
    return catalogue


def _device(name: str, entry: JsonObject, known: DeviceSpec | None) -> DeviceSpec:
    """Read one entry of ``devices``.

    Args:
        known: the catalogue's device of this name, whose other values stay; None for a new device.
    """
    where = f"devices.{shortened(name)[1:-1]}"
    required = set() if known else {"peak_tflops", "memory_gib", "memory_bandwidth_gb_per_s"}
    expect_keys(where, entry, required=required, allowed={*DEVICE_KEYS, *_DEVICE_WORDS})
    base = known
    values = _device_numbers(where, entry)
    if "attention_s" in entry:
        values["attention_s"] = _attention_times(f"{where}.attention_s", entry["attention_s"])
    if "source" in entry:
        values["source"] = str(entry["source"])
    for key in ("measured", "shares_host_memory"):
        if key in entry:
            values[key] = entry[key] is True
    # The kernel first: an efficiency that the entry writes out comes on top of the kernel's rates.
    if "attention" in entry:
        values["attention_kernel"] = str(entry["attention"])
        if base and name in CATALOGUE and entry["attention"]:
            base = with_attention(base, str(entry["attention"]), CATALOGUE[name].attention)
    elif "attention_forward" in entry.get("efficiency", ()):
        values["attention_kernel"] = ""  # measured rates are of no kernel of the catalogue
    if "efficiency" in entry:
        base_efficiency = base.efficiency if base else Efficiency()
        values["efficiency"] = _efficiency(f"{where}.efficiency", entry["efficiency"], base_efficiency)
    device = replace(base, **values) if base else _new_device(name, values)
    if device.reserved_bytes >= device.memory_bytes:
        raise ClusterError(
            f"{where}.reserved_gib is {device.reserved_bytes / GIB:g}, but memory_gib is "
            f"{device.memory_bytes / GIB:g}; something must be left for tensors."
        )
    return device


def _device_numbers(where: str, entry: JsonObject) -> JsonDict:
    """Numbers of an entry of ``devices`` in SI units, by field of `DeviceSpec`."""
    values: JsonDict = {}
    for key, (field, unit, bounds) in DEVICE_KEYS.items():
        if key in entry:
            values[field] = number(f"{where}.{key}", entry[key], bounds) * unit
    for field in ("memory_bytes", "reserved_bytes"):
        if field in values:
            values[field] = int(values[field])
    return values


def _new_device(name: str, values: JsonObject) -> DeviceSpec:
    """Make a device that the catalogue lacks; values left out are the usual ones.

    A device with an efficiency was profiled: its predictions err less than those of one with peaks alone.
    """
    is_measured = "efficiency" in values
    usual = {
        "reserved_bytes": usual_reserve(values["memory_bytes"]),
        "error": PROFILED_ERROR if is_measured else UNMEASURED_ERROR,
        "measured": is_measured,
    }
    return DeviceSpec(name=name, **{**usual, **values})


def _attention_times(where: str, data: object) -> tuple[tuple[int, float], ...]:
    """Read measured times of attention by tokens, ``{4096: 0.01}``; the tokens are text in JSON."""
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


def _nodes(
    index: int, data: Any, catalogue: Mapping[str, DeviceSpec], most_devices: int
) -> tuple[list[Node], float | None]:
    """Return the nodes of one entry, ``repeat`` of them, and their number of NICs; None if the entry sets none.

    Args:
        most_devices: of all of these nodes together.
    """
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
    devices = _devices_of_node(where, data, catalogue, most_devices // repeat)
    link, switch_bytes_per_s = _link_inside(where, name, data.get("link"), devices)
    nic_bytes_per_s, num_nics = None, None
    if isinstance(data.get("nics"), Mapping):
        nic_bytes_per_s = _nics_bytes_per_s(f"{where}.nics", data["nics"])
    elif "nics" in data:
        num_nics = _num_nics(f"{where}.nics", data["nics"])
    host_memory_bytes = None
    if "host_memory_gib" in data:
        host_memory_bytes = number(f"{where}.host_memory_gib", data["host_memory_gib"]) * GIB
    make = partial(
        Node,
        devices=devices,
        link=link,
        group=name,
        nic_bytes_per_s=nic_bytes_per_s,
        switch_bytes_per_s=switch_bytes_per_s,
        host_memory_bytes=host_memory_bytes,
    )
    names = [name] if repeat == 1 else [f"{name}-{i}" for i in range(repeat)]
    return [make(name=node_name) for node_name in names], num_nics


def _link_inside(where: str, name: str, link: Any, devices: Sequence[DeviceSpec]) -> tuple[Link, float | None]:
    """Return the link inside a node, and the bytes per second of its switch; None if pairs share none."""
    if link is None:
        return _catalogue_link(where, name, devices), None
    switch_bytes_per_s = None
    if isinstance(link, Mapping) and "total_gb_per_s" in link:
        switch_bytes_per_s = number(f"{where}.link.total_gb_per_s", link["total_gb_per_s"]) * GB
        link = {key: value for key, value in link.items() if key != "total_gb_per_s"}
    return _link(f"{where}.link", f"inside {name}", link), switch_bytes_per_s


def _nics_bytes_per_s(where: str, nics: JsonObject) -> float:
    """Bytes per second of all NICs of a node together, from their bandwidth and count."""
    expect_keys(where, nics, required={"bandwidth_gb_per_s"}, allowed={"count", "bandwidth_gb_per_s"})
    one_nic = number(f"{where}.bandwidth_gb_per_s", nics["bandwidth_gb_per_s"]) * GB
    return whole_number(f"{where}.count", nics.get("count", 1)) * one_nic


def _devices_of_node(
    where: str, data: JsonObject, catalogue: Mapping[str, DeviceSpec], most_devices: int
) -> tuple[DeviceSpec, ...]:
    """Return the devices of one node in rank order. Raises `ClusterError`: unknown, or more than ``most_devices``."""
    if ("device" in data) == ("devices" in data) or ("devices" in data and "count" in data):
        raise ClusterError(f"{where} takes either device and count, or devices with one name per rank.")
    if "device" in data:
        names: Any = [data["device"]]
        count = whole_number(f"{where}.count", data.get("count", 1))
    else:
        names, count = data["devices"], 1
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise ClusterError(f"{where}.devices must be a list of device names, one per rank, got {shortened(names)}.")
    if len(names) * count > most_devices:
        raise ClusterError(f"{where}: count and repeat bring the cluster to more than {MAX_RANKS:,} devices.")
    for device in names:
        if not isinstance(device, str) or device not in catalogue:
            raise ClusterError(
                f"{where}: device {shortened(device)} is not known{did_you_mean(str(device), catalogue, LIKENESS)}. "
                f"Use one of {listed(catalogue)}, or describe it under devices."
            )
    return tuple(catalogue[device] for device in names) * count


def _catalogue_link(where: str, name: str, devices: Sequence[DeviceSpec]) -> Link:
    """The catalogue's link between such devices, as fast as the slowest one's. Raises `ClusterError`: not listed."""
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
    """Read a link; ``where`` is its place in the file, ``name`` its name in messages."""
    expect_keys(where, data, required={"bandwidth_gb_per_s"}, allowed=set(allowed))
    efficiencies = {}
    for key in ("p2p_efficiency", "all_to_all_efficiency"):
        for file_key in ("efficiency", key):  # the specific key comes last and wins
            if file_key in data:
                efficiencies[key] = number(f"{where}.{file_key}", data[file_key], LINK_RATIO)
    latencies_s = {}
    for key in ("latency_us", "all_to_all_latency_us"):
        if key in data:
            latencies_s[key] = number(f"{where}.{key}", data[key], DURATION_US) * MICRO
    return Link(
        name=name,
        latency_s=latencies_s.get("latency_us", DEFAULT_LATENCY_S),
        all_to_all_latency_s=latencies_s.get("all_to_all_latency_us"),
        bytes_per_s=number(f"{where}.bandwidth_gb_per_s", data["bandwidth_gb_per_s"]) * GB,
        **efficiencies,
    )


def _overrides(data: Any, nodes: Sequence[Node]) -> tuple[tuple[tuple[int, int], Link], ...]:
    """Read ``links``: a link by pair of node indices, sorted."""
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise ClusterError(f"links must be a list of {{between: [node, node], ...}}, got {shortened(data)}.")
    indices: dict[str, list[int]] = {}  # by the name of a node, and by that of an entry with ``repeat``
    for i, node in enumerate(nodes):
        for name in dict.fromkeys((node.group, node.name)):  # not a set: messages list them, alike on every rank
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
        pairs = {(min(a, b), max(a, b)) for a, b in product(*ends) if a != b}
        if not pairs:
            raise ClusterError(
                f"{where}.between names {between[0]!r} twice, which is one node. Its inner link is nodes[].link."
            )
        link_content = {key: value for key, value in entry.items() if key != "between"}
        link = _link(where, f"{between[0]} - {between[1]}", link_content)
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
    """Return the index of the node ``name``, or those of all copies of the entry ``name``."""
    if not isinstance(name, str) or name not in indices:
        raise ClusterError(
            f"{where}: there is no node {shortened(name)}{did_you_mean(str(name), indices, LIKENESS)}. "
            f"The nodes are {listed(indices)}."
        )
    return indices[name]
