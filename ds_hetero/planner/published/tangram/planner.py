"""Tangram from a cluster to a plan: islands, pruned questions, composition, and the devices of every lane.

The text leaves two things open. Islands are tried in every order (of many, by speed up and down); the number of
micro-batches follows from the degree of data parallelism, which all islands share, and from the micro-batch, both tried
in full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, StageCosts
from ds_hetero.planner.pipeline_search.block_ranks import can_be_placed
from ds_hetero.planner.pipeline_search.evaluate import ACTION_S, PlanCandidate
from ds_hetero.planner.pipeline_search.given_layers import GivenLayers
from ds_hetero.planner.published.interface import PublishedPlanner, no_recurrence
from ds_hetero.planner.published.tangram.composition import Timing, compose, compose_exactly
from ds_hetero.planner.published.tangram.interface import CheckedParallelizer, Parallelizer, PartialPlan
from ds_hetero.planner.published.tangram.islands import TAU, Island, form_islands
from ds_hetero.planner.published.tangram.questions import Answers, Rules, interface_s
from ds_hetero.planner.published.tangram.uniform_parallelizer import UniformParallelizer

ALL_ORDERS = 4  # islands up to which every order is tried; left open by the paper, chosen, never measured
CHEAP_SIZE = 1200  # orders of islands x devices up to which compositions take about 0.4 s: two islands of 600 devices
CHEAP_S = 0.5  # of the last word on them, by a count of their actions, where our search begins at them


@dataclass(frozen=True, slots=True)
class TangramPlan:
    """Choice of Tangram."""

    candidate: PlanCandidate  # judged by the last word of the cost model
    islands: tuple[Island, ...]  # in the order of the pipeline
    layers: tuple[int, ...]  # of every island
    calls: int  # of the inner parallelizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TangramVariant:
    """Tangram with other parts than the paper's."""

    parallelizer: Parallelizer | None = None  # plans the slices of a model on islands; left out, `UniformParallelizer`
    exact: bool = False  # compose exactly instead of by Algorithm 2
    tau: float = TAU  # tolerance of islands, see `form_islands`


def plan_tangram(
    costs: StageCosts,
    objective: Objective,
    samples: int,
    sizes: Sequence[int] = (1, 2),
    *,
    rules: Rules | None = None,
    variant: TangramVariant | None = None,
    effort_s: float = inf,
) -> TangramPlan | None:
    """Return Tangram's plan; None if no composition fits. Raises `PlanError`: a partial plan is invalid.

    Args:
        rules: of pruning; left out, all four.
        variant: what is done otherwise than in the paper; left out, nothing.
        effort_s: of the last word on its compositions, by a count of their actions; those that may be best come first.
    """
    variant = variant or TangramVariant()
    islands = form_islands(costs.pools, variant.tau)
    checked = CheckedParallelizer(variant.parallelizer or UniformParallelizer(costs, samples, sizes), costs, samples)
    answers = Answers(costs, islands, checked, rules)
    composed: list[tuple[GivenLayers, tuple[Island, ...], tuple[int, ...]]] = []
    for order in _orders(islands):
        for parts in _compositions(costs, answers, order, samples, variant.exact):
            for scattered in (False, True):
                placed = _placed(order, parts, samples, scattered)
                if placed is None or not can_be_placed(costs.pools, [lane.blocks for lane in placed]):
                    continue
                given = GivenLayers.of(costs, objective, placed)
                if given is not None:
                    composed.append((given, order, tuple(sum(part.layers) for part in parts)))
    best: tuple[PlanCandidate, tuple[Island, ...], tuple[int, ...]] | None = None
    spent_s = 0.0
    for given, order, layers in sorted(composed, key=lambda each: each[0].least_value):
        if best is not None and (given.least_value >= best[0].value or spent_s > effort_s):
            break
        spent_s += ACTION_S * given.num_actions
        candidate = given.judged(costs, objective)
        if candidate is not None and (best is None or candidate.value < best[0].value):
            best = candidate, order, layers
    return None if best is None else TangramPlan(*best, checked.calls)


