"""Tangram from a cluster to a plan: islands, pruned questions, composition, and the devices of every lane.

What the text leaves open: islands are tried in every order (of many, by speed up and down); the number of micro-batches
follows from the degree of data parallelism, which all islands share, and from the micro-batch, both tried in full.

One partial plan per island put together to a pipeline: Tangram's dynamic programme, and the exact form of it.

    T_cycle = (m - 1) max_k tau_k + sum_k tau_k                                                      Eq. 7

Algorithm 2 keeps, for every number of layers over the first k islands, the maximum and the sum of the one composition
with the least T_cycle. That is not exact, since another composition with a smaller maximum and a larger sum may be
better once a slow island follows. `compose_exactly` solves a shortest path for every maximum that occurs.

A partial plan is a pipeline itself, so its maximum is the period of its slowest stage and its sum that of all stages.

Which slices an inner parallelizer is asked about: Tangram's four rules (component 3).

    1  slices of equal length on one island are one question, apart from the embedding and the head       Eq. 3
    2  a slice within a factor beta of the island's share of the layers by compute                   Eqs. 4 and 5
    3  a slice whose parameters fit into the island's memory under the highest stage of ZeRO              Eq. 6
    4  neighbours whose hand-over of activations takes at most a part of their period

Rules 1 to 3 decide before a question is asked, rule 4 between two answers. Without rule 1, every interval of layers is
asked about on every island; with it, one interval of every length that the island's place in the pipeline allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

from ds_hetero.cost.price import Objective
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, StageCosts
from ds_hetero.planner.pipeline_search.blocks import can_be_placed
from ds_hetero.planner.pipeline_search.evaluate import ACTION_S, PlanCandidate
from ds_hetero.planner.pipeline_search.starts import GivenLayers
from ds_hetero.planner.published.interface import PublishedPlanner, no_recurrence
from ds_hetero.planner.published.tangram.interface import (
    TAU,
    CheckedParallelizer,
    Island,
    Parallelizer,
    PartialPlan,
    Slice,
    UniformParallelizer,
    form_islands,
)

BETA = 2.0  # imbalance up to which a slice is asked about
SAFETY = 0.1  # of memory, kept for activations
INTERFACE = 1.0  # of the period, up to which a hand-over is accepted
ELEMENT_BYTES = 2
Z_MAX = 3  # ZeRO's highest stage, by which Eq. 6 as printed divides the memory

_ByBatch = dict[tuple[int, int], dict[tuple[int, int], PartialPlan]]


@dataclass(frozen=True, slots=True)
class Rules:
    """Which of the four rules hold."""

    equal_lengths: bool = True  # rule 1
    balanced: bool = True  # rule 2
    memory: bool = True  # rule 3
    interface: bool = True  # rule 4


class Answers:
    """Asks an inner parallelizer for plans of the cluster's islands, as seldom as the rules allow."""

    def __init__(
        self, costs: StageCosts, islands: Sequence[Island], parallelizer: Parallelizer, rules: Rules | None = None
    ) -> None:
        self._costs, self._parallelizer, self._rules = costs, parallelizer, rules or Rules()
        self._whole = sum(island.flops_per_s for island in islands)
        self._known: dict[tuple[object, ...], Sequence[PartialPlan]] = {}
        self._by_place: dict[tuple[Island, bool, bool], _ByBatch] = {}

    def by_batch(self, island: Island, first: bool, last: bool) -> _ByBatch:
        """Return the answers for all slices on an island in its place, by degree and micro-batch, then slice."""
        place = island, first, last
        if place not in self._by_place:
            by_batch: _ByBatch = {}
            for at in combinations(range(self._costs.model.num_layers + 1), 2):
                for plan in self(at, *place):
                    by_batch.setdefault((plan.data_parallel, plan.micro_batch_size), {})[at] = plan
            self._by_place[place] = by_batch
        return self._by_place[place]

    def __call__(self, at: tuple[int, int], island: Island, first: bool, last: bool) -> Sequence[PartialPlan]:
        """Return the partial plans of a slice on an island; none if a rule excludes them.

        Args:
            first: the island is the first of the pipeline, so that its slices begin at layer 0, and no others do.
            last: the island is the last one, likewise.
        """
        start, stop = at
        part, rules = Slice(stop - start, start == 0, stop == self._costs.model.num_layers), self._rules
        fits_in = (part.first, part.last) == (first, last)
        if rules.equal_lengths and not fits_in:
            return ()
        if (rules.balanced and not self._is_balanced(part, island)) or (rules.memory and not self._fits(part, island)):
            return ()
        key = (part, island) if rules.equal_lengths else (start, stop, island)
        if key not in self._known:
            self._known[key] = self._parallelizer.plan(part, island)
        return self._known[key] if fits_in else ()

    def _is_balanced(self, part: Slice, island: Island) -> bool:
        share = self._costs.model.num_layers * island.flops_per_s / self._whole
        return share / BETA <= part.layers <= share * BETA

    def _fits(self, part: Slice, island: Island) -> bool:
        """Eq. 6: the parameters against the memory of the whole island over ``Z_MAX``."""
        memory = self._costs.pools.kinds[island.weakest].device.memory_bytes
        needed = part.layers * self._costs.model.layer_parameters * ELEMENT_BYTES
        return needed <= island.num_devices * memory * (1 - SAFETY) / Z_MAX

    def compatible(self, plan: PartialPlan, hand_over_s: float) -> bool:
        """Rule 4: whether a hand-over to this plan is short enough."""
        return not self._rules.interface or hand_over_s <= INTERFACE * plan.period_s


