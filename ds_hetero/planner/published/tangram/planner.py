"""Run Tangram on a cluster: form islands, ask about slices, compose the answers, and choose devices of every lane.

The text leaves two choices open. Here islands are tried in every order; if there are many, only by ascending and
descending speed. All degrees of data parallelism, which all islands share, and all sizes of micro-batches are tried;
the number of micro-batches follows from both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, StageCosts
from ds_hetero.planner.pipeline_search.block_ranks import can_be_placed
from ds_hetero.planner.pipeline_search.evaluate import ACTION_S, PlanCandidate
from ds_hetero.planner.pipeline_search.given_layers import GivenLayers
from ds_hetero.planner.published.interface import PublishedPlanner, only_alike_layers
from ds_hetero.planner.published.tangram.composition import Timing, compose, compose_exactly
from ds_hetero.planner.published.tangram.interface import CheckedParallelizer, Parallelizer, PartialPlan
from ds_hetero.planner.published.tangram.islands import TAU, Island, form_islands
from ds_hetero.planner.published.tangram.questions import Answers, Rules, interface_s
from ds_hetero.planner.published.tangram.uniform_parallelizer import UniformParallelizer

ALL_ORDERS = 4  # most islands with which every order is tried; left open by the paper, chosen, never measured
CHEAP_SIZE = 1200  # orders of islands times devices with which compositions take about 0.4 s: 2 orders, 600 devices
CHEAP_S = 0.5  # estimated seconds to compute exact times of compositions, at most, if our search begins at the plan


@dataclass(frozen=True, slots=True)
class TangramPlan:
    """Plan that Tangram chooses."""

    candidate: PlanCandidate  # evaluated with exact times
    islands: tuple[Island, ...]  # in the order of the pipeline
    layers: tuple[int, ...]  # layers of every island
    calls: int  # calls of the inner parallelizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TangramVariant:
    """Deviations from the paper."""

    parallelizer: Parallelizer | None = None  # plans slices on islands; left out, `UniformParallelizer`
    exact: bool = False  # whether to compose exactly, and not by Algorithm 2
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
    """Return Tangram's plan; None if no composition fits.

    Args:
        samples: global batch.
        sizes: samples of a micro-batch that are tried.
        rules: rules that leave questions out; left out, all four.
        variant: deviations from the paper; left out, none.
        effort_s: limit on computing exact times of compositions, as an estimate from counts; the most promising
            compositions come first.

    Raises:
        PlanError: a partial plan is invalid.
    """
    variant = variant or TangramVariant()
    islands = form_islands(costs.pools, variant.tau)
    checked = CheckedParallelizer(variant.parallelizer or UniformParallelizer(costs, samples, sizes), costs, samples)
    answers = Answers(costs, islands, checked, rules)
    composed: list[_Composed] = []
    for order in _orders(islands):
        for parts in _compositions(costs, answers, order, samples, variant.exact):
            for scattered in (False, True):
                lanes = _place_lanes(order, parts, samples, scattered)
                if lanes is None or not can_be_placed(costs.pools, [lane.blocks for lane in lanes]):
                    continue
                bounded = GivenLayers.of(costs, objective, lanes)
                if bounded is not None:
                    composed.append(_Composed(bounded, order, tuple(sum(part.layers) for part in parts)))
    # Exact times take long, so they are computed in the order of lower bounds, until no bound is below the best value.
    best: TangramPlan | None = None
    spent_s = 0.0
    for bounded, order, layers in sorted(composed, key=lambda composition: composition.plan.least_value):
        if best is not None and (bounded.least_value >= best.candidate.value or spent_s > effort_s):
            break
        spent_s += ACTION_S * bounded.num_actions
        candidate = bounded.evaluate(costs, objective)
        if candidate is not None and (best is None or candidate.value < best.candidate.value):
            best = TangramPlan(candidate, order, layers, checked.calls)
    return best


class _Composed(NamedTuple):
    """A composed plan, before its exact times are computed."""

    plan: GivenLayers  # all lanes, with a lower bound of the plan's value
    order: tuple[Island, ...]  # islands in the order of the pipeline
    layers: tuple[int, ...]  # layers of every island


def _orders(islands: Sequence[Island]) -> Iterator[tuple[Island, ...]]:
    """Yield the orders of the islands that are tried."""
    if len(islands) <= ALL_ORDERS:
        yield from itertools.permutations(islands)
    else:
        yield tuple(islands)
        yield tuple(reversed(islands))


def _compositions(
    costs: StageCosts, answers: Answers, order: Sequence[Island], samples: int, exact: bool
) -> Iterator[list[PartialPlan]]:
    """Yield the best composition for every degree of data parallelism and size of micro-batches of all islands.

    A composition is a partial plan of every island, in order.
    """
    num_layers, last = costs.model.num_layers, len(order) - 1
    tables = [answers.by_batch(island, k == 0, k == last) for k, island in enumerate(order)]
    for data_parallel, size in sorted(set.intersection(*(set(table) for table in tables))):
        plans_by_slice = [table[data_parallel, size] for table in tables]  # of every island
        timings = [_timings(costs, answers, order, plans_by_slice, k) for k in range(len(order))]
        stops = (compose_exactly if exact else compose)(timings, num_layers, samples // (data_parallel * size))
        if stops is not None:
            intervals = itertools.pairwise((0, *stops))
            yield [plans[interval] for plans, interval in zip(plans_by_slice, intervals, strict=True)]


def _timings(
    costs: StageCosts,
    answers: Answers,
    order: Sequence[Island],
    plans_by_slice: Sequence[dict[tuple[int, int], PartialPlan]],
    k: int,
) -> dict[tuple[int, int], Timing]:
    """Return the timings of the slices of island ``k``, each with the send from the island before.

    Slices that rule 4 excludes are left out. Micro-batches are equal, so the time of the send depends only on the
    degrees of parallelism inside the stages on both sides.

    Args:
        plans_by_slice: partial plans of every island, by slice.
    """
    previous: dict[tuple[int, int], PartialPlan] = {}  # a plan of the island before, by degrees
    if k:
        previous = {(plan.tensor_parallel, plan.sequence_parallel): plan for plan in plans_by_slice[k - 1].values()}
    send_s_of_degrees: dict[tuple[int, int], float] = {}
    timings = {}
    for interval, plan in plans_by_slice[k].items():
        degrees = plan.tensor_parallel, plan.sequence_parallel
        if degrees not in send_s_of_degrees:
            times = [interface_s(costs, (order[k - 1], source), (order[k], plan)) for source in previous.values()]
            send_s_of_degrees[degrees] = min(times, default=0.0)
        send_s = send_s_of_degrees[degrees]
        if answers.compatible(plan, send_s):
            timings[interval] = Timing(plan.period_s, plan.latency_s + 2 * send_s)  # forward and backward
    return timings


def _place_lanes(
    order: Sequence[Island], parts: Sequence[PartialPlan], samples: int, scattered: bool
) -> list[PlacedPipeline] | None:
    """Return the lanes on blocks of devices of the islands; None if there are too few blocks.

    Args:
        parts: partial plan of every island.
        scattered: False if the stages of a lane are neighbours, which makes sends fast; True if the same stages of all
            lanes are neighbours, as in Megatron-LM's order of ranks, which makes the gradients' synchronization fast.
    """
    num_lanes, size = parts[0].data_parallel, parts[0].micro_batch_size
    blocks_by_lane: list[list[DeviceBlock]] = [[] for _ in range(num_lanes)]
    for island, part in zip(order, parts, strict=True):
        blocks: list[DeviceBlock] = []
        for pool in island.pools:
            blocks += [part.block(pool)] * (len(pool.ranks) // part.stage_size)
        num_stages = len(part.layers)
        if len(blocks) < num_lanes * num_stages:
            return None
        for lane, lane_blocks in enumerate(blocks_by_lane):
            if scattered:
                lane_blocks += blocks[lane : num_lanes * num_stages : num_lanes]
            else:
                lane_blocks += blocks[lane * num_stages : (lane + 1) * num_stages]
    layers = tuple(itertools.chain.from_iterable(part.layers for part in parts))
    micro_batches = samples // (num_lanes * size)
    return [PlacedPipeline(tuple(lane_blocks), layers, size, micro_batches) for lane_blocks in blocks_by_lane]


def _pipelines(
    costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int], effort_s: float = inf
) -> PlanCandidate | None:
    """Return Tangram's plan as a candidate; None if no composition fits. See `plan_tangram`."""
    plan = plan_tangram(costs, objective, samples, sizes, effort_s=effort_s)
    return None if plan is None else plan.candidate


def _cheap_plan(costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int]) -> PlanCandidate | None:
    """Return Tangram's plan if few orders of islands and few devices make it cheap; else None."""
    search_size = len(list(_orders(form_islands(costs.pools)))) * costs.cluster.num_ranks
    return _pipelines(costs, objective, samples, sizes, CHEAP_S) if search_size <= CHEAP_SIZE else None


TANGRAM = PublishedPlanner(
    name="tangram",
    title="Tangram",
    source="arXiv:2606.16907",
    pipelines=_pipelines,
    first_pipelines=_cheap_plan,
    forbids=only_alike_layers(
        "slices of equal length on an island are one question to its parallelizer (rule 1, Eq. 3), and layers of "
        "{model} are not all alike"
    ),
)
