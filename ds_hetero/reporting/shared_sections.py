"""Sections of the page that schedules and pipelines share: ranks with their links, costs and launch, and a run.

After a run a chart or a table shows every rank, otherwise one of the ranks that do the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import chain, combinations, islice
from math import ceil, sqrt
from typing import Any

from ds_hetero.cluster import Cluster, Link
from ds_hetero.common.reading import JsonDict, JsonObject
from ds_hetero.common.text import time_text
from ds_hetero.common.units import GB, MICRO
from ds_hetero.cost import CostModel
from ds_hetero.cost.price import BILLION, JOULES_PER_KWH, MILLION, Price, duration_text
from ds_hetero.reporting.described_plan import DescribedPlan
from ds_hetero.reporting.html import Markup, Page, definitions, html_table, preformatted
from ds_hetero.reporting.launching import JobLaunch
from ds_hetero.reporting.run_file import RunFile, event_text
from ds_hetero.values.schedule import Schedule

MAX_DRAWN_RANKS = 32  # with more, a machine is drawn as one
MAX_DRAWN_LINKS = 60


def links_picture(cluster: Cluster, schedule: Schedule) -> JsonDict:
    """Return machines with their ranks, coloured by group, links between machines, and the ring.

    A node is a rank, or on clusters of more than `MAX_DRAWN_RANKS` ranks a machine; its place inside its machine's box
    is 0 to 1 from the left, and a line of ranks from above. The ring goes over the groups' first ranks.
    """
    group_of = _position_of(schedule)
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


def _position_of(schedule: Schedule) -> dict[int, int]:
    """Ring position of every rank's group."""
    positions: dict[int, int] = {}
    for position, group in enumerate(schedule.ring_groups):
        positions.update(dict.fromkeys(group.ranks, position))
    return positions


def links_table(cluster: Cluster) -> Markup:
    """Every class of links once."""
    rows = []
    for link in cluster.link_classes[:MAX_DRAWN_LINKS]:
        rate, latency = f"{link.bytes_per_s / GB:.4g}", f"{link.latency_s / MICRO:.3g}"
        rows.append((link.name, rate, latency, f"{link.p2p_efficiency:.0%}", f"{link.all_to_all_efficiency:.0%}"))
    headings = ("link", "GB/s", "latency, us", "ring reaches", "all-to-all reaches")
    return html_table(headings, rows, "Links, per pair of ranks and direction")


def _text(link: Link) -> str:
    return f"{link.bytes_per_s / GB:.4g} GB/s"


def _machine_links(cluster: Cluster, first: dict[int, int]) -> list[list[Any]]:
    """Lines between the first ranks of two machines."""
    lines: list[list[Any]] = []
    for machine, other in islice(combinations(sorted(first), 2), MAX_DRAWN_LINKS):
        link = cluster.link_classes[int(cluster.link_class[machine, other])]
        lines.append([f"r{first[machine]}", f"r{first[other]}", _text(link), False])
    return lines


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
        node if node.nic_bytes_per_s is None else replace(node, nic_bytes_per_s=node.nic_bytes_per_s * factor)
        for node in cluster.nodes
    )
    links = tuple((pair, scaled(link)) for pair, link in cluster.links)
    return replace(cluster, nodes=nodes, network=scaled(cluster.network), links=links)


MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class RankRow:
    """Ranks that do the same."""

    ranks: tuple[int, ...]  # of the replica, ascending
    device: str  # their name

    @property
    def rank(self) -> int:
        """The one that stands for all."""
        return self.ranks[0]

    @property
    def name(self) -> str:
        """``rank 3`` or ``ranks 0-7``; with gaps, the number of the others."""
        first, last = self.ranks[0], self.ranks[-1]
        if first == last:
            return f"rank {first}"
        if last - first + 1 == len(self.ranks):
            return f"ranks {first}-{last}"
        return f"rank {first} and {len(self.ranks) - 1} like it"


def rank_rows(cost: CostModel, schedule: Schedule, each: bool) -> list[RankRow]:
    """Rows of a replica's ranks, at most `MAX_ROWS`; with ``each`` one per rank, since measured ranks differ."""
    tokens, heads, position = schedule.tokens(cost.workload.seq_len), heads_of(schedule), _position_of(schedule)
    alike: dict[Any, list[int]] = {}
    for rank in schedule.ranks:
        place = position[rank], cost.cluster.devices[rank], int(cost.cluster.node_of_rank[rank])
        work = heads[rank], tokens[rank] // 16  # tokens are rounded: equal ranks may differ by one
        alike.setdefault(rank if each else (*place, *work), []).append(rank)
    rows = [RankRow(tuple(ranks), cost.cluster.devices[ranks[0]].name) for ranks in alike.values()]
    return sorted(rows, key=lambda row: row.rank)[:MAX_ROWS]


