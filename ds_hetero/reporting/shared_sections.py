"""Sections of the page that schedules and pipelines share: ranks and links, prices, launch, and a run.

With a run, charts and tables show every rank; without one, they show one rank for each set of equal ranks.
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

MAX_DRAWN_RANKS = 32  # with more ranks, a whole machine is drawn as one node
MAX_DRAWN_LINKS = 60  # links in the picture and in the table


def links_picture(cluster: Cluster, schedule: Schedule) -> JsonDict:
    """Return the data of the picture: machines with their ranks, links between machines, and the ring.

    A node of the picture is a rank, or a machine on clusters of more than `MAX_DRAWN_RANKS` ranks; groups give the
    colour. ``x`` is its place in the box of its machine from the left, 0 to 1, and ``line`` the number of its line from
    above. The ring connects the first ranks of the groups.
    """
    group_of = _ring_positions(schedule)
    by_machine: dict[int, list[int]] = {}
    for rank in schedule.ranks:
        by_machine.setdefault(int(cluster.node_of_rank[rank]), []).append(rank)
    draws_ranks = cluster.num_ranks <= MAX_DRAWN_RANKS
    nodes: list[JsonDict] = []
    names: list[str] = []
    for number, (machine, ranks) in enumerate(by_machine.items()):
        counts = Counter(cluster.devices[rank].name for rank in ranks)
        made_of = ", ".join(f"{count} x {device}" for device, count in counts.items())
        names.append(f"{cluster.nodes[machine].name}: {made_of}, {_rate_text(cluster.nodes[machine].link)}")
        across = ceil(sqrt(len(ranks) * 1.6))
        for i, rank in enumerate(ranks if draws_ranks else ranks[:1]):
            place = {"x": (i % across + 0.5) / across, "line": i // across}
            node = {"name": f"r{rank}", "text": f"rank {rank}", "group": group_of[rank], "machine": number, "size": 20}
            nodes.append({**node, **place})
    first_rank = {machine: ranks[0] for machine, ranks in by_machine.items()}
    edges = _machine_links(cluster, first_rank) + _ring(schedule, cluster, None if draws_ranks else first_rank)
    return {"columns": min(ceil(sqrt(len(names))), 4), "machines": names, "nodes": nodes, "links": edges}


def _ring_positions(schedule: Schedule) -> dict[int, int]:
    """Return the ring position of every rank's group."""
    positions: dict[int, int] = {}
    for position, group in enumerate(schedule.ring_groups):
        positions.update(dict.fromkeys(group.ranks, position))
    return positions


def links_table(cluster: Cluster) -> Markup:
    """Make the table of links, with one row for each class of links that the cluster distinguishes."""
    rows = []
    for link in cluster.link_classes[:MAX_DRAWN_LINKS]:
        rate, latency = f"{link.bytes_per_s / GB:.4g}", f"{link.latency_s / MICRO:.3g}"
        rows.append((link.name, rate, latency, f"{link.p2p_efficiency:.0%}", f"{link.all_to_all_efficiency:.0%}"))
    headings = ("link", "GB/s", "latency, us", "ring reaches", "all-to-all reaches")
    return html_table(headings, rows, "Links, per pair of ranks and direction")


def _rate_text(link: Link) -> str:
    """Return the rate of a link as text: ``25 GB/s``."""
    return f"{link.bytes_per_s / GB:.4g} GB/s"


def _machine_links(cluster: Cluster, first_rank: dict[int, int]) -> list[list[Any]]:
    """Return the lines of the picture for links between machines.

    Args:
        first_rank: rank that stands for each machine.
    """
    lines: list[list[Any]] = []
    for machine, other in islice(combinations(sorted(first_rank), 2), MAX_DRAWN_LINKS):
        link = cluster.link_classes[int(cluster.link_class[machine, other])]
        lines.append([f"r{first_rank[machine]}", f"r{first_rank[other]}", _rate_text(link), False])
    return lines


def _ring(schedule: Schedule, cluster: Cluster, drawn: dict[int, int] | None) -> list[list[Any]]:
    """Return the arrows of the ring in the picture, from each group to the next.

    Args:
        drawn: rank that stands for each machine; None if every rank is drawn.
    """
    ranks = [group.ranks[0] for group in schedule.ring_groups]
    if drawn is not None:
        ranks = [drawn[int(cluster.node_of_rank[rank])] for rank in ranks]
    pairs = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    return [[f"r{a}", f"r{b}", "", True] for a, b in pairs if a != b]


