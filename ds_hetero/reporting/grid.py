"""Predict the grid of answers behind the sliders of the page, when the page is made.

A point of the grid is a sequence length, a factor on the speed of links, and a card that is removed. Every point has up
to two predictions: that of this plan, and that of the best plan for the point.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ds_hetero.cluster import Cluster
from ds_hetero.common.reading import MAX_SEQ_LEN, JsonDict
from ds_hetero.common.text import bytes_text
from ds_hetero.cost import CostModel, Prediction, make_cost_model
from ds_hetero.errors import HeteroError
from ds_hetero.planner import planning
from ds_hetero.reporting.described_plan import DescribedPlan
from ds_hetero.reporting.shared_sections import heads_of, scaled_links
from ds_hetero.values.schedule import Schedule

LENGTH_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
LINK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
MAX_REMOVALS = 4  # each adds 25 points, some of which need a search; chosen, never measured
MAX_LISTED_RANKS = 64  # with more ranks, a point does not list their tokens, heads and memory; chosen, never measured


@dataclass(frozen=True, slots=True)
class Removal:
    """A position of the slider that removes a card."""

    name: str  # text of the slider
    rank: int | None  # rank of the removed card; None if no card is removed


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One position of all sliders, for which the page has predictions."""

    seq_len: int  # tokens of a sequence
    link_factor: float  # factor on the speed of links between machines, or inside the only machine
    removal: int  # index into the list of `removals_of`
    cost: CostModel  # cost model of the cluster and length at this point


def removals_of(cluster: Cluster) -> list[Removal]:
    """Return the positions of the slider that removes a card: none, then one card of every kind in every machine.

    Of equal cards in a machine, the last rank is removed.
    """
    removals = [Removal("no card", None)]
    if cluster.num_ranks == 1:
        return removals
    seen_kinds = set()
    for rank in reversed(range(cluster.num_ranks)):
        kind = int(cluster.node_of_rank[rank]), cluster.devices[rank].name
        if kind not in seen_kinds and len(removals) <= MAX_REMOVALS:
            seen_kinds.add(kind)
            removals.append(Removal(cluster.rank_name(rank), rank))
    return removals


def points_of(described: DescribedPlan) -> Iterator[GridPoint]:
    """Yield all positions of the sliders, for a plan of one replica; the sequence length changes fastest."""
    cost = described.cost_of(0)
    for number, removal in enumerate(removals_of(cost.cluster)):
        workload = cost.workload
        if removal.rank is None:
            remaining = cost.cluster
        else:
            remaining = cost.cluster.without([removal.rank])
            if workload.zero_weights is not None:
                weights = [weight for rank, weight in enumerate(workload.zero_weights) if rank != removal.rank]
                workload = replace(workload, zero_weights=tuple(weights) if any(weights) else None)
        for factor in LINK_FACTORS:
            cluster = scaled_links(remaining, factor)
            for seq_len in _lengths(cost.workload.seq_len, cost.cluster.num_ranks):
                point_cost = make_cost_model(cost.name, cluster, cost.model, replace(workload, seq_len=seq_len))
                yield GridPoint(seq_len, factor, number, point_cost)


def grid_of(described: DescribedPlan) -> JsonDict | None:
    """Return the grid as data for the page; None for plans of several replicas or of pipelines.

    ``"this"`` of a point is the prediction of this plan. After the removal of a card this plan cannot run; the best
    plan for the other cards, with today's length and links, takes its place. ``"anew"`` is the prediction of the best
    plan at the point. It is computed only if at most one slider has moved, since every search takes seconds.
    """
    if described.num_replicas != 1:
        return None
    schedule, cost = described.schedule_of(0), described.cost_of(0)
    schedules: list[Schedule] = [schedule]  # all schedules; predictions refer to them by index
    points = list(points_of(described))
    this_plan: dict[int, Schedule | None] = {0: schedule}  # schedule behind ``"this"``, by removal
    for point in points:
        if point.removal and _is_today(point, cost):
            this_plan[point.removal] = _best(point.cost)
    answers = []
    for point in points:
        this_schedule = this_plan[point.removal]
        num_moved = (point.seq_len != cost.workload.seq_len) + (point.link_factor != 1.0) + (point.removal != 0)
        anew = None
        if point.removal and _is_today(point, cost):
            anew = this_schedule  # already the best plan at this point
        elif num_moved <= 1:
            anew = _best(point.cost)
        answers.append(
            {
                "this": None if this_schedule is None else _answer(point.cost, this_schedule, schedules),
                "anew": None if anew is None else _answer(point.cost, anew, schedules),
            }
        )
    return {
        "lengths": _lengths(cost.workload.seq_len, cost.cluster.num_ranks),
        "links": list(LINK_FACTORS),
        "link_text": [_link_text(scaled_links(cost.cluster, factor)) for factor in LINK_FACTORS],
        "removals": [removal.name for removal in removals_of(cost.cluster)],
        "points": answers,
        "schedules": [schedule.to_dict() for schedule in schedules],
    }


def _is_today(point: GridPoint, cost: CostModel) -> bool:
    """Return True if a point has the length and the links of the plan's scenario."""
    return point.seq_len == cost.workload.seq_len and point.link_factor == 1.0


def _lengths(seq_len: int, num_ranks: int) -> list[int]:
    """Return the distinct lengths of the slider in tokens, each with at least one token per rank."""
    lengths = (round(seq_len * factor) for factor in LENGTH_FACTORS)
    return [length for length in dict.fromkeys(lengths) if num_ranks <= length <= MAX_SEQ_LEN]


def _link_text(cluster: Cluster) -> str:
    """Return the rate of the links that the slider scales, as text."""
    link = cluster.nodes[0].link if len(cluster.nodes) == 1 else cluster.network
    return f"{link.bytes_per_s / 1e9:.4g} GB/s"


def _best(cost: CostModel) -> Schedule | None:
    """Return the best schedule under a cost model, by a search; None if no schedule fits."""
    try:
        return planning.plan(cost.cluster, cost.model, cost.workload, cost_model=cost.name).schedule
    except HeteroError:
        return None


def _answer(cost: CostModel, schedule: Schedule, schedules: list[Schedule]) -> JsonDict:
    """Return the prediction of a schedule as JSON; add the schedule to ``schedules``, since JSON has its index."""
    try:
        prediction = cost.predict(schedule)
    except HeteroError as error:
        return {"reason": str(error)}
    if schedule not in schedules:
        schedules.append(schedule)
    has_rank_table = cost.cluster.num_ranks <= MAX_LISTED_RANKS
    return {
        "step_s": prediction.iteration_s,
        "block_s": prediction.block_s,
        "tokens_per_s": prediction.tokens_per_s,
        "bottleneck": prediction.bottleneck.text,
        "reason": prediction.reason,
        "schedule": schedules.index(schedule),
        "ranks": _rank_rows(cost, schedule, prediction) if has_rank_table else [],
    }


def _rank_rows(cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[list[Any]]:
    """Return device, tokens, heads and memory of every rank, as rows of the page's table."""
    tokens = schedule.tokens(cost.workload.seq_len)
    heads = heads_of(schedule)
    return [
        [cost.cluster.devices[rank].name, tokens[rank], heads[rank], bytes_text(prediction.memory_bytes[rank])]
        for rank in schedule.ranks
    ]
