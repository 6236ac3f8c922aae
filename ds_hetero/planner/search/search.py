"""The search: HexiSeq's three stages with its budgets, over the starts that a descent alone does not find.

    stage I    partitions into groups                                 partitions.py
    stage II   heads by apportionment, tokens by closed forms         closed_forms.py, shares.py
    stage III  ring orders, caps against a slow all-to-all, descent   closed_forms.py, proposals.py

Every evaluation is a call of the cost model, counted against an `EvaluationBudget`. Nothing reads a clock, and ties go
to the earlier candidate. Source: HexiSeq (arXiv:2605.07569), section 4.3 and Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.planner.search.closed_forms import M1_IDLE, best_assignment, best_order, has_room, of_partitions, starts
from ds_hetero.planner.search.partitions import active_sets, neighbours
from ds_hetero.planner.search.problem import (
    EXHAUSTIVE_RANKS,
    FEW_RANKS,
    THOROUGH_RANKS,
    Assignment,
    EvaluationBudget,
    Problem,
    Shortlist,
    best_of,
    working,
)
from ds_hetero.planner.search.proposals import STEPS, descend, in_all_directions, round_to_units
from ds_hetero.planner.search.shares import cap_shares

M2 = 16  # plans refined by stage III, HexiSeq's value
# Stage III: how many plans go on, how much slower than the best they may be, and the steps they descend with. Of a node
# or two of unlike cards, many starts are as good as each other: what a few of them save, the last ones may use.
SLOWEST_START = 1.4
STAGES = ((M2, 1.25, STEPS[:2]), (6, 1.1, STEPS[1:4]), (2, 1.03, STEPS))
FEW_STAGES = ((6, 1.15, STEPS[:2]), (3, 1.05, STEPS[1:4]), (1, 1.0, STEPS))
THOROUGH_STAGES = ((2 * M2, 1.4, STEPS[:2]), (M2, 1.25, STEPS[1:4]), (6, 1.1, STEPS))
FINE_STEPS = (1e-3, 3e-4, 1e-4)  # of the last descent, from the best assignment
REGROUP = 32  # ranks up to which ranks change groups one by one
REGROUP_ROUNDS = 4
LAST = 2  # assignments that a last descent starts from
MOST_SETS = 12  # of working ranks that are tried once more, those of the best bounds
TIDY = 1e-5  # relative time that equal shares of equal ranks may cost
AT_FLOOR = 1.0005  # this close to what no schedule can undercut there is nothing to gain


def search(problem: Problem, budget: EvaluationBudget | None = None) -> list[Assignment]:
    """The best assignments, best first, one per partition of the working ranks; none if nothing fits."""
    if not has_room(problem.cost):
        return []
    budget = budget or EvaluationBudget.for_ranks(problem.num_ranks)
    stages = _stages(problem.num_ranks)
    best = starts(problem, budget.split(3), Shortlist(stages[0][0], SLOWEST_START))
    if best and best[0].time_s <= AT_FLOOR * problem.floor_s:
        return [in_all_directions(problem, best[0]), *best[1:]]
    refining = budget.split(6)
    best = [_cap_all_to_all(problem, best_order(problem, start, refining, thorough=True), refining) for start in best]
    passed: list[Assignment] = []
    for left, (keep, slower, steps) in zip((3, 2, 1), stages, strict=True):
        best = best_of(best, keep, slower)
        stage = budget.split(left)
        if left == 1 and problem.num_ranks <= REGROUP:
            best = [_regroup(problem, start, stage.split(2 * len(best))) for start in best]
        best = [descend(problem, start, steps, stage.split(len(best) - i)) for i, start in enumerate(best)]
        passed += best
    best = [_reorder(problem, start, EvaluationBudget.for_ranks(problem.num_ranks).split(M2)) for start in best]
    if problem.coarse and problem.num_ranks <= EXHAUSTIVE_RANKS:
        best = best_of([*best, *_from_whole_tokens(problem)], M2)
    best = _with_other_ranks(problem, best)
    best = [*_once_more(problem, best), *best]
    best = best_of([_tidy(problem, _trade(problem, start)) for start in best], M2)
    if best:
        budget = EvaluationBudget.for_ranks(problem.num_ranks).split(M2)
        best[0] = descend(problem, in_all_directions(problem, best[0]), FINE_STEPS, budget)
    refined = {working(f) for f in best}
    return [*best, *(f for f in best_of(passed, M2) if working(f) not in refined)][:M2]


def first_look(problem: Problem, budget: EvaluationBudget) -> Assignment | None:
    """Return the best start after a short descent, if anything fits; `search` improves on it, in little of its time."""
    if not has_room(problem.cost):
        return None
    best = starts(problem, budget.split(2), Shortlist(1))
    return descend(problem, best[0], FEW_STAGES[0][-1], budget) if best else None


def _stages(num_ranks: int) -> tuple[tuple[int, float, tuple[float, ...]], ...]:
    if num_ranks <= THOROUGH_RANKS:
        return THOROUGH_STAGES
    return FEW_STAGES if num_ranks <= FEW_RANKS else STAGES


def _with_other_ranks(problem: Problem, found: list[Assignment]) -> list[Assignment]:
    """Put first what is faster than all that was found because other ranks work in it, if there is such.

    Stage I shares one small budget among all sets of working ranks: where links are slow, many of them could win, and
    most are not looked at. Here each has a part of a budget of its own, and so have those that work in the best one.
    """
    if not found or not EXHAUSTIVE_RANKS < problem.num_ranks <= REGROUP:
        return found
    best = min(found, key=lambda each: each.time_s)
    for _ in range(REGROUP_ROUNDS):
        start = _start_of_other_ranks(problem, best)
        if start is None:
            break
        budget = EvaluationBudget.for_ranks(problem.num_ranks)
        start = _regroup(problem, start, budget.split(2))
        best = descend(problem, start, STEPS, budget)
        found = [best, *found]
    return found


def _start_of_other_ranks(problem: Problem, best: Assignment) -> Assignment | None:
    """The fastest start of sets of working ranks that were not looked at whole, if it is faster than ``best``."""
    left = [active for active in (best.tokens > 0, *active_sets(problem)) if active.tobytes() not in problem.looked_at]
    sets = sorted((active for active in left if problem.bound_s(active) < best.time_s), key=problem.bound_s)[:MOST_SETS]
    to_beat = best._replace(time_s=best.time_s * (1 - TIDY))
    budget, shortlist = EvaluationBudget.for_ranks(problem.num_ranks), Shortlist(1)
    shortlist.add(to_beat)
    for i, active in enumerate(sets):
        of_set = budget.split(len(sets) - i)
        for _ in of_partitions(problem, active, M1_IDLE, of_set, shortlist):
            pass
        budget.left_s += of_set.left_s
    (start,) = shortlist.best
    return None if start is to_beat else start


def _once_more(problem: Problem, found: list[Assignment]) -> Iterator[Assignment]:
    """Descents from the best with a budget of their own: a stage's is spent on tokens before heads of kinds move."""
    for start in best_of(found, LAST):
        yield descend(problem, start, STEPS[1:4], EvaluationBudget.for_ranks(problem.num_ranks).split(LAST))