def interface_s(costs: StageCosts, source: tuple[Island, PartialPlan], target: tuple[Island, PartialPlan]) -> float:
    """Return the time of handing the activations of a micro-batch from one partial plan to the next, one direction."""
    (a, before), (b, after) = source, target
    cluster = costs.cluster
    classes = {int(cluster.link_class[x.node, y.node]) for x in a.pools for y in b.pools}
    fastest = max(sorted(classes), key=lambda link: cluster.link_classes[link].bytes_per_s)
    blocks = [plan.block(costs.pools.largest[island.weakest]) for island, plan in ((a, before), (b, after))]
    return costs.hop_s(fastest, blocks[0], blocks[1], after.micro_batch_size)


Timing = tuple[float, float]
"""Period and latency of a part, for one micro-batch."""

Tables = Sequence[Mapping[tuple[int, int], Timing]]
"""By island in order, what its slices ``(start, stop)`` take."""


def cycle_s(parts: Sequence[Timing], micro_batches: int) -> float:
    """Return the time of all micro-batches (Eq. 7)."""
    return (micro_batches - 1) * max(period for period, _ in parts) + sum(latency for _, latency in parts)


def compose(tables: Tables, num_layers: int, micro_batches: int) -> tuple[int, ...] | None:
    """The ends of islands' slices, by Algorithm 2 on their partial plans; None if no slices cover the model."""
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for table in tables:
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for (start, stop), (period, latency) in table.items():
            if start not in best:
                continue
            longest, total, stops = best[start]
            new = max(longest, period), total + latency, (*stops, stop)
            if stop not in after or _value(new, micro_batches) < _value(after[stop], micro_batches):
                after[stop] = new
        best = after
    return best[num_layers][2] if num_layers in best else None


def _value(state: tuple[float, float, tuple[int, ...]], micro_batches: int) -> float:
    return (micro_batches - 1) * state[0] + state[1]


def compose_exactly(tables: Tables, num_layers: int, micro_batches: int) -> tuple[int, ...] | None:
    """Return the best ends of the slices; None if no slices cover the model. The arguments are those of `compose`."""
    best, chosen = inf, None
    for limit in sorted({period for table in tables for period, _ in table.values()}):
        if (micro_batches - 1) * limit >= best:
            break
        paths: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for table in tables:
            after: dict[int, tuple[float, tuple[int, ...]]] = {}
            for (start, stop), (period, latency) in table.items():
                if period <= limit and start in paths:
                    total = paths[start][0] + latency
                    if stop not in after or total < after[stop][0]:
                        after[stop] = total, (*paths[start][1], stop)
            paths = after
        if num_layers in paths and (micro_batches - 1) * limit + paths[num_layers][0] < best:
            best, chosen = (micro_batches - 1) * limit + paths[num_layers][0], paths[num_layers][1]
    return chosen


ALL_ORDERS = 4  # islands up to which every order is tried
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
