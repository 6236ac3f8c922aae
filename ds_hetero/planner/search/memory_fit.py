"""Move tokens so that an assignment fits into memory, and find the longest sequence that would fit.

The memory of a rank grows with its tokens (activations of every layer), and with its heads times the tokens of its
group (attention of one layer). Moving tokens from full ranks to ranks with free memory lowers both.

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

# Most rounds of moving tokens; memory is piecewise linear in tokens, so few are used. Chosen, never measured.
_FIT_ROUNDS = 30
_FILLED_SHARE = 0.999  # of free memory; what stays free is for rounding to whole tokens; chosen, never measured
_SLOPE_STEP = 1e-6  # share of the sequence that is moved to measure how memory grows
_LENGTH_RESOLUTION = 50  # the longest sequence is found to within a 50th of its length


def fit_memory(cost: CostModel, grouping: Grouping, tokens: Floats, heads: Ints) -> Floats | None:
    """Return tokens near ``tokens``, ``[D]``, with which every rank fits into memory; None if none were found.

    Full ranks give their surplus to the others, in proportion to free memory. A round measures how a rank's memory
    grows with its tokens while the number of tokens of its group stays the same. Since moved tokens change the groups,
    too, further rounds measure again. Ranks without tokens get none.
    """
    total_tokens = tokens.sum()
    has_work_D = tokens > 0
    heads_2D = np.stack([heads, heads])
    direction_D = _swap_within_groups(grouping)
    for _ in range(_FIT_ROUNDS):
        step_D = tokens.sum() * _SLOPE_STEP * direction_D
        need_D, need_after_step_D = cost.memory_bytes(grouping, np.stack([tokens, tokens + step_D]), heads_2D)
        if (need_D <= cost.capacity_bytes_D).all():
            return tokens
        bytes_per_token_D = np.maximum((need_after_step_D - need_D) / step_D, 1.0)
        spare_tokens_D = _FILLED_SHARE * (cost.capacity_bytes_D - need_D) / bytes_per_token_D  # negative if full
        most_tokens_D = np.where(has_work_D, np.maximum(tokens + spare_tokens_D, 0.0), 0.0)
        capped_D = np.minimum(tokens, most_tokens_D)
        room_D = most_tokens_D - capped_D
        surplus = total_tokens - capped_D.sum()
        if room_D.sum() < surplus:
            return None
        tokens = capped_D + room_D * (surplus / room_D.sum())
    return None


def _swap_within_groups(grouping: Grouping) -> Floats:
    """Return a change of tokens, ``[D]``, that leaves the number of tokens of every group as it is.

    Half of a group's ranks give, the others take: in a group of three ranks -1, +0.5, +0.5. A small step in this
    direction shows how the memory of every rank grows with its own tokens alone.
    """
    place = np.empty_like(grouping.order)  # of every rank in its group
    place[grouping.order] = np.arange(len(place)) - np.repeat(grouping.offsets[:-1], grouping.sizes)
    size = grouping.sizes[grouping.group_of]
    num_givers = size // 2
    return np.where(place < num_givers, -1.0 / np.maximum(num_givers, 1), 1.0 / (size - num_givers))


def has_room(cost: CostModel) -> bool:
    """Whether every rank fits into memory without tokens and heads; if not, no schedule fits."""
    num_ranks = cost.cluster.num_ranks
    grouping = Grouping(cost.cluster, [range(num_ranks)])
    need_D = cost.memory_bytes(grouping, np.zeros(num_ranks), np.zeros(num_ranks, dtype=np.int64))
    return bool((need_D <= cost.capacity_bytes_D).all())


def longest_that_fits(cost: CostModel) -> int:
    """Return about the most tokens of a sequence that fits on this cluster, at most the workload's ``seq_len``.

    The length is found by bisection to within a 50th; 0 if the model alone does not fit.
    """
    if not has_room(cost):
        return 0
    low, high = 0, cost.workload.seq_len
    while high - low > max(1, low // _LENGTH_RESOLUTION):
        middle = (low + high) // 2
        shorter = make_cost_model(cost.name, cost.cluster, cost.model, replace(cost.workload, seq_len=middle))
        if fits_in_a_simple_grouping(shorter):
            low = middle
        else:
            high = middle
    return low


def fits_in_a_simple_grouping(cost: CostModel) -> bool:
    """Whether a schedule with one of three simple groupings fits into memory: ring, one group per node, one group."""
    for grouping, tokens_D, heads_D in _simple_assignments(cost):
        fitted_D = fit_memory(cost, grouping, tokens_D, heads_D)
        if fitted_D is not None and cost.host_has_room(fitted_D):
            return True
    return False


def _simple_assignments(cost: CostModel) -> Iterator[tuple[Grouping, Floats, Ints]]:
    """Yield groupings with tokens and heads, ``[D]``: a ring, one group per node, one group; by memory capacity."""
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
