"""Sets of ranks whose tokens move together.

With equal devices many ranks tie for the slowest, and no move of a single rank lowers the maximum: all slowest ranks
have to get fewer tokens in one move.

Dimension key: D ranks, K groups, S sets of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.arrays import Bools, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.problem import Assignment, Problem

# Most values of a label (kind, class, node, ...) from which sets are made; `FEW_SETS` is the limit for nodes, groups
# and single ranks. So with more than 16 ranks no rank moves alone: a round would be thousands of moves. Chosen, never
# measured.
MAX_SETS, FEW_SETS = 32, 16
_MAX_MAKEUP_TABLE = 4_000_000  # entries of a table of groups by classes, 32 MB; chosen, never measured


def rank_classes(problem: Problem, grouping: Grouping, current: Assignment) -> Ints:
    """Return the class of every rank, ``[D]``: ranks that do the same work in groups of the same makeup.

    Ranks do the same work if they have the same kind and number of heads. The makeup of a group is its number of ranks
    for every work. With too many groups to compare their makeups, the work alone is the class. Example: groups of a
    fast and a slow rank, a fast and a slow rank, and two slow ranks, all with 4 heads: three classes, which are the
    fast ranks, the slow ranks of the first two groups, and those of the last group.
    """
    _, work = np.unique(problem.kind * (problem.num_heads + 1) + current.heads, return_inverse=True)
    num_works = int(work.max()) + 1
    if grouping.num_groups * num_works > _MAX_MAKEUP_TABLE:
        return np.asarray(work)
    entry = grouping.group_of * num_works + work
    makeup = np.bincount(entry, minlength=grouping.num_groups * num_works)  # ranks by group and work
    _, group_class = np.unique(makeup.reshape(-1, num_works), axis=0, return_inverse=True)
    _, rank_class = np.unique(group_class.reshape(-1)[grouping.group_of] * num_works + work, return_inverse=True)
    return np.asarray(rank_class)


def rank_sets(problem: Problem, grouping: Grouping, rank_class: Ints) -> Bools:
    """Return sets of ranks to move together, by kind, class, node, group and one by one, as masks ``[S, D]``."""
    single = np.arange(problem.num_ranks)
    labels = (
        (problem.kind, MAX_SETS),
        (rank_class, MAX_SETS),
        (problem.node, FEW_SETS),
        (grouping.group_of, FEW_SETS),
        (single, FEW_SETS),
    )
    return sets_of_labels(labels, problem.num_ranks)


def sets_of_labels(labels: Sequence[tuple[Ints, int]], num_ranks: int) -> Bools:
    """Return the sets of ranks that have the same value of a label, each set once, as masks ``[S, D]``.

    The label 0 0 1 gives the sets {0, 1} and {2}; a label with a single value gives no set.

    Args:
        labels: labels, ``[D]``, each with a limit; a label with more different values than its limit gives no set.
    """
    masks = [np.zeros((0, num_ranks), dtype=bool)]
    for label, limit in labels:
        num_values = int(label.max()) + 1
        if 1 < num_values <= limit:
            masks.append(label == np.arange(num_values)[:, None])
    unique = {mask.tobytes(): mask for mask in np.concatenate(masks)}
    return np.array(list(unique.values()), dtype=bool).reshape(-1, num_ranks)
