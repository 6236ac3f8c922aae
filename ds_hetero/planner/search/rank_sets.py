"""Sets of ranks that move together: with equal devices every bottleneck is a tie of many, and no single move lowers it.

Dimension key: D ranks, K groups, S sets of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.arrays import Bools, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.problem import Assignment, Problem

# A label with more values than this does not become sets; the second limit is for nodes, groups and single ranks. So
# above 16 ranks no rank moves alone: a round would be thousands of moves. Chosen, never measured.
MAX_SETS, FEW_SETS = 32, 16
_MAX_MAKEUP_TABLE = 4_000_000  # entries of a table of groups by classes; 32 MB; chosen, never measured


def rank_classes(problem: Problem, grouping: Grouping, at: Assignment) -> Ints:
    """Class of every rank, ``[D]``: one class is ranks that do the same work in groups of the same makeup.

    Ranks of one kind with one number of heads do the same work. Where there are too many groups to compare their
    makeups, that alone is the class.
    """
    _, work = np.unique(problem.kind * (problem.num_heads + 1) + at.heads, return_inverse=True)
    num_works = int(work.max()) + 1
    if grouping.num_groups * num_works > _MAX_MAKEUP_TABLE:
        return np.asarray(work)
    entry = grouping.group_of * num_works + work
    makeup = np.bincount(entry, minlength=grouping.num_groups * num_works)  # ranks by group and work
    _, group_class = np.unique(makeup.reshape(-1, num_works), axis=0, return_inverse=True)
    _, rank_class = np.unique(group_class.reshape(-1)[grouping.group_of] * num_works + work, return_inverse=True)
    return np.asarray(rank_class)


def rank_sets(problem: Problem, grouping: Grouping, rank_class: Ints) -> Bools:
    """Ranks to move together: by kind, by class, by node, by group, one by one; as masks ``[S, D]``."""
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
    """The sets of ranks with one value of a label, each once, ``[S, D]``; each label with its limit of values.

    The label 0 0 1 gives the sets {0, 1} and {2}; a label of one value gives none.
    """
    masks = [np.zeros((0, num_ranks), dtype=bool)]
    for label, limit in labels:
        num_values = int(label.max()) + 1
        if 1 < num_values <= limit:
            masks.append(label == np.arange(num_values)[:, None])
    unique = {mask.tobytes(): mask for mask in np.concatenate(masks)}
    return np.array(list(unique.values()), dtype=bool).reshape(-1, num_ranks)
