"""Local search over the blocks of all pipelines, from the best of many starts, with restarts.

Every move is judged with the best layers and the best micro-batches for it, which are exact and cheap
(`cuts`, `batches`); most moves are given up at a lower bound before that. The effort is a count of evaluations, not a
clock, so every machine finds the same plan. The search times pipelines by a closed form; a few finalists are compared
and improved by exact times in the end (`refine`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ds_hetero.planner.pipeline_search.evaluate import Evaluator, PlanCandidate, Shape, Shapes
from ds_hetero.planner.pipeline_search.joins import joins, mixed_nodes
from ds_hetero.planner.pipeline_search.moves import neighbouring_plans
from ds_hetero.planner.pipeline_search.refine import refine_plan
from ds_hetero.planner.pipeline_search.stage_sizes_by_kind import plans_with_sizes_by_kind
from ds_hetero.planner.pipeline_search.starts import first_plans
from ds_hetero.planner.pipeline_search.uniform_grids import uniform_grids

Progress = Callable[[PlanCandidate, float], None]
"""Called with every better plan and the share of the effort that is spent."""

# Chosen by `python -m benchmarks.pipelines_planner constants` (7 clusters of 5 to 48 devices). Steps become longer by
# 6 % in the mean with a `STARTS_SHARE` of 0.05, by 1 % with 0.6, by 3 % with a `KICK_BEST` of 1, by 0.01 % with 8
# `KICK_MOVES`. No plan changes with 2 or 32 `KEPT_STARTS`, 2 or 40 `KICK_TRIES`, a `KICK_LOSS` of 1.05 or 4, or 1 or 32
# `FINALISTS`.
KEPT_STARTS = 8  # number of starts from which the search descends
STARTS_SHARE = 0.25  # share of the effort for the evaluation of starts
STARTS_SHARE_OF_MANY = 0.6  # the same above `MANY_FOR_BLOCK_MOVES` devices, where moves of single blocks gain little
MANY_FOR_BLOCK_MOVES = 128
KICK_BEST = 0.5  # share of the restarts that begin at the best plan; the others begin at one of another shape
KICK_MOVES = 3  # most random moves of a restart
KICK_TRIES = 10  # most neighbours that are evaluated for a random move
KICK_LOSS = 1.5  # value that a random move may lead to, as a multiple of the best plan's
FINALISTS = 8  # number of plans that are compared by exact times in the end
FINALISTS_SHARE = 0.1  # additional effort for the finalists, as a share of the effort

# Chosen, never measured.
FEW_RANKS = 8  # most devices with which a wide search is cheap
MAX_FINALISTS_EFFORT = 2.0  # times `FINALISTS_SHARE`: exact times of thousands of micro-batches take longer
LEAST_PLAN_GAIN = 1e-9  # relative gain of a plan's value; less is rounding
SAME_START = 1e-6  # relative difference of values up to which two starts count as one
MAX_NEIGHBOURS = 400  # most neighbours of a plan among which a random move is drawn
MAX_JOINS = 6  # most plans that are tried in which two stages become one that shares sequences

# Seconds by which the search counts its effort, from times on one machine without a record; see `evaluate.BOUND_S`.
START_EFFORT_S_PER_BLOCK = 4e-7  # to make a start
STAGE_SIZES_EFFORT_S = 4e-4  # to choose the stage sizes of one pipeline
JOIN_EFFORT_S = 0.05  # to find the schedule of a stage of unlike devices


def default_effort_s(num_ranks: int) -> float:
    """Return the usual effort of a search, in seconds of `Evaluator.spent_s`: about twice the CPU seconds it takes."""
    if num_ranks <= FEW_RANKS:
        return 1.2
    return min(1.7, max(0.6, num_ranks / 32))


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search."""

    best: PlanCandidate  # the best plan by exact times
    first: PlanCandidate  # the best start
    others: tuple[PlanCandidate, ...]  # the other finalists, of other shapes, best first by exact times
    closed_form_value: float  # least value by the closed form, which the search minimizes
    num_evaluated: int  # number of plans that were evaluated
    interrupted: bool  # whether the user stopped the search before its effort was spent


