"""Read links of a cluster file: one link, and the section ``links`` on pairs of nodes.

    links: [{between: [h100, mixed], bandwidth_gb_per_s: 1.25, latency_us: 50}]

A name in ``between`` is that of a node, or that of an entry with ``repeat``, which stands for all its copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import product
from typing import Any

from ds_hetero.cluster.file_values import DURATION_US, LINK_RATIO, MIN_SIMILARITY, expect_keys, read_number
from ds_hetero.cluster.topology import Link, Node
from ds_hetero.common.reading import shortened
from ds_hetero.common.spelling import did_you_mean
from ds_hetero.common.text import listed
from ds_hetero.common.units import GB, MICRO
from ds_hetero.errors import ClusterError

MAX_LINK_PAIRS = 1_000_000  # pairs of nodes that links may name; chosen, never measured
DEFAULT_LATENCY_S = 5e-6  # latency of a link without latency_us; chosen, never measured: `ds-hetero profile` does

LINK_KEYS = {
    "bandwidth_gb_per_s",
    "latency_us",
    "efficiency",
    "p2p_efficiency",
    "all_to_all_efficiency",
    "all_to_all_latency_us",
}


def read_link(where: str, name: str, data: Any, allowed: Set[str] = LINK_KEYS) -> Link:
    """Read one link.

    Args:
        where: place of the link in the file, for messages.
        name: name of the link, as `Link.name`.
        data: value at this place.
        allowed: keys that the link may have.

    Raises:
        ClusterError: a key is unknown, missing or has a wrong value.
    """
    expect_keys(where, data, required={"bandwidth_gb_per_s"}, allowed=set(allowed))
    efficiencies = {}
    for key in ("p2p_efficiency", "all_to_all_efficiency"):
        for file_key in ("efficiency", key):  # the specific key comes last and wins
            if file_key in data:
                efficiencies[key] = read_number(f"{where}.{file_key}", data[file_key], LINK_RATIO)
    latencies_s = {}
    for key in ("latency_us", "all_to_all_latency_us"):
        if key in data:
            latencies_s[key] = read_number(f"{where}.{key}", data[key], DURATION_US) * MICRO
    return Link(
        name=name,
        latency_s=latencies_s.get("latency_us", DEFAULT_LATENCY_S),
        all_to_all_latency_s=latencies_s.get("all_to_all_latency_us"),
        bytes_per_s=read_number(f"{where}.bandwidth_gb_per_s", data["bandwidth_gb_per_s"]) * GB,
        **efficiencies,
    )


def read_links(data: Any, nodes: Sequence[Node]) -> tuple[tuple[tuple[int, int], Link], ...]:
    """Read the section ``links``: ``((lower node index, higher node index), link)``, sorted by pair.

    Raises:
        ClusterError: a node is unknown, a pair has two different links, or there are more than `MAX_LINK_PAIRS` pairs.
    """
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise ClusterError(f"links must be a list of {{between: [node, node], ...}}, got {shortened(data)}.")
    indices: dict[str, list[int]] = {}  # by name of a node, and by name of an entry with ``repeat``
    for i, node in enumerate(nodes):
        for name in dict.fromkeys((node.group, node.name)):  # not a set: messages list the names in the same order
            indices.setdefault(name, []).append(i)
    link_by_pair: dict[tuple[int, int], Link] = {}
    entry_by_pair: dict[tuple[int, int], int] = {}  # index of the entry that gave the link
    num_pairs = 0
    for i, entry in enumerate(data):
        where = f"links[{i}]"
        expect_keys(where, entry, required={"between", "bandwidth_gb_per_s"}, allowed={"between", *LINK_KEYS})
        between = entry["between"]
        if not isinstance(between, Sequence) or isinstance(between, str) or len(between) != 2:
            raise ClusterError(f"{where}.between must name two nodes, got {shortened(between)}.")
        ends = [_nodes_named(f"{where}.between", name, indices) for name in between]
        num_pairs += len(ends[0]) * len(ends[1])
        if num_pairs > MAX_LINK_PAIRS:
            raise ClusterError(
                f"{where}.between: links name more than {MAX_LINK_PAIRS:,} pairs of nodes. Give the most common link "
                "as network, and name only the pairs that differ from it."
            )
        pairs = {(min(a, b), max(a, b)) for a, b in product(*ends) if a != b}
        if not pairs:
            raise ClusterError(
                f"{where}.between names {between[0]!r} twice, which is one node. Give the link inside this node as its "
                "link, under nodes."
            )
        link_content = {key: value for key, value in entry.items() if key != "between"}
        link = read_link(where, f"{between[0]} - {between[1]}", link_content)
        # Not ``pairs - link_by_pair.keys()``, which goes over all keys, for every one of 45,000 links.
        for pair in sorted(pair for pair in pairs if pair in link_by_pair):
            if replace(link, name=link_by_pair[pair].name) != link_by_pair[pair]:
                _refuse_second_link(where, nodes, pair, entry_by_pair[pair], entry, data[entry_by_pair[pair]])
        for pair in sorted(pair for pair in pairs if pair not in link_by_pair):
            link_by_pair[pair], entry_by_pair[pair] = link, i
    return tuple(sorted(link_by_pair.items(), key=lambda item: item[0]))


def _refuse_second_link(
    where: str, nodes: Sequence[Node], pair: tuple[int, int], first: int, entry: Any, first_entry: Any
) -> None:
    """Raise `ClusterError` for a pair of nodes to which two entries of ``links`` give different values."""
    keys = sorted(LINK_KEYS & (entry.keys() | first_entry.keys()))
    unlike = [
        f"{key} {first_entry.get(key, 'unset')} and {entry.get(key, 'unset')}"
        for key in keys
        if entry.get(key) != first_entry.get(key)
    ]
    raise ClusterError(
        f"{where} joins {shortened(nodes[pair[0]].name)} and {shortened(nodes[pair[1]].name)}, which links[{first}] "
        f"joins already, with other values: {', '.join(unlike)}. A link has one value for both directions; links that "
        "differ by direction are not supported. Name two nodes once, with the rate of the slower direction."
    )


def _nodes_named(where: str, name: Any, indices: Mapping[str, list[int]]) -> list[int]:
    """Return the indices of the nodes that ``name`` stands for: one node, or all copies of an entry with ``repeat``."""
    if not isinstance(name, str) or name not in indices:
        raise ClusterError(
            f"{where}: there is no node {shortened(name)}{did_you_mean(str(name), indices, MIN_SIMILARITY)}. "
            f"The nodes are {listed(indices)}."
        )
    return indices[name]
