"""Tokens with which an assignment fits into memory, and what would fit when nothing does.

Memory grows with a rank's own tokens (activations of every layer) and with its heads of its group's tokens (attention
of one layer); moving tokens from full ranks to ranks with room mends both.

Dimension key: D ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.shares import apportion

# Of moving tokens; memory is piecewise linear in them, and few rounds are used. Chosen, never measured.
_FIT_ROUNDS = 30
_FILLED_SHARE = 0.999  # of a rank's room, so that rounding to whole tokens still fits; chosen, never measured
_SLOPE_STEP = 1e-6  # of the sequence: tokens that are moved to see how memory grows
_LENGTH_ERROR = 50  # a longest sequence is found to within one part in so many


def fit_memory(cost: CostModel, grouping: Grouping, tokens: Floats, heads: Ints) -> Floats | None:
    """Tokens near the given ones with which every rank fits; None if there are none.

    Full ranks give what they cannot hold to the others, in proportion to their room. A rank's memory grows with its own
    tokens and with those of its group; the first slope says what it can hold while the second stands still, and
    where tokens change their group it is computed again.
    """
    total = tokens.sum()
    has_work = tokens > 0
    heads_of_both = np.stack([heads, heads])
    direction = _swap_within_groups(grouping)
    for _ in range(_FIT_ROUNDS):
        step = tokens.sum() * _SLOPE_STEP * direction
        need, need_after_step = cost.memory_bytes(grouping, np.stack([tokens, tokens + step]), heads_of_both)
        if (need <= cost.capacity_bytes_D).all():
            return tokens
        bytes_per_token = np.maximum((need_after_step - need) / step, 1.0)
        spare_tokens = _FILLED_SHARE * (cost.capacity_bytes_D - need) / bytes_per_token
        most_tokens = np.where(has_work, np.maximum(tokens + spare_tokens, 0.0), 0.0)
        kept = np.minimum(tokens, most_tokens)
        room = most_tokens - kept
        homeless = total - kept.sum()
        if room.sum() < homeless:
            return None
        tokens = kept + room * (homeless / room.sum())
    return None


def _swap_within_groups(grouping: Grouping) -> Floats:
    """Tokens that half of a group's ranks give to the other half, ``[D]``, so that its length stays.

    What a small step in this direction needs is the slope of every rank's memory in its own tokens. In a group of
    three ranks: -1, +0.5, +0.5.
    """
    place = np.empty_like(grouping.order)  # of every rank in its group
    place[grouping.order] = np.arange(len(place)) - np.repeat(grouping.offsets[:-1], grouping.sizes)
    size = grouping.sizes[grouping.group_of]
    num_givers = size // 2
    return np.where(place < num_givers, -1.0 / np.maximum(num_givers, 1), 1.0 / (size - num_givers))


def has_room(cost: CostModel) -> bool:
    """Whether every rank can hold what it holds without tokens and heads, which no schedule makes less."""
    num_ranks = cost.cluster.num_ranks
    grouping = Grouping(cost.cluster, [range(num_ranks)])
    least_D = cost.memory_bytes(grouping, np.zeros(num_ranks), np.zeros(num_ranks, dtype=np.int64))
    return bool((least_D <= cost.capacity_bytes_D).all())


def longest_of_assignment(cost: CostModel) -> int:
    """About how many tokens of a sequence would fit on this cluster, by bisection; 0 if the model itself does not."""
    if not has_room(cost):
        return 0
    low, high = 0, cost.workload.seq_len
    while high - low > max(1, low // _LENGTH_ERROR):
        middle = (low + high) // 2
        shorter = make_cost_model(cost.name, cost.cluster, cost.model, replace(cost.workload, seq_len=middle))
        if fits_somehow(shorter):
            low = middle
        else:
            high = middle
    return low


def fits_somehow(cost: CostModel) -> bool:
    """Whether one of three simple groupings fits, with the tokens that its ranks have room for."""
    for grouping, tokens_D, heads_D in _simple_assignments(cost):
        fitted_D = fit_memory(cost, grouping, tokens_D, heads_D)
        if fitted_D is not None and cost.host_has_room(fitted_D):
            return True
    return False


def _simple_assignments(cost: CostModel) -> Iterator[tuple[Grouping, Floats, Ints]]:
    """The ring, one group per node and one group of all, with tokens by free memory."""
    num_ranks, num_heads = cost.cluster.num_ranks, cost.model.num_heads
    node = cost.cluster.node_of_rank
    ring = list(np.arange(num_ranks)[:, None])
    by_node = [np.flatnonzero(node == n) for n in range(int(node.max()) + 1)]
    share = cost.capacity_bytes_D / cost.capacity_bytes_D.sum()
    for groups in (ring, by_node, [np.arange(num_ranks)]):
        heads = np.zeros(num_ranks, dtype=np.int64)
        for group in groups:
            heads[group] = apportion(tuple(share[group].tolist()), num_heads)
        yield Grouping(cost.cluster, groups), share * cost.workload.seq_len, heads
