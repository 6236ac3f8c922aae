"""Local search over the blocks of all pipelines, from the best of many starts, with restarts.

Every move is judged with the best layers and the best micro-batches for it, which are exact and cheap
(`cuts`, `batches`); most moves fall at a bound before that. Effort is a count of evaluations, not a clock, so every
machine finds the same plan.

The end of a search, by the last word of the cost model: layers and micro-batches move while the step falls.

The search itself goes by a closed form of every pipeline (`ds_hetero.cost.stages.pipeline_time`), a fraction of a
percent off with many micro-batches and some percent with few. Here every change is judged by the recurrence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ds_hetero.planner.pipeline_search.cuts import LayerCut, make_cut
from ds_hetero.planner.pipeline_search.evaluate import Evaluator, PlanCandidate, Shape, Shapes
from ds_hetero.planner.pipeline_search.joins import joins, mixed_nodes
from ds_hetero.planner.pipeline_search.moves import neighbouring_plans
from ds_hetero.planner.pipeline_search.own_degrees import own_degrees
from ds_hetero.planner.pipeline_search.starts import first_plans
from ds_hetero.planner.pipeline_search.uniform_grids import uniform_grids

GIVERS = 3  # busiest stages that give a layer away; chosen, never measured
LEAST_REFINED_GAIN = 1e-6  # of a plan's value, that the last moves of layers must save; less is rounding


def refine_plan(evaluate: Evaluator, plan: PlanCandidate, effort_s: float) -> PlanCandidate:
    """The plan by the last word, with better layers and micro-batches; at ``effort_s`` of `Evaluator.spent_s`."""
    stop_s = evaluate.spent_s + effort_s
    best, better = evaluate.exact(plan), True
    while better and evaluate.spent_s < stop_s:
        better = False
        for cuts, micro_batches in _around(evaluate, best):
            candidate = evaluate.exact(best, cuts, micro_batches)
            if candidate.value < best.value * (1 - LEAST_REFINED_GAIN):
                best, better = candidate, True
                break
            if evaluate.spent_s >= stop_s:
                break
    return best


def _around(evaluate: Evaluator, plan: PlanCandidate) -> Iterator[tuple[tuple[LayerCut, ...], tuple[int, ...]]]:
    """Layers and micro-batches that relieve the pipeline that ends last."""
    times = [evaluate.pipeline_s(cut, number) for cut, number in zip(plan.cuts, plan.micro_batches, strict=True)]
    last = times.index(max(times))
    for cut in _shifted(evaluate, plan, last):
        yield tuple(cut if old == plan.cuts[last] else old for old in plan.cuts), plan.micro_batches
    size = plan.shapes[last].micro_batch_size
    for other in sorted(range(len(times)), key=times.__getitem__):
        if other != last and plan.shapes[other].micro_batch_size == size and plan.micro_batches[last] > 1:
            numbers = list(plan.micro_batches)
            numbers[last] -= 1
            numbers[other] += 1
            yield plan.cuts, tuple(numbers)


def _shifted(evaluate: Evaluator, plan: PlanCandidate, index: int) -> Iterator[LayerCut]:
    """Cuts of one pipeline in which a busy stage has given a layer to another one."""
    cut, shape = plan.cuts[index], plan.shapes[index]
    load = [forward + backward for forward, backward in zip(cut.forward_s, cut.backward_s, strict=True)]
    stages = range(len(load))
    for giver in sorted(stages, key=lambda j: -load[j])[:GIVERS]:
        for taker in sorted(stages, key=load.__getitem__):
            if taker != giver and cut.layers[giver] > 1:
                layers = list(cut.layers)
                layers[giver] -= 1
                layers[taker] += 1
                new = make_cut(evaluate.costs, shape.blocks, tuple(layers), shape.micro_batch_size, len(plan.shapes))
                if new is not None:
                    yield new


Progress = Callable[[PlanCandidate, float], None]
"""Called with every better plan and the share of the effort that is spent."""

# Chosen by `python -m benchmarks.pipelines_planner constants` (7 clusters of 5 to 48 devices). Steps become longer by
# 6 % in the mean with a `STARTS_SHARE` of 0.05, by 1 % with 0.6, by 3 % with a `KICK_BEST` of 1, by 0.01 % with 8
# `KICK_MOVES`. No plan changes with 2 or 32 `KEPT`, 2 or 40 `KICK_TRIES`, a `KICK_LOSS` of 1.05 or 4, or a
# `LAST_WORD` on 1 or 32 plans.
KEPT = 8  # starts that are refined
STARTS_SHARE = 0.25  # of the effort
STARTS_SHARE_OF_MANY = 0.6  # above `MANY_FOR_BLOCK_MOVES` devices, where moves of single blocks gain little
MANY_FOR_BLOCK_MOVES = 128
KICK_BEST = 0.5  # share of the restarts that begin at the best plan, others at one of another shape
KICK_MOVES = 3  # random moves of a restart, at most
KICK_TRIES = 10  # neighbours that are looked at for one of them
KICK_LOSS = 1.5  # value that a random move may lead to, in that of the best plan
LAST_WORD = 8  # plans that the cost model's last word is asked about
LAST_WORD_SHARE = 0.1  # of the effort, on top of it

# Chosen, never measured.
FEW_RANKS = 8  # devices up to which a wide search is cheap
MOST_LAST_WORD = 2.0  # times `LAST_WORD_SHARE`, where single pipelines have thousands of micro-batches' actions
LEAST_PLAN_GAIN = 1e-9  # of a plan's value; less is rounding
JOINS = 6  # plans with stages of unlike devices that share sequences which are tried

# Seconds by which the search counts its effort, from times on one machine without a record; see `evaluate.BOUND_S`.
START_BLOCK_S = 4e-7  # of making a start, by block
DEGREES_S = 4e-4  # of choosing the sizes of blocks of one makeup of pipelines
JOIN_S = 0.05  # of finding the schedule of a stage of unlike devices


def default_effort_s(num_ranks: int) -> float:
    """Return the effort of a search as `Evaluator.spent_s` counts: 1.7 s from 55 devices on, about twice the CPU's."""
    if num_ranks <= FEW_RANKS:
        return 1.2
    return min(1.7, max(0.6, num_ranks / 32))


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search."""

    best: PlanCandidate  # by the last word of the cost model
    first: PlanCandidate  # the best start
    others: tuple[PlanCandidate, ...]  # plans of other shapes that came close, best first, by the last word
    closed_form_value: float  # the least value by the closed form, which the search makes small
    num_evaluated: int  # plans looked at
    interrupted: bool  # it was stopped before its effort was spent


class Search:
    """One search.

    Args:
        inners: ways in which blocks of several devices may share their work.
        effort_s: what may be spent, by `Evaluator.spent_s`.
        last_word: plans that are compared by the recurrence in the end.
    """

    def __init__(
        self,
        evaluate: Evaluator,
        sizes: Sequence[int] = (1, 2, 4),
        inners: Sequence[str] = ("tensor",),
        effort_s: float = 1.0,
        progress: Progress | None = None,
        last_word: int = LAST_WORD,
        seed: int = 0,
    ) -> None:
        self._evaluate = evaluate
        self._pools = evaluate.costs.pools
        self._sizes, self._inners = tuple(sizes), tuple(inners)
        self._effort_s = effort_s
        self._progress = progress
        self._last_word = last_word
        self._rng = np.random.default_rng(0)
        self._start_s = evaluate.spent_s
        self._best: PlanCandidate | None = None
        self._close: dict[tuple[int, ...], PlanCandidate] = {}

    def run(self, warm: Iterable[Shapes] = ()) -> SearchResult | None:
        """Search from plans that are known, and from all starts; None if no start fits."""
        interrupted = False
        kept: list[PlanCandidate] = []
        try:
            kept = self._starts(warm)
            self._refine(kept)
            if "sequence" in self._inners:
                self._join()
        except KeyboardInterrupt:
            if self._best is None:
                raise
            interrupted = True
        if self._best is None:
            return None
        try:
            ranked = self._ranked()
        except KeyboardInterrupt:
            interrupted, ranked = True, [self._evaluate.exact(self._best)]
        return SearchResult(
            best=ranked[0],
            first=kept[0] if kept else self._best,
            others=tuple(ranked[1:]),
            closed_form_value=self._best.value,
            num_evaluated=self._evaluate.num_evaluated,
            interrupted=interrupted,
        )

    def first(self) -> PlanCandidate | None:
        """Return the first start that fits, in a fraction of the time of `run`; None if none does."""
        for shapes in itertools.chain(self._grids(), self._families()):
            plan = self._evaluate(shapes)
            if plan is not None:
                self._note(plan)
                return plan
            if self._is_spent():
                break
        return None

    # --- parts of it

    def _ranked(self) -> list[PlanCandidate]:
        """The best plans of different shapes by the last word, as many as it takes no more than its effort for."""
        finalists = sorted(self._close.values(), key=lambda plan: plan.value)[: self._last_word]
        effort_s = LAST_WORD_SHARE * self._effort_s
        stop_s = self._evaluate.spent_s + MOST_LAST_WORD * effort_s
        ranked = []
        for plan in finalists:
            ranked.append(refine_plan(self._evaluate, plan, effort_s / len(finalists)))
            if self._evaluate.spent_s > stop_s:
                break
        return sorted(ranked, key=lambda plan: plan.value)

    def _starts(self, warm: Iterable[Shapes]) -> list[PlanCandidate]:
        """The best few starts, each of another time or number of pipelines."""
        tops: list[PlanCandidate] = []
        many = self._evaluate.costs.cluster.num_ranks > MANY_FOR_BLOCK_MOVES
        own = self._own_degrees() if many else ()
        sources = itertools.chain(warm, self._mixed(), own, self._grids(), self._families())
        limit_s = self._effort_s * (STARTS_SHARE_OF_MANY if many else STARTS_SHARE)
        for shapes in sources:
            self._evaluate.spent_s += START_BLOCK_S * sum(len(shape.blocks) for shape in shapes)
            plan = self._evaluate(shapes, tops[-1].value if len(tops) == KEPT else float("inf"))
            if plan is not None and all(_differs(plan, top) for top in tops):
                tops = sorted([*tops, plan], key=lambda top: top.value)[:KEPT]
                self._note(plan)
            if self._spent_s > (limit_s if tops else self._effort_s):
                break
        return tops

    def _grids(self) -> Iterable[Shapes]:
        for _, pipelines in uniform_grids(self._evaluate.costs, self._evaluate.samples, self._sizes):
            yield tuple(Shape(pipeline.blocks, pipeline.micro_batch_size) for pipeline in pipelines)

    def _own_degrees(self) -> Iterable[Shapes]:
        for inner in self._inners:
            for shapes in own_degrees(self._evaluate.costs, self._evaluate.samples, self._sizes[0], inner):
                self._evaluate.spent_s += DEGREES_S * len(set(shapes))
                yield shapes

    def _families(self) -> Iterable[Shapes]:
        for inner in self._inners:
            for pipelines in first_plans(self._pools, inner):
                for size in self._sizes:
                    yield tuple(Shape(blocks, size) for blocks in pipelines)

    def _mixed(self) -> Iterable[Shapes]:
        """Nodes of several kinds of devices as stages that share sequences."""
        for pipelines in mixed_nodes(self._evaluate.costs) if "sequence" in self._inners else ():
            self._evaluate.spent_s += JOIN_S
            for size in self._sizes:
                yield tuple(Shape(blocks, size) for blocks in pipelines)

    def _join(self) -> None:
        """Let two stages of the best plan share sequences, while that helps."""
        tried, better = 0, True
        while better and tried < JOINS and self._best is not None:
            better = False
            for shapes in itertools.islice(joins(self._evaluate.costs, self._best), JOINS - tried):
                tried += 1
                self._evaluate.spent_s += JOIN_S
                candidate = self._evaluate(shapes, self._best.value * (1 - LEAST_PLAN_GAIN))
                if candidate is not None and candidate.value < self._best.value * (1 - LEAST_PLAN_GAIN):
                    self._note(candidate)
                    better = True
                    break

    def _refine(self, tops: Sequence[PlanCandidate]) -> None:
        for plan in tops:
            self._descend(plan)
            if self._is_spent():
                return
        while tops and not self._is_spent():
            assert self._best is not None
            known = list(self._close.values())
            other = known[int(self._rng.integers(len(known)))]
            self._descend(self._kicked(self._best if self._rng.random() < KICK_BEST else other))

    def _descend(self, plan: PlanCandidate) -> PlanCandidate:
        """Take the first move that helps, until none does."""
        better = True
        while better and not self._is_spent():
            better = False
            for shapes in neighbouring_plans(plan.shapes, self._pools, self._sizes, self._inners, self._rng):
                candidate = self._evaluate(shapes, plan.value * (1 - LEAST_PLAN_GAIN))
                if candidate is not None and candidate.value < plan.value * (1 - LEAST_PLAN_GAIN):
                    plan, better = candidate, True
                    break
                if self._is_spent():
                    break
        self._note(plan)
        return plan

    def _kicked(self, plan: PlanCandidate) -> PlanCandidate:
        """A plan some random moves away that is not much worse."""
        assert self._best is not None
        for _ in range(int(self._rng.integers(1, KICK_MOVES + 1))):
            around = itertools.islice(
                neighbouring_plans(plan.shapes, self._pools, self._sizes, self._inners, self._rng), 400
            )
            some = list(around)
            for index in self._rng.permutation(len(some))[:KICK_TRIES].tolist():
                candidate = self._evaluate(some[index], KICK_LOSS * self._best.value)
                if candidate is not None and candidate.value < KICK_LOSS * self._best.value:
                    plan = candidate
                    break
        return plan

    def _note(self, plan: PlanCandidate) -> None:
        """Remember the best plan of every shape, and the best of all."""
        shape = tuple(sorted(len(shape.blocks) for shape in plan.shapes))
        if shape not in self._close or plan.value < self._close[shape].value:
            self._close[shape] = plan
        if self._best is None or plan.value < self._best.value:
            self._best = plan
            if self._progress is not None:
                self._progress(plan, min(1.0, self._spent_s / self._effort_s))

    @property
    def _spent_s(self) -> float:
        return self._evaluate.spent_s - self._start_s

    def _is_spent(self) -> bool:
        return self._spent_s >= self._effort_s


def _differs(plan: PlanCandidate, other: PlanCandidate) -> bool:
    return len(plan.shapes) != len(other.shapes) or abs(plan.value - other.value) > 1e-6 * other.value
