"""Make a schedule plainer at no cost in time: equal ranks get equal shares, slow ranks no more than fast ones.

A descent ends where no move saves time. There equal ranks may still have different shares, or a slow rank may have more
than a fast one of the same node, although neither saves time. Users would ask why.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.planner.search.problem import Assignment, Problem

MAX_PLAINER_LOSS = 1e-5  # relative loss of time that plainer shares may cost; chosen, never measured


def trade_places(problem: Problem, start: Assignment) -> Assignment:
    """Swap two ranks of a node if the slower one has at least as many tokens and as much attention work.

    Both have the same links, so the swap should cost no time; `problem.best` checks it.
    """
    best = start
    speeds_3D = np.stack([problem.speed, problem.token_speed, problem.cost.capacity_bytes_D])
    is_no_faster_DD = (speeds_3D[:, :, None] <= speeds_3D[:, None]).all(axis=0)  # [i, j]: rank i is no faster than j
    is_on_one_node_DD = problem.node[:, None] == problem.node
    is_other_kind_DD = problem.kind[:, None] != problem.kind
    slower, faster = np.nonzero(is_on_one_node_DD & is_no_faster_DD & is_other_kind_DD)
    for slow, fast in zip(slower.tolist(), faster.tolist(), strict=True):
        length_K = np.array([best.tokens[group].sum() for group in best.groups])
        group_of = problem.grouping(best.groups).group_of
        attention_work = best.heads * length_K[group_of]
        if best.tokens[slow] < best.tokens[fast] or attention_work[slow] < attention_work[fast]:
            continue
        swapped = np.arange(problem.num_ranks)  # every rank, but the two have each other's number
        swapped[[slow, fast]] = fast, slow
        groups = [swapped[group] for group in best.groups]
        option = (best.tokens[swapped], best.heads[swapped])
        best = problem.best(problem.grouping(groups), [option], best.time_s * (1 + MAX_PLAINER_LOSS)) or best
    return best


def share_equally(problem: Problem, start: Assignment) -> Assignment:
    """Give ranks of the same kind, node, group and number of heads the mean of their tokens, unless that costs time.

    Ranks without tokens stay without tokens.
    """
    grouping = problem.grouping(start.groups)
    has_tokens = start.tokens > 0
    properties = np.stack([problem.kind, problem.node, grouping.group_of, start.heads, has_tokens], axis=1)
    _, label = np.unique(properties, axis=0, return_inverse=True)
    label = label.reshape(-1)  # ranks that are equal in all properties have the same label
    mean_tokens = np.bincount(label, weights=start.tokens) / np.bincount(label)  # by label
    option = (mean_tokens[label], start.heads)
    return problem.best(grouping, [option], start.time_s * (1 + MAX_PLAINER_LOSS)) or start
