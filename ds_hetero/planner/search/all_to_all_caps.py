"""Starts with a shorter all-to-all: ranks behind slow links send less, ranks on faster links carry their tokens.

Closed forms know speeds and no links; where an exchange is slow, they give every rank tokens by its speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.shares import cap_shares

_LEVELS = (0.95, 0.85, 0.75, 0.65, 0.55, 0.45, 0.35)  # of the longest sending; chosen, never measured


def cap_all_to_all(problem: Problem, start: Assignment, budget: EvaluationBudget) -> Assignment:
    """The best of ``start`` and of assignments in which no rank sends longer than a share of the longest."""
    grouping = problem.grouping(start.groups)
    if grouping.sizes.max() < 2:  # nobody exchanges
        return start
    share = start.tokens / problem.seq_len
    share_K = grouping.by_group(np.add, share)
    send_s = _send_s_per_token_and_byte(problem, start.groups, start.heads)
    longest = (share * send_s).max()
    token_speed = np.where(start.tokens > 0, problem.token_speed, 0.0)
    options = []
    for level in _LEVELS:
        cap = np.divide(level * longest, send_s, out=np.full(len(send_s), np.inf), where=send_s > 0)
        capped = cap_shares(share_K, grouping.group_of, token_speed, cap)
        if capped is None:  # some group cannot hold its share, nor can it at lower levels
            break
        options.append((capped * problem.seq_len, start.heads))
    allowed = budget.rows(grouping, len(options))
    return problem.best(grouping, options[:allowed], start.time_s) or start


def _send_s_per_token_and_byte(problem: Problem, groups: Sequence[Ints], heads: Ints) -> Floats:
    """How long each rank would send its group's heads, ``[D]``: the worst of its links, by node.

    Two nodes, of which the other one's ranks have 4 and 2 heads: 4 times the seconds per byte between the two.
    """
    send_s = np.zeros(problem.num_ranks)
    for group in groups:
        nodes, node_number = np.unique(problem.node[group], return_inverse=True)
        most_heads = np.zeros(len(nodes))  # of a rank, by node
        np.maximum.at(most_heads, node_number, heads[group].astype(float))
        s_per_byte = problem.inverse_bandwidth[np.ix_(nodes, nodes)]
        send_s[group] = (s_per_byte * most_heads).max(axis=1)[node_number]
    return send_s
