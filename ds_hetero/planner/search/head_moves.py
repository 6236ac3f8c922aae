"""Moves of heads between the ranks of a group; ranks of one class in different groups move alike.

A class is a set of ranks that do the same work in groups of the same makeup, see `rank_classes`. Example: two groups
have a fast rank with 6 heads and a slow rank with 2 each, and the fast ranks end last. They are a class, and the slow
ranks are another one. A move to 5 and 3 heads in one group alone saves no time, since the fast rank of the other group
still ends as late; in both groups it saves some.

Dimension key: D ranks, X moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

import numpy as np

from ds_hetero.common.arrays import Ints, distinct
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.rank_sets import FEW_SETS

FEW_CLASSES = 5  # most loaded classes, and as many least loaded ones, that exchange heads; chosen, never measured
MAX_PAIRED_RANKS = 6  # ranks up to which two moves are made at once; chosen by benchmarks.planner exact --cards

RankOfGroup = dict[int, int]  # one rank of a group, by group


def head_moves(problem: Problem, grouping: Grouping, current: Assignment, rank_class: Ints, paired: bool) -> Ints:
    """Return the heads after every move, ``[X, D]``.

    A move takes a unit of heads from a rank of one class to a rank of another one, in every group that has both
    classes, or in the first such group alone. Other moves take a unit from all ranks of a class, since the slowest rank
    decides when an all-to-all ends.

    Args:
        rank_class: class of every rank, ``[D]``.
        paired: whether two moves are also made at once, if there are few ranks.
    """
    classes = _classes_to_move(problem, current, rank_class)
    changes = [
        *_changes_of_whole_classes(problem, grouping, rank_class, classes),
        *_changes_of_single_ranks(problem, grouping, current, rank_class, classes),
    ]
    if not changes:
        return np.zeros((0, problem.num_ranks), dtype=np.int64)
    change_XD = np.array(changes)
    if paired and problem.num_ranks <= MAX_PAIRED_RANKS:
        i, j = np.triu_indices(len(change_XD), k=1)
        change_XD = distinct(np.concatenate([change_XD, change_XD[i] + change_XD[j]]), axis=0)
    heads_XD = current.heads + change_XD
    return np.asarray(heads_XD[(heads_XD >= 0).all(axis=1)])


def _changes_of_single_ranks(
    problem: Problem, grouping: Grouping, current: Assignment, rank_class: Ints, classes: Sequence[int]
) -> Iterator[Ints]:
    """Yield changes of heads, ``[D]``, in which one rank of a class gives a unit to one rank of another class.

    Within one class the first rank of a group gives to the last one, or takes from it. Heads are divided in the order
    of the group, so this shifts all divisions between the two.

    Args:
        rank_class: class of every rank, ``[D]``.
        classes: classes that give and take.
    """
    first, last = _first_and_last(grouping, rank_class, classes)
    for a, b in product(range(len(classes)), repeat=2):
        taker_of_group = last[b] if a == b else first[b]
        groups = sorted(first[a].keys() & taker_of_group.keys())
        pairs = [(first[a][k], taker_of_group[k]) for k in groups if first[a][k] != taker_of_group[k]]
        directions = [pairs]
        if a == b:
            directions.append([(taker, giver) for giver, taker in pairs])
        # In all groups that have both classes, and in the first of them alone.
        counts = {len(pairs), 1} if pairs else set()
        for unit, count in product(problem.head_units, counts):
            for direction in directions:
                moving_pairs = direction[:count]
                if not moving_pairs:
                    continue
                first_giver, _ = moving_pairs[0]
                if current.heads[first_giver] < unit:
                    continue
                change = np.zeros(problem.num_ranks, dtype=np.int64)
                for giver, taker in moving_pairs:
                    change[giver] -= unit
                    change[taker] += unit
                yield change


def _changes_of_whole_classes(
    problem: Problem, grouping: Grouping, rank_class: Ints, classes: Sequence[int]
) -> Iterator[Ints]:
    """Yield changes of heads, ``[D]``, in which every rank of one class gives a unit to a rank of another class.

    Nothing is yielded if there are many groups: then `_changes_of_single_ranks`, which moves one rank of each,
    suffices.
    """
    num_groups = grouping.num_groups if grouping.num_groups <= FEW_SETS else 0
    ranks_of = [
        [np.flatnonzero((rank_class == c) & (grouping.group_of == k)) for c in classes] for k in range(num_groups)
    ]  # by group and class
    for a, b in permutations(range(len(classes)), 2):
        groups = [(ranks[a], ranks[b]) for ranks in ranks_of if len(ranks[a]) and len(ranks[b])]
        has_several = any(len(givers) > 1 or len(takers) > 1 for givers, takers in groups)
        if not has_several:
            continue
        for unit in problem.head_units:
            change = np.zeros(problem.num_ranks, dtype=np.int64)
            for givers, takers in groups:
                change[givers] -= unit
                taker_of_giver = takers[np.arange(len(givers)) % len(takers)]
                np.add.at(change, taker_of_giver, unit)
            yield change


def _classes_to_move(problem: Problem, current: Assignment, rank_class: Ints) -> list[int]:
    """Return the classes whose attention takes longest and shortest; all classes if there are few."""
    classes, first = np.unique(rank_class, return_index=True)
    if len(classes) <= 2 * FEW_CLASSES:
        return list(classes.tolist())
    attention_s = (current.heads * problem.attention_s)[first]
    by_time = classes[np.argsort(attention_s, kind="stable")].tolist()
    return [*by_time[:FEW_CLASSES], *by_time[-FEW_CLASSES:]]


def _first_and_last(
    grouping: Grouping, rank_class: Ints, classes: Sequence[int]
) -> tuple[list[RankOfGroup], list[RankOfGroup]]:
    """Return the first and the last rank of every class in every group that has the class, by class and group."""
    first: dict[int, RankOfGroup] = {c: {} for c in classes}
    last: dict[int, RankOfGroup] = {c: {} for c in classes}
    class_of, group_of = rank_class.tolist(), grouping.group_of.tolist()
    for rank in grouping.order.tolist():
        c, group = class_of[rank], group_of[rank]
        if c in first:
            first[c].setdefault(group, rank)
            last[c][group] = rank
    return list(first.values()), list(last.values())
