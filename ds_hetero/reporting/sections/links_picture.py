"""Ranks by machine with their links and the ring, as data for the page's chart, and as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil, sqrt
from typing import Any

from ds_hetero.cluster import Cluster, Link
from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import GB, MICRO
from ds_hetero.reporting.html import Markup, html_table
from ds_hetero.values.schedule import Schedule

MAX_DRAWN_RANKS = 32  # with more, a machine is drawn as one
MAX_DRAWN_LINKS = 60


def links_picture(cluster: Cluster, schedule: Schedule) -> JsonDict:
    """Return machines with their ranks, coloured by group, links between machines, and the ring.

    A node is a rank, or on clusters of more than `MAX_DRAWN_RANKS` ranks a machine; its place inside its machine's box
    is 0 to 1 from the left, and a line of ranks from above. The ring goes over the groups' first ranks.
    """
    group_of = {rank: i for i, group in enumerate(schedule.ring_groups) for rank in group.ranks}
    by_machine: dict[int, list[int]] = {}
    for rank in schedule.ranks:
        by_machine.setdefault(int(cluster.node_of_rank[rank]), []).append(rank)
    draws_ranks = cluster.num_ranks <= MAX_DRAWN_RANKS
    nodes: list[JsonDict] = []
    names: list[str] = []
    for number, (machine, ranks) in enumerate(by_machine.items()):
        counts = Counter(cluster.devices[rank].name for rank in ranks)
        made_of = ", ".join(f"{count} x {device}" for device, count in counts.items())
        names.append(f"{cluster.nodes[machine].name}: {made_of}, {_text(cluster.nodes[machine].link)}")
        across = ceil(sqrt(len(ranks) * 1.6))
        for i, rank in enumerate(ranks if draws_ranks else ranks[:1]):
            place = {"x": (i % across + 0.5) / across, "line": i // across}
            node = {"name": f"r{rank}", "text": f"rank {rank}", "group": group_of[rank], "machine": number, "size": 20}
            nodes.append({**node, **place})
    first = {machine: ranks[0] for machine, ranks in by_machine.items()}
    edges = _machine_links(cluster, first) + _ring(schedule, cluster, None if draws_ranks else first)
    return {"columns": min(ceil(sqrt(len(names))), 4), "machines": names, "nodes": nodes, "links": edges}


def links_table(cluster: Cluster) -> Markup:
    """Every class of links once."""
    rows = [
        (
            link.name,
            f"{link.bytes_per_s / GB:.4g}",
            f"{link.latency_s / MICRO:.3g}",
            f"{link.p2p_efficiency:.0%}",
            f"{link.all_to_all_efficiency:.0%}",
        )
        for link in cluster.link_classes[:MAX_DRAWN_LINKS]
    ]
    headings = ("link", "GB/s", "latency, us", "ring reaches", "all-to-all reaches")
    return html_table(headings, rows, "Links, per pair of ranks and direction")


def _text(link: Link) -> str:
    return f"{link.bytes_per_s / GB:.4g} GB/s"


def _machine_links(cluster: Cluster, first: dict[int, int]) -> list[list[Any]]:
    """Lines between the first ranks of two machines."""
    pairs = [(a, b) for a in first for b in first if a < b][:MAX_DRAWN_LINKS]
    classes = cluster.link_classes
    return [[f"r{first[a]}", f"r{first[b]}", _text(classes[int(cluster.link_class[a, b])]), False] for a, b in pairs]


def _ring(schedule: Schedule, cluster: Cluster, drawn: dict[int, int] | None) -> list[list[Any]]:
    """Arrows from group to group; ``drawn`` is the rank that stands for each machine, where machines are drawn."""
    ranks = [group.ranks[0] for group in schedule.ring_groups]
    if drawn is not None:
        ranks = [drawn[int(cluster.node_of_rank[rank])] for rank in ranks]
    pairs = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    return [[f"r{a}", f"r{b}", "", True] for a, b in pairs if a != b]


def scaled_links(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with links between machines that much faster; of a single machine, those inside it."""

    def scaled(link: Link) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * factor)

    if len(cluster.nodes) == 1:
        (node,) = cluster.nodes
        switch = node.switch_bytes_per_s
        node = replace(node, link=scaled(node.link), switch_bytes_per_s=None if switch is None else switch * factor)
        return replace(cluster, nodes=(node,))
    nodes = tuple(
        replace(node, nic_bytes_per_s=None if node.nic_bytes_per_s is None else node.nic_bytes_per_s * factor)
        for node in cluster.nodes
    )
    links = tuple((pair, scaled(link)) for pair, link in cluster.links)
    return replace(cluster, nodes=nodes, network=scaled(cluster.network), links=links)