def scaled_links(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with links between machines (inside it, if there is one machine) ``factor`` times as fast."""

    def scaled(link: Link) -> Link:
        """Return the link with its rate times ``factor``."""
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


MAX_ROWS = 64  # ranks or sets of equal ranks in a table


@dataclass(frozen=True, slots=True)
class RankRow:
    """Ranks with equal work on equal devices, which are shown in one row."""

    ranks: tuple[int, ...]  # ranks of the replica, ascending
    device: str  # name of their device

    @property
    def rank(self) -> int:
        """The first rank, which stands for all."""
        return self.ranks[0]

    @property
    def name(self) -> str:
        """Name of the row: ``rank 3``, ``ranks 0-7``, or with gaps ``rank 0 and 3 like it``."""
        first, last = self.ranks[0], self.ranks[-1]
        if first == last:
            return f"rank {first}"
        if last - first + 1 == len(self.ranks):
            return f"ranks {first}-{last}"
        return f"rank {first} and {len(self.ranks) - 1} like it"


def rank_rows(cost: CostModel, schedule: Schedule, is_by_rank: bool) -> list[RankRow]:
    """Return the rows of a replica's ranks, at most `MAX_ROWS`.

    Args:
        is_by_rank: True: every rank has a row, since measured ranks differ; False: equal ranks share a row.
    """
    tokens, heads, position = schedule.tokens(cost.workload.seq_len), heads_of(schedule), _ring_positions(schedule)
    equal_ranks: dict[Any, list[int]] = {}
    for rank in schedule.ranks:
        place = position[rank], cost.cluster.devices[rank], int(cost.cluster.node_of_rank[rank])
        work = heads[rank], tokens[rank] // 16  # rounding may give equal ranks numbers of tokens that differ by one
        equal_ranks.setdefault(rank if is_by_rank else (*place, *work), []).append(rank)
    rows = [RankRow(tuple(ranks), cost.cluster.devices[ranks[0]].name) for ranks in equal_ranks.values()]
    return sorted(rows, key=lambda row: row.rank)[:MAX_ROWS]


def heads_of(schedule: Schedule) -> dict[int, int]:
    """Return the number of query heads of every rank."""
    heads: dict[int, int] = {}
    for group in schedule.groups:
        heads.update(zip(group.ranks, group.heads, strict=True))
    return heads


def price_cards(prices: Sequence[Price]) -> dict[str, str]:
    """Return MFU, price and energy of all replicas together, as texts by name; unknown ones are left out."""
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
    """Add the section on how to run the plan: section of ds_config.json, hostfile and command."""
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
    """Add the section on a run: computing times of ranks, tokens per second, changes of the plan, and events."""
    cards = {"Steps measured": f"{run.steps:,}", "Job ended": run.ended, "Written": _date_text(run.written)}
    rows = []
    for number, rank in enumerate(run.ranks[:MAX_ROWS]):
        times = map(time_text, (rank.step_s, rank.own_min_s, rank.own_median_s, rank.own_max_s))
        score = f"{min(_typical_s(run) / rank.own_median_s, 1.0):.2f}" if rank.own_median_s else "-"
        rows.append((number, rank.device, *times, score))
    steps = [observation["step"] for observation in run.observations]
    parts: list[Markup] = [
        definitions(cards),
        html_table(
            ("rank", "device", "a step", "computes, least", "median", "most", "score"),
            rows,
            "Computing time of the latest steps; a score below 0.90 is a straggler's",
        ),
    ]
    if len(steps) > 1:
        series = [{"name": "tokens/s", "values": [observation["tokens_per_s"] for observation in run.observations]}]
        parts.append(
            page.chart("lines", "Tokens per second while the job ran", {"x": steps, "xName": "step", "series": series})
        )
    if run.changes:
        changes = [(change["step"], _change_text(change), f"{change['gain']:.1%}") for change in run.changes]
        parts.append(html_table(("step", "what changed", "predicted gain"), changes, "Changes by re-planning"))
    if run.events:
        events = []
        for event in run.events:
            events.append((_utc_text(event["time"]), event["kind"], event.get("step", "-"), event_text(event)))
        parts.append(html_table(("UTC", "what happened", "step", ""), events[-MAX_ROWS:], "Ranks that went and came"))
    versions = ", ".join(f"{name} {text}" for name, text in run.versions.items())
    page.section("The run", *parts, f"Versions: {versions}.")


def measured_text(predicted_s: float, run: RunFile) -> str:
    """Return the time of a measured step and the error of its prediction: ``1.63 s (prediction -9.1%)``."""
    return f"{time_text(run.step_s)} (prediction {predicted_s / run.step_s - 1:+.1%})"


def _change_text(change: JsonObject) -> str:
    """Return what a change of the plan changed: ``layers 4+4 | 8`` by pipeline and stage, or ``replica 1``."""
    if "layers" in change:
        return "layers " + " | ".join("+".join(map(str, by_stage)) for by_stage in change["layers"])
    return f"replica {change['replica']}"


def _utc_text(seconds: float) -> str:
    """Return seconds since 1970 as date and time in UTC: ``2026-01-31 12:00:00``."""
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _date_text(written: str) -> str:
    """Return an ISO 8601 date and time to the minute in UTC; other text unchanged."""
    try:
        return f"{datetime.fromisoformat(written).astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return written


def _typical_s(run: RunFile) -> float:
    """Return the lower median over ranks of their median computing times; idle ranks do not count."""
    working = sorted(rank.own_median_s for rank in run.ranks if rank.own_median_s > 0)
    return working[(len(working) - 1) // 2]
