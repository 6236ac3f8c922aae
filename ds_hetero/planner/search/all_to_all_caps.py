"""Shorten the all-to-all of a start: ranks behind slow links get fewer tokens, ranks on faster links get more.

The closed forms of stage II know speeds but no links, so a fast rank behind a slow link gets many tokens, which all
pass that link.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.shares import cap_shares

_CAP_LEVELS = (0.95, 0.85, 0.75, 0.65, 0.55, 0.45, 0.35)  # caps, as shares of the longest send; chosen, never measured


def cap_all_to_all(problem: Problem, start: Assignment, budget: EvaluationBudget) -> Assignment:
    """Return the best of ``start`` and of assignments in which the longest send is shorter than in ``start``."""
    grouping = problem.grouping(start.groups)
    if grouping.sizes.max() < 2:  # no group has an all-to-all
        return start
    share_D = start.tokens / problem.seq_len
    share_K = grouping.by_group(np.add, share_D)
    send_s_D = _send_s_per_token_and_byte(problem, start.groups, start.heads)
    longest_s = (share_D * send_s_D).max()  # per token of the sequence and byte of a head
    token_speed_D = np.where(start.tokens > 0, problem.token_speed, 0.0)
    options = []
    for level in _CAP_LEVELS:
        cap_D = np.divide(level * longest_s, send_s_D, out=np.full(len(send_s_D), np.inf), where=send_s_D > 0)
        capped_D = cap_shares(share_K, grouping.group_of, token_speed_D, cap_D)
        if capped_D is None:  # the caps of some group sum to less than its share, and lower caps do, too
            break
        options.append((capped_D * problem.seq_len, start.heads))
    num_allowed = budget.rows(grouping, len(options))
    return problem.best(grouping, options[:num_allowed], start.time_s) or start


def _send_s_per_token_and_byte(problem: Problem, groups: Sequence[Ints], heads: Ints) -> Floats:
    """Return the time in which every rank sends a token's heads to the other ranks of its group, ``[D]``.

    The unit is seconds per token, and per byte of a head. Only the slowest link counts: over all nodes of the group,
    the largest number of heads of a rank there, times the seconds per byte to that node. Example: ranks of the other
    node have 4 and 2 heads, so the time is 4 times the seconds per byte between the two nodes.
    """
    send_s = np.zeros(problem.num_ranks)
    for group in groups:
        nodes, node_number = np.unique(problem.node[group], return_inverse=True)
        most_heads = np.zeros(len(nodes))  # of a rank, by node
        np.maximum.at(most_heads, node_number, heads[group].astype(float))
        s_per_byte = problem.inverse_bandwidth[np.ix_(nodes, nodes)]
        send_s[group] = (s_per_byte * most_heads).max(axis=1)[node_number]
    return send_s
