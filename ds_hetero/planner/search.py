"""The search itself: HexiSeq's three stages with its budgets, over the starts that a descent alone does not find.

    stage I    partitions into groups                       groupings.py
    stage II   heads by apportionment, tokens by closed forms, best M2 partitions kept
    stage III  ring orders, caps against a slow all-to-all, then descent      descent.py

Every evaluation is a call of the cost model; nothing here looks at a clock, and ties go to the earlier candidate.
Source: HexiSeq (arXiv:2605.07569), section 4.3 and Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from ds_hetero.planner.descent import STEPS, descend
from ds_hetero.planner.exhaustive import compositions, sweep
from ds_hetero.planner.groupings import M1, active_sets, groupings, neighbours, with_idle
from ds_hetero.planner.problem import Assignment, Problem
from ds_hetero.planner.ring_order import ring_orders
from ds_hetero.planner.shares import apportion, cap_shares, fill_groups, fill_ranks

__all__ = ["search"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

M1_IDLE = 12  # partitions tried where some ranks stay idle
M2 = 16  # group-level plans refined by stage III, HexiSeq's value
SMALL = 5  # ranks up to which every partition is tried
SMALL_UNITS = (0, 1, 64, 48, 24, 12)  # into how many units tokens are cut for that, by number of ranks
SMALL_KEPT = 8
REGROUP = 32  # ranks up to which ranks change groups one by one
REGROUP_ROUNDS = 4
# How many plans descend with which steps, and how much worse than the best one they may be.
STAGES = ((M2, 1.3, STEPS[:2]), (6, 1.1, STEPS[1:4]), (2, 1.03, STEPS))


def search(problem: Problem) -> list[Assignment]:
    """The best assignments found, best first, at most one per partition."""
    best = [_cap_all_to_all(problem, _reorder(problem, start, thorough=True)) for start in _best(_starts(problem), M2)]
    for keep, worse, steps in STAGES:
        best = _best(best, keep, worse)
        if steps is STEPS and problem.num_ranks <= REGROUP:
            best = [_regroup(problem, found) for found in best]
        best = [descend(problem, found, steps) for found in best]
    if problem.coarse and problem.num_ranks <= SMALL:
        small = _small_starts(problem, min((found.block_s for found in best), default=np.inf))
        best += [descend(problem, found, STEPS[2:]) for found in _best(small, SMALL_KEPT)]
    return _best(best, M2)


# --- stages I and II ----------------------------------------------------------------------------------


def _starts(problem: Problem) -> list[Assignment]:
    """Assignments of all partitions of stage I, for every set of working ranks that could still win.

    Fewer working ranks need at least the balanced time over their own speeds, which rules most sets out where links are fast.
    """
    found: list[Assignment] = []
    least = np.inf
    for active in active_sets(problem):
        idle = not active.all()
        if problem.cost.bound_s * problem.speed.sum() / problem.speed[active].sum() >= least:
            continue
        for groups in groupings(problem, active, M1_IDLE if idle else M1):
            assignment = best_assignment(problem, with_idle(problem, groups, active), active)
            if assignment is not None:
                found.append(assignment)
                least = min(least, assignment.block_s)
    return found


def _small_starts(problem: Problem, bound_s: float) -> list[Assignment]:
    """Small clusters: all partitions and ring orders with coarse tokens and the heads next to the apportioned ones."""
    units = SMALL_UNITS[problem.num_ranks]
    if problem.coarse:
        units = min(units, problem.seq_len // problem.token_unit)
    tokens_TD = problem.round(compositions(units, problem.num_ranks) * (problem.seq_len / units))
    found = sweep(problem, tokens_TD, lambda blocks: _likely_heads(problem, blocks), bound_s, slack=0.02)
    return found.best


def _likely_heads(problem: Problem, blocks: list[list[int]]) -> Ints:
    """Apportioned heads of all sets of working ranks, and all that differ from one by a move or two, ``[H, D]``."""
    groups = [np.array(block) for block in blocks]
    starts = []
    for active in active_sets(problem):
        if all(active[group].any() for group in groups):
            starts += [spread_heads(problem, groups, active, unit) for unit in problem.head_units]
    moves = [np.zeros(problem.num_ranks, dtype=np.int64)]
    for group in groups:
        for a, b in permutations(group.tolist(), 2):
            for unit in problem.head_units:
                move = np.zeros(problem.num_ranks, dtype=np.int64)
                move[a], move[b] = -unit, unit
                moves.append(move)
    moves_XD = np.array(moves)
    moves_XD = np.unique((moves_XD[:, None] + moves_XD[None]).reshape(-1, problem.num_ranks), axis=0)
    heads_HD = np.unique((np.array(starts)[:, None] + moves_XD[None]).reshape(-1, problem.num_ranks), axis=0)
    return np.asarray(heads_HD[(heads_HD >= 0).all(axis=1)])


def best_assignment(problem: Problem, groups: Sequence[Ints], active: Mask) -> Assignment | None:
    """Stage II for one partition: heads and tokens by closed forms, the best by the cost model; None if a group is idle."""
    if not all(active[group].any() for group in groups):
        return None
    grouping = problem.grouping(groups)
    token_speed = np.where(active, problem.token_speed, 0.0)
    tokens, heads = [], []
    for unit in problem.head_units:
        heads_D = spread_heads(problem, groups, active, unit)
        attention_speed_K = 1 / grouping.by_group(np.maximum, heads_D * problem.attention_s)
        token_speed_K = grouping.by_group(np.add, token_speed)
        for share_K in fill_groups(token_speed_K, attention_speed_K):
            share = fill_ranks(share_K, grouping.group_of, token_speed)
            assert share is not None
            tokens.append(share)
            heads.append(heads_D)
    tokens_BD = problem.round(np.array(tokens) * problem.seq_len)
    row, block_s = problem.best(grouping, tokens_BD, np.array(heads))
    if row < 0:
        return None
    return _reorder(problem, Assignment(block_s, tuple(groups), tokens_BD[row], heads[row]), thorough=False)


def spread_heads(problem: Problem, groups: Sequence[Ints], active: Mask, unit: int) -> Ints:
    """Heads of every rank, in multiples of ``unit``: within each group the slowest finishes as early as it can."""
    heads = np.zeros(problem.num_ranks, dtype=np.int64)
    speed = np.where(active, problem.speed, 0.0)
    for group in groups:
        heads[group] = apportion(tuple(speed[group].tolist()), problem.num_heads // unit)
    return heads * unit


def _best(found: Iterable[Assignment], keep: int, worse: float = np.inf) -> list[Assignment]:
    """The ``keep`` best, one per partition, at most ``worse`` times as slow as the best of all."""
    best: dict[bytes, Assignment] = {}
    for f in sorted(found, key=lambda f: f.block_s):
        best.setdefault(b"|".join(sorted(group.tobytes() for group in f.groups)), f)
    kept = list(best.values())[:keep]
    return [f for f in kept if f.block_s <= worse * kept[0].block_s]


# --- stage III ----------------------------------------------------------------------------------------


def _regroup(problem: Problem, start: Assignment) -> Assignment:
    """Descent over partitions: the best neighbour with its own closed forms, as long as that gets better."""
    best = start
    for _ in range(REGROUP_ROUNDS):
        active = best.tokens > 0
        options = [best_assignment(problem, groups, active) for groups in neighbours(problem, best.groups)]
        options = [descend(problem, option, STEPS[1:3]) for option in _best(filter(None, options), 2)]
        option = min(options, key=lambda found: found.block_s, default=best)
        if option.block_s >= best.block_s * (1 - 1e-6):
            break
        best = option
    return best


def _reorder(problem: Problem, start: Assignment, thorough: bool) -> Assignment:
    best = start
    for groups in ring_orders(problem, start.groups, thorough):
        row, block_s = problem.best(problem.grouping(groups), start.tokens[None], start.heads[None], best.block_s * (1 - 1e-9))
        if row >= 0:
            best = Assignment(block_s, tuple(groups), start.tokens, start.heads)
    return best


def _cap_all_to_all(problem: Problem, start: Assignment) -> Assignment:
    """Try to shorten the all-to-all: bound what a rank sends, and let ranks on faster links carry its tokens."""
    if max(len(group) for group in start.groups) < 2:
        return start
    grouping = problem.grouping(start.groups)
    share = start.tokens / problem.seq_len
    share_K = grouping.by_group(np.add, share)
    seconds = send_seconds(problem, start.groups, start.heads)
    load = share * seconds
    token_speed = np.where(start.tokens > 0, problem.token_speed, 0.0)
    tokens = []
    for level in (0.95, 0.85, 0.75, 0.65, 0.55, 0.45, 0.35):
        cap = np.divide(level * load.max(), seconds, out=np.full(len(seconds), np.inf), where=seconds > 0)
        capped = cap_shares(share_K, grouping.group_of, token_speed, cap)
        if capped is None:
            break
        tokens.append(capped)
    if not tokens:
        return start
    tokens_BD = problem.round(np.array(tokens) * problem.seq_len)
    row, block_s = problem.best(grouping, tokens_BD, np.broadcast_to(start.heads, tokens_BD.shape), start.block_s)
    return Assignment(block_s, start.groups, tokens_BD[row], start.heads) if row >= 0 else start


def send_seconds(problem: Problem, groups: Sequence[Ints], heads: Ints) -> Floats:
    """How long each rank would send its group's heads per token and byte: the worst of its links, by node."""
    seconds = np.zeros(problem.num_ranks)
    for group in groups:
        node = problem.node[group]
        present, where = np.unique(node, return_inverse=True)
        most = np.zeros(len(present))
        np.maximum.at(most, where, heads[group].astype(float))
        to = problem.inverse_bandwidth[np.ix_(present, present)] * most
        seconds[group] = to.max(axis=1)[where]
    return seconds