def _orders(islands: Sequence[Island]) -> Iterator[tuple[Island, ...]]:
    if len(islands) <= ALL_ORDERS:
        yield from itertools.permutations(islands)
    else:
        yield tuple(islands)
        yield tuple(reversed(islands))


def _compositions(
    costs: StageCosts, answers: Answers, order: Sequence[Island], samples: int, exact: bool
) -> Iterator[list[PartialPlan]]:
    """The best composition for every degree of data parallelism and micro-batch that all islands can have."""
    num_layers, last = costs.model.num_layers, len(order) - 1
    tables = [answers.by_batch(island, k == 0, k == last) for k, island in enumerate(order)]
    for data, size in sorted(set.intersection(*(set(table) for table in tables))):
        chosen = [table[data, size] for table in tables]
        timings = [_timings(costs, answers, order, chosen, k) for k in range(len(order))]
        ends = (compose_exactly if exact else compose)(timings, num_layers, samples // (data * size))
        if ends is not None:
            yield [plans[at] for plans, at in zip(chosen, itertools.pairwise((0, *ends)), strict=True)]


def _timings(
    costs: StageCosts,
    answers: Answers,
    order: Sequence[Island],
    chosen: Sequence[dict[tuple[int, int], PartialPlan]],
    k: int,
) -> dict[tuple[int, int], Timing]:
    """Period and latency of an island's slices with the hand-over to them; without those that rule 4 drops.

    A hand-over depends on the inner degrees on both sides only, since micro-batches are equal.
    """
    ends = {(plan.tensor_parallel, plan.sequence_parallel): plan for plan in chosen[k - 1].values()} if k else {}
    before: dict[tuple[int, int], float] = {}
    timings = {}
    for at, plan in chosen[k].items():
        degrees = plan.tensor_parallel, plan.sequence_parallel
        if degrees not in before:
            times = [interface_s(costs, (order[k - 1], each), (order[k], plan)) for each in ends.values()]
            before[degrees] = min(times, default=0.0)
        hand_over_s = before[degrees]
        if answers.compatible(plan, hand_over_s):
            timings[at] = plan.period_s, plan.latency_s + 2 * hand_over_s
    return timings


def _placed(
    order: Sequence[Island], parts: Sequence[PartialPlan], samples: int, scattered: bool
) -> list[PlacedPipeline] | None:
    """Lanes over the islands' real blocks; None if there are too few.

    A lane's stages are neighbours, or ``scattered`` so that equal stages of all lanes are, as in Megatron-LM's order
    of ranks: hops are short in one, exchanges of gradients in the other.
    """
    data, size = parts[0].data_parallel, parts[0].micro_batch_size
    lanes: list[list[DeviceBlock]] = [[] for _ in range(data)]
    for island, part in zip(order, parts, strict=True):
        blocks = [part.block(pool) for pool in island.pools for _ in range(len(pool.ranks) // part.stage_size)]
        stages = len(part.layers)
        if len(blocks) < data * stages:
            return None
        for lane in range(data):
            own = slice(lane, data * stages, data) if scattered else slice(lane * stages, (lane + 1) * stages)
            lanes[lane] += blocks[own]
    layers = tuple(count for part in parts for count in part.layers)
    return [PlacedPipeline(tuple(lane), layers, size, samples // (data * size)) for lane in lanes]


def _pipelines(
    costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int], effort_s: float = inf
) -> PlanCandidate | None:
    plan = plan_tangram(costs, objective, samples, sizes, effort_s=effort_s)
    return None if plan is None else plan.candidate


def _first(costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int]) -> PlanCandidate | None:
    """Tangram's plan where few orders of islands make it cheap."""
    size = len(list(_orders(form_islands(costs.pools)))) * costs.cluster.num_ranks
    return _pipelines(costs, objective, samples, sizes, CHEAP_S) if size <= CHEAP_SIZE else None


TANGRAM = PublishedPlanner(
    name="tangram",
    title="Tangram",
    source="arXiv:2606.16907",
    pipelines=_pipelines,
    first_pipelines=_first,
    forbids=no_recurrence(
        "slices of equal length on an island are one question to its parallelizer (rule 1, Eq. 3), and layers of "
        "{model} are not all alike"
    ),
)
