"""Last changes that make a schedule plainer and cost no time: by rank, what is alike gets alike.

A descent ends wherever no move saves time: equal ranks may differ then, or a slow rank have more than a fast one.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.planner.search.problem import Assignment, Problem

LEAST_TIME = 1e-5  # of the time, that equal shares of equal ranks may cost; chosen, never measured


def trade_places(problem: Problem, start: Assignment) -> Assignment:
    """Let two ranks of a node trade places where the slower one has more of both tokens and attention work.

    Their links are the same, so the trade never costs time.
    """
    best = start
    speeds_3D = np.stack([problem.speed, problem.token_speed, problem.cost.capacity_bytes_D])
    is_no_faster_DD = (speeds_3D[:, :, None] <= speeds_3D[:, None]).all(axis=0)  # the first than the second
    is_on_one_node_DD = problem.node[:, None] == problem.node
    is_other_kind_DD = problem.kind[:, None] != problem.kind
    slower, faster = np.nonzero(is_on_one_node_DD & is_no_faster_DD & is_other_kind_DD)
    for slow, fast in zip(slower.tolist(), faster.tolist(), strict=True):
        length_K = np.array([best.tokens[group].sum() for group in best.groups])
        group_of = problem.grouping(best.groups).group_of
        attention_work = best.heads * length_K[group_of]
        if best.tokens[slow] < best.tokens[fast] or attention_work[slow] < attention_work[fast]:
            continue
        place = np.arange(problem.num_ranks)
        place[[slow, fast]] = fast, slow
        groups = [place[group] for group in best.groups]
        option = (best.tokens[place], best.heads[place])
        best = problem.best(problem.grouping(groups), [option], best.time_s * (1 + LEAST_TIME)) or best
    return best


def share_equally(problem: Problem, start: Assignment) -> Assignment:
    """Equal tokens for ranks that are equal in everything else, unless that costs time."""
    grouping = problem.grouping(start.groups)
    has_tokens = start.tokens > 0
    labels = np.stack([problem.kind, problem.node, grouping.group_of, start.heads, has_tokens], axis=1)
    _, label = np.unique(labels, axis=0, return_inverse=True)
    label = label.reshape(-1)
    mean_tokens = np.bincount(label, weights=start.tokens) / np.bincount(label)  # by label
    option = (mean_tokens[label], start.heads)
    return problem.best(grouping, [option], start.time_s * (1 + LEAST_TIME)) or start