class Search:
    """One search for the best plan of pipelines.

    Args:
        evaluate: cost model, global batch and objective.
        sizes: samples of a micro-batch that are tried.
        inners: ways in which blocks of several devices may share their work.
        effort_s: seconds of `Evaluator.spent_s` after which the search ends.
        progress: called with every better plan.
        num_finalists: number of plans that are compared by exact times in the end.
    """

    def __init__(
        self,
        evaluate: Evaluator,
        sizes: Sequence[int] = (1, 2, 4),
        inners: Sequence[str] = ("tensor",),
        effort_s: float = 1.0,
        progress: Progress | None = None,
        num_finalists: int = FINALISTS,
    ) -> None:
        self._evaluate = evaluate
        self._pools = evaluate.costs.pools
        self._sizes, self._inners = tuple(sizes), tuple(inners)
        self._effort_s = effort_s
        self._progress = progress
        self._num_finalists = num_finalists
        self._rng = np.random.default_rng(0)
        self._start_s = evaluate.spent_s
        self._best: PlanCandidate | None = None
        self._best_by_stages: dict[tuple[int, ...], PlanCandidate] = {}  # by numbers of stages of its pipelines, sorted

    def run(self, warm: Iterable[Shapes] = ()) -> SearchResult | None:
        """Search from the plans ``warm`` and from all other starts; None if no start fits.

        An interrupt by the user (Ctrl-C) ends the search with the best plan so far; it is raised if there is none.

        Args:
            warm: plans to begin at, such as those of published planners.
        """
        interrupted = False
        starts: list[PlanCandidate] = []
        try:
            starts = self._best_starts(warm)
            self._descend_from_all(starts)
            if "sequence" in self._inners:
                self._join_stages()
        except KeyboardInterrupt:
            if self._best is None:
                raise
            interrupted = True
        if self._best is None:
            return None
        try:
            finalists = self._finalists()
        except KeyboardInterrupt:
            interrupted, finalists = True, [self._evaluate.exact(self._best)]
        return SearchResult(
            best=finalists[0],
            first=starts[0] if starts else self._best,
            others=tuple(finalists[1:]),
            closed_form_value=self._best.value,
            num_evaluated=self._evaluate.num_evaluated,
            interrupted=interrupted,
        )

    def first(self) -> PlanCandidate | None:
        """Return the first start that fits, in a fraction of the time of `run`; None if no start fits."""
        for shapes in itertools.chain(self._grids(), self._groups_and_lanes()):
            plan = self._evaluate(shapes)
            if plan is not None:
                self._note(plan)
                return plan
            if self._is_spent():
                break
        return None

    # --- starts

    def _best_starts(self, warm: Iterable[Shapes]) -> list[PlanCandidate]:
        """Return the best few starts; no two have both the same number of pipelines and the same value."""
        best_starts: list[PlanCandidate] = []
        has_many_devices = self._evaluate.costs.cluster.num_ranks > MANY_FOR_BLOCK_MOVES
        by_kind = self._sized_by_kind() if has_many_devices else ()
        starts = itertools.chain(warm, self._nodes_as_stages(), by_kind, self._grids(), self._groups_and_lanes())
        limit_s = self._effort_s * (STARTS_SHARE_OF_MANY if has_many_devices else STARTS_SHARE)
        for shapes in starts:
            self._evaluate.spent_s += START_EFFORT_S_PER_BLOCK * sum(len(shape.blocks) for shape in shapes)
            value_to_beat = best_starts[-1].value if len(best_starts) == KEPT_STARTS else float("inf")
            plan = self._evaluate(shapes, value_to_beat)
            if plan is not None and all(_differs(plan, start) for start in best_starts):
                best_starts = sorted([*best_starts, plan], key=lambda start: start.value)[:KEPT_STARTS]
                self._note(plan)
            if self._spent_s > (limit_s if best_starts else self._effort_s):
                break
        return best_starts

    def _grids(self) -> Iterable[Shapes]:
        """Yield the uniform grids as starts."""
        for _, pipelines in uniform_grids(self._evaluate.costs, self._evaluate.samples, self._sizes):
            yield tuple(Shape(pipeline.blocks, pipeline.micro_batch_size) for pipeline in pipelines)

    def _sized_by_kind(self) -> Iterable[Shapes]:
        """Yield plans whose pipelines have the fastest stage sizes by kind, see `stage_sizes_by_kind`."""
        for inner in self._inners:
            plans = plans_with_sizes_by_kind(self._evaluate.costs, self._evaluate.samples, self._sizes[0], inner)
            for shapes in plans:
                self._evaluate.spent_s += STAGE_SIZES_EFFORT_S * len(set(shapes))
                yield shapes

    def _groups_and_lanes(self) -> Iterable[Shapes]:
        """Yield plans in groups of nodes and in lanes, see `starts`, with every size of micro-batches."""
        for inner in self._inners:
            for pipelines in first_plans(self._pools, inner):
                for size in self._sizes:
                    yield tuple(Shape(blocks, size) for blocks in pipelines)

    def _nodes_as_stages(self) -> Iterable[Shapes]:
        """Yield plans whose stages are whole nodes that share sequences, if a node has devices of several kinds."""
        for pipelines in mixed_nodes(self._evaluate.costs) if "sequence" in self._inners else ():
            self._evaluate.spent_s += JOIN_EFFORT_S
            for size in self._sizes:
                yield tuple(Shape(blocks, size) for blocks in pipelines)

    # --- descent

    def _descend_from_all(self, starts: Sequence[PlanCandidate]) -> None:
        """Descend from every start, then from plans some random moves away, until the effort is spent."""
        for plan in starts:
            self._descend(plan)
            if self._is_spent():
                return
        while starts and not self._is_spent():
            assert self._best is not None
            plans = list(self._best_by_stages.values())
            random_plan = plans[int(self._rng.integers(len(plans)))]
            restart_at = self._best if self._rng.random() < KICK_BEST else random_plan
            self._descend(self._kick(restart_at))

    def _descend(self, plan: PlanCandidate) -> PlanCandidate:
        """Take the first move that helps, and begin again, until no move helps; note the last plan and return it."""
        has_improved = True
        while has_improved and not self._is_spent():
            has_improved = False
            for shapes in self._neighbours(plan):
                candidate = self._evaluate(shapes, plan.value * (1 - LEAST_PLAN_GAIN))
                if candidate is not None and candidate.value < plan.value * (1 - LEAST_PLAN_GAIN):
                    plan, has_improved = candidate, True
                    break
                if self._is_spent():
                    break
        self._note(plan)
        return plan

    def _kick(self, plan: PlanCandidate) -> PlanCandidate:
        """Return a plan some random moves away that is not much worse than the best one."""
        assert self._best is not None
        limit = KICK_LOSS * self._best.value
        for _ in range(int(self._rng.integers(1, KICK_MOVES + 1))):
            neighbours = list(itertools.islice(self._neighbours(plan), MAX_NEIGHBOURS))
            for index in self._rng.permutation(len(neighbours))[:KICK_TRIES].tolist():
                candidate = self._evaluate(neighbours[index], limit)
                if candidate is not None and candidate.value < limit:
                    plan = candidate
                    break
        return plan

    def _neighbours(self, plan: PlanCandidate) -> Iterable[Shapes]:
        """Yield plans one move away, see `neighbouring_plans`."""
        return neighbouring_plans(plan.shapes, self._pools, self._sizes, self._inners, self._rng)

    def _join_stages(self) -> None:
        """Join two stages of the best plan into one that shares sequences, as long as that helps."""
        num_tried, has_improved = 0, True
        while has_improved and num_tried < MAX_JOINS and self._best is not None:
            has_improved = False
            for shapes in itertools.islice(joins(self._evaluate.costs, self._best), MAX_JOINS - num_tried):
                num_tried += 1
                self._evaluate.spent_s += JOIN_EFFORT_S
                candidate = self._evaluate(shapes, self._best.value * (1 - LEAST_PLAN_GAIN))
                if candidate is not None and candidate.value < self._best.value * (1 - LEAST_PLAN_GAIN):
                    self._note(candidate)
                    has_improved = True
                    break

    # --- results

    def _finalists(self) -> list[PlanCandidate]:
        """Return the best plans of different shapes, refined by exact times, best first; fewer to save effort."""
        plans = sorted(self._best_by_stages.values(), key=lambda plan: plan.value)[: self._num_finalists]
        effort_s = FINALISTS_SHARE * self._effort_s
        stop_s = self._evaluate.spent_s + MAX_FINALISTS_EFFORT * effort_s
        finalists = []
        for plan in plans:
            finalists.append(refine_plan(self._evaluate, plan, effort_s / len(plans)))
            if self._evaluate.spent_s > stop_s:
                break
        return sorted(finalists, key=lambda plan: plan.value)

    def _note(self, plan: PlanCandidate) -> None:
        """Keep a plan if it is the best, or the best with its numbers of stages; report a new best plan."""
        num_stages = tuple(sorted(len(shape.blocks) for shape in plan.shapes))
        if num_stages not in self._best_by_stages or plan.value < self._best_by_stages[num_stages].value:
            self._best_by_stages[num_stages] = plan
        if self._best is None or plan.value < self._best.value:
            self._best = plan
            if self._progress is not None:
                self._progress(plan, min(1.0, self._spent_s / self._effort_s))

    @property
    def _spent_s(self) -> float:
        """Effort of this search so far, in estimated seconds."""
        return self._evaluate.spent_s - self._start_s

    def _is_spent(self) -> bool:
        """Whether the search has used up its effort."""
        return self._spent_s >= self._effort_s


def _differs(plan: PlanCandidate, other: PlanCandidate) -> bool:
    """Whether two starts differ in the number of pipelines, or in value by more than `SAME_START`."""
    return len(plan.shapes) != len(other.shapes) or abs(plan.value - other.value) > SAME_START * other.value
