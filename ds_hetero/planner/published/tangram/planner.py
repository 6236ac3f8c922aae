"""Tangram from a cluster to a plan: islands, pruned questions, composition, and the devices of every lane.

What the text leaves open: islands are tried in every order (of many, by speed up and down); the number of micro-batches
follows from the degree of data parallelism, which all islands share, and from the micro-batch, both tried in full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.price import Objective
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, Pools, StageCosts
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.pipelines.blocks import block_of
from ds_hetero.planner.pipelines.search.evaluate import ACTION_S, PlanCandidate
from ds_hetero.planner.pipelines.search.given_layers import GivenLayers
from ds_hetero.planner.published.interface import PublishedPlanner
from ds_hetero.planner.published.tangram.composition import Timing, compose, compose_exactly
from ds_hetero.planner.published.tangram.interface import (
    CheckedParallelizer,
    Parallelizer,
    PartialPlan,
    UniformParallelizer,
)
from ds_hetero.planner.published.tangram.islands import TAU, Island, form_islands
from ds_hetero.planner.published.tangram.pruning import Answers, Rules, interface_s

ALL_ORDERS = 4  # islands up to which every order is tried
CHEAP_SIZE = 800  # orders of islands x devices up to which compositions take about 0.3 s
CHEAP_S = 0.5  # of the last word on them, by a count of their actions, where our search begins at them

_ByBatch = dict[tuple[int, int], dict[tuple[int, int], PartialPlan]]


@dataclass(frozen=True, slots=True)
class TangramPlan:
    """Choice of Tangram.

    Args:
        candidate: judged by the last word of the cost model.
        islands: in the order of the pipeline.
        layers: of every island.
        calls: of the inner parallelizer.
    """

    candidate: PlanCandidate
    islands: tuple[Island, ...]
    layers: tuple[int, ...]
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TangramVariant:
    """Tangram with other parts than the paper's.

    Args:
        parallelizer: plans the slices of a model on islands; left out, `UniformParallelizer`.
        exact: compose exactly instead of by Algorithm 2.
        tau: tolerance of islands, see `form_islands`.
    """

    parallelizer: Parallelizer | None = None
    exact: bool = False
    tau: float = TAU


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
        costs: the cost model.
        objective: what is made small.
        samples: the global batch.
        sizes: of micro-batches that are tried.
        rules: of pruning; left out, all four.
        variant: what is done otherwise than in the paper; left out, nothing.
        effort_s: of the last word on its compositions, by a count of their actions; those that may be best come first.

    Raises:
        PlanError: a partial plan of the parallelizer is invalid; names the parallelizer, the field and its value.
    """
    variant = variant or TangramVariant()
    islands = form_islands(costs.pools, variant.tau)
    checked = CheckedParallelizer(variant.parallelizer or UniformParallelizer(costs, samples, sizes), costs, samples)
    answers = _Answered(Answers(costs, islands, checked, rules))
    composed: list[tuple[GivenLayers, tuple[Island, ...], tuple[int, ...]]] = []
    for order in _orders(islands):
        for parts in _compositions(costs, answers, order, samples, variant.exact):
            for scattered in (False, True):
                placed = _placed(order, parts, samples, scattered)
                given = None if placed is None else GivenLayers.of(costs, objective, placed)
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


def _composition_size(pools: Pools) -> int:
    """Orders of islands times devices, with which the time of `plan_tangram` grows."""
    return len(list(_orders(form_islands(pools)))) * sum(len(pool.ranks) for pool in pools.pools)


def _orders(islands: Sequence[Island]) -> Iterator[tuple[Island, ...]]:
    if len(islands) <= ALL_ORDERS:
        yield from itertools.permutations(islands)
    else:
        yield tuple(islands)
        yield tuple(reversed(islands))


def _compositions(
    costs: StageCosts, answers: _Answered, order: Sequence[Island], samples: int, exact: bool
) -> Iterator[list[PartialPlan]]:
    """The best composition for every degree of data parallelism and micro-batch that all islands can have."""
    num_layers, last = costs.model.num_layers, len(order) - 1
    tables = [answers(island, k == 0, k == last) for k, island in enumerate(order)]
    for data, size in sorted(set.intersection(*(set(table) for table in tables))):
        chosen = [table[data, size] for table in tables]
        timings = [_timings(costs, answers.ask, order, chosen, k) for k in range(len(order))]
        ends = (compose_exactly if exact else compose)(timings, num_layers, samples // (data * size))
        if ends is not None:
            yield [plans[at] for plans, at in zip(chosen, itertools.pairwise((0, *ends)), strict=True)]


class _Answered:
    """The answers for an island in every place of a pipeline, by degree and micro-batch, then slice.

    Args:
        ask: asks them.
    """

    def __init__(self, ask: Answers) -> None:
        self.ask = ask
        self._known: dict[tuple[Island, bool, bool], _ByBatch] = {}

    def __call__(self, island: Island, first: bool, last: bool) -> _ByBatch:
        """Return those of an island that is the first or the last of the pipeline, both, or neither."""
        place = island, first, last
        if place not in self._known:
            by_batch: _ByBatch = {}
            for at in self.ask.slices():
                for plan in self.ask(at, island, first, last):
                    by_batch.setdefault((plan.data_parallel, plan.micro_batch_size), {})[at] = plan
            self._known[place] = by_batch
        return self._known[place]


def _timings(
    costs: StageCosts,
    ask: Answers,
    order: Sequence[Island],
    chosen: Sequence[dict[tuple[int, int], PartialPlan]],
    k: int,
) -> dict[tuple[int, int], Timing]:
    """Period and latency of an island's slices with the hand-over to them; without those that rule 4 drops.

    A hand-over depends on the tensor-parallel degrees on both sides only, since micro-batches are equal.
    """
    degrees = {plan.tensor_parallel: plan for plan in chosen[k - 1].values()} if k else {}
    before: dict[int, float] = {}
    timings = {}
    for at, plan in chosen[k].items():
        if plan.tensor_parallel not in before:
            times = [interface_s(costs, (order[k - 1], each), (order[k], plan)) for each in degrees.values()]
            before[plan.tensor_parallel] = min(times, default=0.0)
        hand_over_s = before[plan.tensor_parallel]
        if ask.compatible(plan, hand_over_s):
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
        blocks = [
            block_of(pool, part.tensor_parallel)
            for pool in island.pools
            for _ in range(len(pool.ranks) // part.tensor_parallel)
        ]
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
    cheap = _composition_size(costs.pools) <= CHEAP_SIZE
    return _pipelines(costs, objective, samples, sizes, CHEAP_S) if cheap else None


def _forbids(cluster: Cluster, model: ModelSpec) -> str | None:
    if model.recurrent is not None:
        return (
            "slices of equal length on an island are one question to its parallelizer (rule 1, Eq. 3), and layers of "
            f"{model.name} are not all alike"
        )
    return None


TANGRAM = PublishedPlanner(
    name="tangram",
    title="Tangram",
    source="arXiv:2606.16907",
    pipelines=_pipelines,
    first_pipelines=_first,
    forbids=_forbids,
)
