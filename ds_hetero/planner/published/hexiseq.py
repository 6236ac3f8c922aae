"""HexiSeq's Algorithm 1 as its text describes it, under any cost model.

    stage I    merge the fastest edges first; a partition after every merge; the best M1 by bandwidth inside groups
    stage II   sequence shares in proportion to compute and to its square root, clipped by memory, each with
               perturbations; the best M2 by the cost model
    stage III  tokens and heads in proportion to compute; then at most Imax moves of a few tokens or one head from one
               rank to another of the same or an adjacent group, each accepted if the block time strictly falls
    choice     the best of these and of USP, Ulysses and Ring, which are always among the candidates (section 5.2)

The paper leaves some choices open. Here no threshold ends the merging (more candidates can only help), there are two
perturbations of 5 %, a move takes 1/64 of the sequence, and pairs are tried from the busiest rank down.

Source: arXiv:2605.07569, sections 4.3 and 5.2.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.model import CostModel
from ds_hetero.errors import PlanError
from ds_hetero.planner.published.interface import ProfileTable, PublishedPlanner, no_recurrence
from ds_hetero.planner.results.candidates import Baselines, ScheduleCandidate, fastest
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.shares import apportion
from ds_hetero.values.schedule import Schedule

M1, M2, IMAX = 64, 16, 100  # partitions and shares that are kept, and moves at most; the paper's
# Left open by the paper: chosen, never measured alone.
PERTURBATION = 0.05
MOVED_SHARE = 64  # the sequence over this is the tokens of one move


def algorithm_1(problem: Problem) -> Assignment | None:
    """Return the best assignment that the three stages find, baselines aside; None if none fits into memory."""
    planned: list[Assignment] = []
    for groups in _partitions(problem):
        grouping = problem.grouping(groups)
        for lengths_K in _group_shares(problem, groups):
            found = problem.best(grouping, [_assign(problem, groups, lengths_K)])
            if found is not None:
                planned.append(found)
    planned.sort(key=lambda found: found.time_s)
    refined = [_descend(problem, found) for found in planned[:M2]]
    return min(refined, key=lambda found: found.time_s, default=None)


def _partitions(problem: Problem) -> list[list[Ints]]:
    """Stage I."""
    node, num_ranks = problem.node, problem.num_ranks
    bandwidth = problem.cost.cluster.node_bytes_per_s[np.ix_(node, node)]
    first, second = np.triu_indices(num_ranks, k=1)
    order = np.argsort(-bandwidth[first, second], kind="stable")
    label = np.arange(num_ranks)
    found = [list(np.arange(num_ranks)[:, None])]
    for a, b in zip(first[order].tolist(), second[order].tolist(), strict=True):
        if label[a] != label[b]:
            label[label == label[b]] = label[a]
            found.append([np.flatnonzero(label == each) for each in dict.fromkeys(label.tolist())])

    def inside(groups: Sequence[Ints]) -> float:
        pairs = [bandwidth[np.ix_(group, group)][np.triu_indices(len(group), k=1)] for group in groups]
        every = np.concatenate(pairs)
        return float(every.mean()) if len(every) else float("inf")

    return sorted(found, key=inside, reverse=True)[:M1]


def _group_shares(problem: Problem, groups: Sequence[Ints]) -> Iterator[Floats]:
    """Stage II: shares of the sequence by group."""
    rng = random.Random(0)
    speed_K = np.array([problem.speed[group].sum() for group in groups])
    memory_K = np.array([len(group) * problem.cost.capacity_bytes_D[group].min() for group in groups])
    by_compute = speed_K / speed_K.sum()
    for seed_K in (by_compute, np.sqrt(by_compute), np.minimum(by_compute, memory_K / memory_K.sum())):
        for spread in (0.0, PERTURBATION, PERTURBATION):
            weight_K = seed_K * np.array([1 + rng.uniform(-spread, spread) for _ in groups])
            yield weight_K / weight_K.sum()


def _assign(problem: Problem, groups: Sequence[Ints], share_K: Floats) -> tuple[Floats, Ints]:
    """Stage III's beginning: tokens and heads in proportion to compute inside every group."""
    tokens, heads = np.zeros(problem.num_ranks), np.zeros(problem.num_ranks, dtype=np.int64)
    for group, share in zip(groups, share_K, strict=True):
        tokens[group] = share * problem.seq_len * problem.speed[group] / problem.speed[group].sum()
        heads[group] = apportion(tuple(problem.speed[group].tolist()), problem.num_heads)
    return tokens, heads


def _descend(problem: Problem, start: Assignment) -> Assignment:
    """Stage III's coordinate descent."""
    grouping = problem.grouping(start.groups)
    best = start
    for _ in range(IMAX):
        busy = best.tokens / problem.token_speed + best.heads * problem.attention_s * problem.seq_len
        donors = np.argsort(-busy, kind="stable")
        improved = next(_better_moves(problem, best, grouping.group_of, donors), None)
        if improved is None:
            return best
        best = improved
    return best


def _better_moves(problem: Problem, at: Assignment, group_of: Ints, donors: Ints) -> Iterator[Assignment]:
    """Moves that strictly lower the block time, in the order in which the descent meets them."""
    grouping, num_groups = problem.grouping(at.groups), len(at.groups)
    budget = max(problem.seq_len / MOVED_SHARE, float(problem.token_unit))
    for giver in donors:
        for taker in donors[::-1]:
            apart = abs(int(group_of[giver] - group_of[taker]))
            if giver == taker or min(apart, num_groups - apart) > 1:
                continue
            step = np.zeros(problem.num_ranks)
            step[giver], step[taker] = -min(budget, at.tokens[giver]), min(budget, at.tokens[giver])
            heads = at.heads.copy()
            heads[giver] -= 1
            heads[taker] += 1
            options = [(at.tokens + step, at.heads)] if at.tokens[giver] > 0 else []
            options += [(at.tokens, heads)] if apart == 0 and heads[giver] >= 0 else []
            found = problem.best(grouping, options, at.time_s * (1 - 1e-9))
            if found is not None:
                yield found


def _schedule(cost: CostModel, table: ProfileTable | None = None) -> Schedule:
    """Algorithm 1 with the baselines among its candidates; predictions are those of the cost model."""
    problem, rank_of = make_problem(cost)
    assignment = algorithm_1(problem)
    schedules = [] if assignment is None else [schedule_of(problem, assignment, rank_of)]
    searched = [ScheduleCandidate("Algorithm 1", schedule, cost.predict(schedule)) for schedule in schedules]
    best = fastest(searched, Baselines.under(cost).candidates)
    if best is None:
        raise PlanError(
            "none of HexiSeq's candidates fits into memory, USP, Ulysses and Ring included. "
            "Use shorter sequences, or another planner."
        )
    return best.schedule


HEXISEQ = PublishedPlanner(
    name="hexiseq",
    title="HexiSeq",
    source="arXiv:2605.07569",
    schedule=_schedule,
    forbids=no_recurrence(
        "its groups trade tokens for heads of softmax attention (section 3.2), and {model} has layers that carry a "
        "state"
    ),
)