def heads_of(schedule: Schedule) -> dict[int, int]:
    """Query heads of every rank."""
    heads: dict[int, int] = {}
    for group in schedule.groups:
        heads.update(zip(group.ranks, group.heads, strict=True))
    return heads


def price_cards(prices: Sequence[Price]) -> dict[str, str]:
    """MFU, money and energy of replicas that step together, as far as they are known."""
    step_s = max(price.step_s for price in prices)
    tokens = sum(price.tokens for price in prices)
    shares = [price.mfu * price.step_s / step_s for price in prices]
    cards = {"Of the peaks (MFU)": f"{sum(shares) / len(shares):.1%}"}
    money = [price.money * step_s / price.step_s for price in prices if price.money is not None]
    if len(money) == len(prices):
        cards["Price of a million tokens"] = f"{MILLION * sum(money) / tokens:,.3g}"
    joules = [price.joules for price in prices if price.joules is not None]
    if len(joules) == len(prices):
        cards["Energy of a million tokens"] = f"{MILLION * sum(joules) / tokens / JOULES_PER_KWH:,.3g} kWh"
    cards["A billion tokens take"] = duration_text(BILLION / tokens * step_s)
    return cards


def add_launch(page: Page, described: DescribedPlan) -> None:
    """How to run it: the section, and the launch."""
    nodes = list(chain.from_iterable(cluster.nodes for cluster in described.scenario.clusters))
    section = {"heterogeneity": {"schedule": "plan.json"}}
    launch = JobLaunch.of(nodes)
    savers = described.scenario.workload.memory_savers
    hostfile: list[Markup | str] = []
    if len(nodes) > 1:
        hostfile = [
            "The hosts, in the order of the ranks, with your names of them (hostfile); ds-hetero launch-files writes "
            "it, and what other launchers take:",
            preformatted(launch.hostfile.strip()),
        ]
    page.section(
        "Run it",
        "Save the plan file below as plan.json beside the script, and add this section to ds_config.json:",
        preformatted(json.dumps(section, indent=2)),
        *hostfile,
        "Add import ds_hetero; ds_hetero.register() before the Trainer or the engine is made, and launch as before:",
        preformatted(launch.deepspeed_line),
        f"The plan counts on {', '.join(savers)}: the job has to set it." if savers else "",
    )


def add_run(page: Page, run: RunFile) -> None:
    """Add the section."""
    cards = {"Steps measured": f"{run.steps:,}", "Job ended": run.ended, "Written": _moment_text(run.written)}
    rows = []
    for number, rank in enumerate(run.ranks[:MAX_ROWS]):
        times = map(time_text, (rank.step_s, rank.own_min_s, rank.own_median_s, rank.own_max_s))
        score = f"{min(_typical(run) / rank.own_median_s, 1.0):.2f}" if rank.own_median_s else "-"
        rows.append((number, rank.device, *times, score))
    steps = [one["step"] for one in run.observations]
    parts: list[Markup] = [
        definitions(cards),
        html_table(
            ("rank", "device", "a step", "computes, least", "median", "most", "score"),
            rows,
            "Computing time of the latest steps; a score below 0.90 is a straggler's",
        ),
    ]
    if len(steps) > 1:
        values = {"tokens/s": [one["tokens_per_s"] for one in run.observations]}
        series = [{"name": name, "values": of_name} for name, of_name in values.items()]
        parts.append(
            page.chart("lines", "Tokens per second while the job ran", {"x": steps, "xName": "step", "series": series})
        )
    if run.changes:
        changes = [(one["step"], _change_text(one), f"{one['gain']:.1%}") for one in run.changes]
        parts.append(html_table(("step", "what changed", "predicted gain"), changes, "Changes by re-planning"))
    if run.events:
        events = [(_time_text(one["time"]), one["kind"], one.get("step", "-"), event_text(one)) for one in run.events]
        parts.append(html_table(("UTC", "what happened", "step", ""), events[-MAX_ROWS:], "Ranks that went and came"))
    versions = ", ".join(f"{name} {text}" for name, text in run.versions.items())
    page.section("The run", *parts, f"Versions: {versions}.")


def measured_text(predicted_s: float, run: RunFile) -> str:
    """A measured step, and how far the prediction is from it."""
    return f"{time_text(run.step_s)} (prediction {predicted_s / run.step_s - 1:+.1%})"


def _change_text(change: JsonObject) -> str:
    if "layers" in change:
        return "layers " + " | ".join("+".join(map(str, by_stage)) for by_stage in change["layers"])
    return f"replica {change['replica']}"


def _time_text(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _moment_text(written: str) -> str:
    """Date and time to the minute, as people write it; other text is returned unchanged."""
    try:
        return f"{datetime.fromisoformat(written).astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return written


def _typical(run: RunFile) -> float:
    working = sorted(rank.own_median_s for rank in run.ranks if rank.own_median_s > 0)
    return working[(len(working) - 1) // 2]
