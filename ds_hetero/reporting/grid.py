"""Values behind the sliders of the page: predictions at points of a grid, computed when the page is made.

A point is a length, a factor on the speed of links, and a card that is taken away. At each one there are up to two
answers: this plan, as it is, and a plan made anew.
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
MAX_REMOVALS = 4
MAX_LISTED_RANKS = 64  # of which a point lists tokens, heads and memory


@dataclass(frozen=True, slots=True)
class Removal:
    """A card that is taken away."""

    name: str  # for people
    rank: int | None  # of the cluster; None for all cards as they are


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One place of the sliders."""

    seq_len: int  # tokens of a sequence
    link_factor: float  # on the speed of links between machines, or inside the only one
    removal: int  # index of `removals_of`
    cost: CostModel  # cost model there


def removals_of(cluster: Cluster) -> list[Removal]:
    """Nothing, and one card of every kind in every machine, the last of its kind first."""
    out = [Removal("no card", None)]
    seen = set()
    for rank in reversed(range(cluster.num_ranks if cluster.num_ranks > 1 else 0)):
        kind = int(cluster.node_of_rank[rank]), cluster.devices[rank].name
        if kind not in seen and len(out) <= MAX_REMOVALS:
            seen.add(kind)
            out.append(Removal(cluster.rank_name(rank), rank))
    return out


def points_of(described: DescribedPlan) -> Iterator[GridPoint]:
    """The points of a plan of one replica: lengths first, then links, then cards."""
    cost = described.cost_of(0)
    for number, removal in enumerate(removals_of(cost.cluster)):
        left = cost.cluster if removal.rank is None else cost.cluster.without([removal.rank])
        workload = cost.workload
        if removal.rank is not None and workload.zero_weights is not None:
            weights = [weight for rank, weight in enumerate(workload.zero_weights) if rank != removal.rank]
            workload = replace(workload, zero_weights=tuple(weights) if any(weights) else None)
        for factor in LINK_FACTORS:
            cluster = scaled_links(left, factor)
            for seq_len in _lengths(cost.workload.seq_len, cost.cluster.num_ranks):
                model_there = make_cost_model(cost.name, cluster, cost.model, replace(workload, seq_len=seq_len))
                yield GridPoint(seq_len, factor, number, model_there)


def grid_of(described: DescribedPlan) -> JsonDict | None:
    """Return the grid as data for the page; None for plans of several replicas or of pipelines.

    "this" is the plan as it is, and without a card the plan that is best without it today; "anew" is the plan that is
    best at the point, searched where at most one slider has moved.
    """
    if described.num_replicas != 1:
        return None
    own, cost = described.schedule_of(0), described.cost_of(0)
    schedules: list[Schedule] = [own]
    points = list(points_of(described))
    best: dict[int, Schedule | None] = {0: own}
    for point in points:
        if point.removal and _is_today(point, cost):
            best[point.removal] = _best(point.cost)
    answers = []
    for point in points:
        kept = best[point.removal]
        moved = (point.seq_len != cost.workload.seq_len) + (point.link_factor != 1.0) + (point.removal != 0)
        is_found = point.removal and _is_today(point, cost)
        searched = kept if is_found else _best(point.cost) if moved <= 1 else None
        this = None if kept is None else _answer(point.cost, kept, schedules)
        answers.append({"this": this, "anew": None if searched is None else _answer(point.cost, searched, schedules)})
    return {
        "lengths": _lengths(cost.workload.seq_len, cost.cluster.num_ranks),
        "links": list(LINK_FACTORS),
        "link_text": [_link_text(scaled_links(cost.cluster, factor)) for factor in LINK_FACTORS],
        "removals": [removal.name for removal in removals_of(cost.cluster)],
        "points": answers,
        "schedules": [schedule.to_dict() for schedule in schedules],
    }


def _is_today(point: GridPoint, cost: CostModel) -> bool:
    return point.seq_len == cost.workload.seq_len and point.link_factor == 1.0


def _lengths(seq_len: int, num_ranks: int) -> list[int]:
    lengths = (round(seq_len * factor) for factor in LENGTH_FACTORS)
    return [length for length in dict.fromkeys(lengths) if num_ranks <= length <= MAX_SEQ_LEN]


def _link_text(cluster: Cluster) -> str:
    link = cluster.nodes[0].link if len(cluster.nodes) == 1 else cluster.network
    return f"{link.bytes_per_s / 1e9:.4g} GB/s"


def _best(cost: CostModel) -> Schedule | None:
    """The planner's schedule; None where nothing fits."""
    try:
        return planning.plan(cost.cluster, cost.model, cost.workload, cost_model=cost.name).schedule
    except HeteroError:
        return None


def _answer(cost: CostModel, schedule: Schedule, schedules: list[Schedule]) -> JsonDict:
    try:
        prediction = cost.predict(schedule)
    except HeteroError as error:
        return {"reason": str(error)}
    if schedule not in schedules:
        schedules.append(schedule)
    listed = cost.cluster.num_ranks <= MAX_LISTED_RANKS
    return {
        "step_s": prediction.iteration_s,
        "block_s": prediction.block_s,
        "tokens_per_s": prediction.tokens_per_s,
        "bottleneck": prediction.bottleneck.text,
        "reason": prediction.reason,
        "schedule": schedules.index(schedule),
        "ranks": _ranks(cost, schedule, prediction) if listed else [],
    }


def _ranks(cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[list[Any]]:
    """Device, tokens, heads, memory of every rank, as text and numbers."""
    tokens = schedule.tokens(cost.workload.seq_len)
    heads = heads_of(schedule)
    return [
        [cost.cluster.devices[rank].name, tokens[rank], heads[rank], bytes_text(prediction.memory_bytes[rank])]
        for rank in schedule.ranks
    ]