def _from_whole_tokens(problem: Problem) -> Iterator[Assignment]:
    """The results of a search in single tokens, rounded: coarse units hide good partitions from a search."""
    fine = replace(problem, token_unit=1)
    for start in search(fine) if not fine.coarse else []:
        rounded = round_to_units(problem, start)
        if rounded is not None:
            yield descend(problem, rounded, STEPS[3:], EvaluationBudget.for_ranks(problem.num_ranks).split(M2))


def _reorder(problem: Problem, start: Assignment, budget: EvaluationBudget) -> Assignment:
    """Another ring order where that has become better since stage II, and a descent from there."""
    ordered = best_order(problem, start, budget, thorough=True)
    return start if ordered is start else descend(problem, ordered, STEPS[2:], budget)


def _trade(problem: Problem, start: Assignment) -> Assignment:
    """Let two ranks of a node trade places where the slower one has more of both tokens and attention work.

    Their links are the same, so the trade never costs time.
    """
    cost, best = problem.cost, start
    speeds = np.stack([problem.speed, problem.token_speed, cost.capacity_bytes_D])
    lesser, greater = np.nonzero(
        (problem.node[:, None] == problem.node)
        & (speeds[:, :, None] <= speeds[:, None]).all(axis=0)
        & (problem.kind[:, None] != problem.kind)
    )
    for slow, fast in zip(lesser.tolist(), greater.tolist(), strict=True):
        length_K = [best.tokens[group].sum() for group in best.groups]
        group_of = problem.grouping(best.groups).group_of
        work = best.heads * np.array(length_K)[group_of]
        if best.tokens[slow] < best.tokens[fast] or work[slow] < work[fast]:
            continue
        place = np.arange(problem.num_ranks)
        place[[slow, fast]] = fast, slow
        groups = [place[group] for group in best.groups]
        option = (best.tokens[place], best.heads[place])
        best = problem.best(problem.grouping(groups), [option], best.time_s * (1 + TIDY)) or best
    return best


