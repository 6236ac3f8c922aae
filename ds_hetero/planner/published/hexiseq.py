"""HexiSeq's Algorithm 1 as its paper describes it, under any cost model.

    stage I    merges ranks into groups along the fastest links first. Every merge gives a partition; the M1 partitions
               with most bandwidth inside groups are kept
    stage II   gives every group a share of the sequence: in proportion to compute, to its square root, or clipped by
               memory, each also with perturbations. The cost model keeps the best M2
    stage III  gives ranks tokens and heads in proportion to compute. Then at most IMAX moves of a few tokens, or of one
               head, from one rank to another of the same or an adjacent group; each must lower the block time
    choice     takes the best of these and of USP, Ulysses and Ring, which are always candidates (section 5.2)

The paper leaves some choices open. Here merging goes on to the end (more candidates can only help), there are two
perturbations of 5 %, a move takes 1/64 of the sequence, and pairs of ranks are tried from the busiest giver down.

Dimension key: D ranks, K groups.
Source: arXiv:2605.07569, sections 4.3 and 5.2.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.model import CostModel
from ds_hetero.errors import PlanError
from ds_hetero.planner.published.interface import PublishedPlanner, no_recurrence
from ds_hetero.planner.published.profile_table import ProfileTable
from ds_hetero.planner.results.candidates import Baselines, ScheduleCandidate, fastest
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.shares import apportion
from ds_hetero.values.schedule import Schedule

M1, M2, IMAX = 64, 16, 100  # most partitions, most assignments that stage III refines, most moves; the paper's values
# Left open by the paper: chosen, never measured alone.
PERTURBATION = 0.05  # largest relative change of a group's share
MOVE_DIVISOR = 64  # a move takes one in so many tokens of the sequence


def algorithm_1(problem: Problem) -> Assignment | None:
    """Return the best assignment of the three stages, without the baselines; None if none fits into memory."""
    candidates: list[Assignment] = []
    for groups in _partitions(problem):
        grouping = problem.grouping(groups)
        for share_K in _group_shares(problem, groups):
            candidate = problem.best(grouping, [_assign(problem, groups, share_K)])
            if candidate is not None:
                candidates.append(candidate)
    candidates.sort(key=lambda candidate: candidate.time_s)
    refined = [_descend(problem, candidate) for candidate in candidates[:M2]]
    return min(refined, key=lambda candidate: candidate.time_s, default=None)


def _partitions(problem: Problem) -> list[list[Ints]]:
    """Stage I: merge ranks along the fastest links, and keep the partitions with most bandwidth inside groups."""
    node, num_ranks = problem.node, problem.num_ranks
    bandwidth = problem.cost.cluster.node_bytes_per_s[np.ix_(node, node)]  # by pair of ranks
    first, second = np.triu_indices(num_ranks, k=1)
    order = np.argsort(-bandwidth[first, second], kind="stable")
    label = np.arange(num_ranks)  # ranks of one group have the same label
    partitions = [list(np.arange(num_ranks)[:, None])]
    for a, b in zip(first[order].tolist(), second[order].tolist(), strict=True):
        if label[a] != label[b]:
            label[label == label[b]] = label[a]
            partitions.append([np.flatnonzero(label == value) for value in dict.fromkeys(label.tolist())])

    def bandwidth_inside(groups: Sequence[Ints]) -> float:
        """Return the mean bandwidth over all pairs of ranks of the same group; infinite if every group is one rank."""
        by_group = [bandwidth[np.ix_(group, group)][np.triu_indices(len(group), k=1)] for group in groups]
        all_pairs = np.concatenate(by_group)
        return float(all_pairs.mean()) if len(all_pairs) else float("inf")

    return sorted(partitions, key=bandwidth_inside, reverse=True)[:M1]


def _group_shares(problem: Problem, groups: Sequence[Ints]) -> Iterator[Floats]:
    """Stage II: yield shares of the sequence by group, ``[K]``, which sum to 1."""
    rng = random.Random(0)
    speed_K = np.array([problem.speed[group].sum() for group in groups])
    memory_K = np.array([len(group) * problem.cost.capacity_bytes_D[group].min() for group in groups])
    by_compute_K = speed_K / speed_K.sum()
    clipped_K = np.minimum(by_compute_K, memory_K / memory_K.sum())
    for base_K in (by_compute_K, np.sqrt(by_compute_K), clipped_K):
        for max_change in (0.0, PERTURBATION, PERTURBATION):
            weight_K = base_K * np.array([1 + rng.uniform(-max_change, max_change) for _ in groups])
            yield weight_K / weight_K.sum()


def _assign(problem: Problem, groups: Sequence[Ints], share_K: Floats) -> tuple[Floats, Ints]:
    """Beginning of stage III: return tokens and heads in proportion to compute inside every group, ``[D]`` each."""
    tokens, heads = np.zeros(problem.num_ranks), np.zeros(problem.num_ranks, dtype=np.int64)
    for group, share in zip(groups, share_K, strict=True):
        tokens[group] = share * problem.seq_len * problem.speed[group] / problem.speed[group].sum()
        heads[group] = apportion(tuple(problem.speed[group].tolist()), problem.num_heads)
    return tokens, heads


def _descend(problem: Problem, start: Assignment) -> Assignment:
    """Stage III: return the assignment after at most `IMAX` moves, each of which lowers the block time."""
    grouping = problem.grouping(start.groups)
    best = start
    for _ in range(IMAX):
        busy_s = best.tokens / problem.token_speed + best.heads * problem.attention_s * problem.seq_len
        busiest_first = np.argsort(-busy_s, kind="stable")
        improved = next(_better_moves(problem, best, grouping.group_of, busiest_first), None)
        if improved is None:
            return best
        best = improved
    return best


def _better_moves(problem: Problem, current: Assignment, group_of: Ints, busiest_first: Ints) -> Iterator[Assignment]:
    """Yield assignments after a move that lowers the block time, in the order in which pairs of ranks are tried.

    Args:
        group_of: ring position of every rank's group, ``[D]``.
        busiest_first: ranks in the order in which they give; they take in the opposite order.
    """
    grouping, num_groups = problem.grouping(current.groups), len(current.groups)
    move_tokens = max(problem.seq_len / MOVE_DIVISOR, float(problem.token_unit))
    for giver in busiest_first:
        for taker in busiest_first[::-1]:
            ring_distance = abs(int(group_of[giver] - group_of[taker]))
            if giver == taker or min(ring_distance, num_groups - ring_distance) > 1:
                continue
            change_D = np.zeros(problem.num_ranks)
            num_tokens = min(move_tokens, current.tokens[giver])
            change_D[giver], change_D[taker] = -num_tokens, num_tokens
            heads_D = current.heads.copy()
            heads_D[giver] -= 1
            heads_D[taker] += 1
            options = [(current.tokens + change_D, current.heads)] if current.tokens[giver] > 0 else []
            options += [(current.tokens, heads_D)] if ring_distance == 0 and heads_D[giver] >= 0 else []
            candidate = problem.best(grouping, options, current.time_s * (1 - 1e-9))
            if candidate is not None:
                yield candidate


def _schedule(cost: CostModel, table: ProfileTable | None = None) -> Schedule:
    """Return the schedule of Algorithm 1, or of a baseline that is as fast.

    Args:
        table: not used; HexiSeq reads no measured times.

    Raises:
        PlanError: no candidate fits into memory.
    """
    problem, rank_of = make_problem(cost)
    assignment = algorithm_1(problem)
    schedules = [] if assignment is None else [schedule_of(problem, assignment, rank_of)]
    planned = [ScheduleCandidate("Algorithm 1", schedule, cost.predict(schedule)) for schedule in schedules]
    best = fastest(planned, Baselines.under(cost).candidates)
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