def _tidy(problem: Problem, start: Assignment) -> Assignment:
    """Equal tokens for ranks that are equal in everything else, unless that costs time."""
    grouping = problem.grouping(start.groups)
    labels = np.stack([problem.kind, problem.node, grouping.group_of, start.heads, start.tokens > 0], axis=1)
    _, label = np.unique(labels, axis=0, return_inverse=True)
    label = label.reshape(-1)
    mean = np.bincount(label, weights=start.tokens) / np.bincount(label)
    return problem.best(grouping, [(mean[label], start.heads)], start.time_s * (1 + TIDY)) or start


def _cap_all_to_all(problem: Problem, start: Assignment, budget: EvaluationBudget) -> Assignment:
    """Try to shorten the all-to-all: bound what a rank sends, and let ranks on faster links carry its tokens."""
    grouping = problem.grouping(start.groups)
    if grouping.sizes.max() < 2:
        return start
    share = start.tokens / problem.seq_len
    seconds = _send_seconds(problem, start.groups, start.heads)
    load = share * seconds
    token_speed = np.where(start.tokens > 0, problem.token_speed, 0.0)
    options = []
    for level in (0.95, 0.85, 0.75, 0.65, 0.55, 0.45, 0.35):
        cap = np.divide(level * load.max(), seconds, out=np.full(len(seconds), np.inf), where=seconds > 0)
        capped = cap_shares(grouping.by_group(np.add, share), grouping.group_of, token_speed, cap)
        if capped is None:
            break
        options.append((capped * problem.seq_len, start.heads))
    return problem.best(grouping, options[: budget.rows(grouping, len(options))], start.time_s) or start


def _send_seconds(problem: Problem, groups: Sequence[Ints], heads: Ints) -> Floats:
    """How long each rank would send its group's heads per token and byte: the worst of its links, by node."""
    seconds = np.zeros(problem.num_ranks)
    for group in groups:
        present, where = np.unique(problem.node[group], return_inverse=True)
        most = np.zeros(len(present))
        np.maximum.at(most, where, heads[group].astype(float))
        seconds[group] = (problem.inverse_bandwidth[np.ix_(present, present)] * most).max(axis=1)[where]
    return seconds


def _regroup(problem: Problem, start: Assignment, budget: EvaluationBudget) -> Assignment:
    """Descent over partitions: the best neighbour with its own closed forms, as long as that gets better."""
    best = start
    for _ in range(REGROUP_ROUNDS):
        active = best.tokens > 0
        options = Shortlist(2, 1.1)
        for groups in neighbours(problem, best.groups):
            assignment = best_assignment(problem, groups, active, budget, options.limit_s)
            if assignment is not None:
                options.add(assignment)
        near = [descend(problem, f, STEPS[1:3], budget.split(4)) for f in options.best]
        option = min(near, key=lambda f: f.time_s, default=best)
        if option.time_s >= best.time_s * (1 - 1e-6):
            break
        best = option
    return best
