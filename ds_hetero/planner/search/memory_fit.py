"""Move tokens so that an assignment fits into memory, and find the longest sequence that would fit.

The memory of a rank grows with its tokens (activations of every layer), and with its heads times the tokens of its
group (attention of one layer). Moving tokens from full ranks to ranks with free memory lowers both.

Dimension key: B assignments, D ranks.
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


def fit_memory(cost: CostModel, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> Floats | None:
    """Return tokens near ``tokens_D`` with which every rank fits into memory, ``[D]``; None if none were found.

    See `fit_rows`.
    """
    (fitted_D,) = fit_rows(cost, grouping, tokens_D[None], heads_D[None])
    return fitted_D


def fit_rows(cost: CostModel, grouping: Grouping, tokens_BD: Floats, heads_BD: Ints) -> list[Floats | None]:
    """Return for each row tokens near its own with which every rank fits into memory, ``[D]``; None if none were found.

    Full ranks give their surplus to the others, in proportion to free memory. A round measures how a rank's memory
    grows with its tokens while the number of tokens of its group stays the same. Since moved tokens change the groups,
    too, further rounds measure again. Ranks without tokens get none. Rows are independent; one call of the cost model
    evaluates all rows that do not fit yet.
    """
    fitted: list[Floats | None] = [None] * len(tokens_BD)
    rows = np.arange(len(tokens_BD))  # rows that neither fit yet nor are known to fit never
    total_B1 = tokens_BD.sum(axis=1, keepdims=True)
    has_work_BD = tokens_BD > 0
    direction_D = _swap_within_groups(grouping)
    for _ in range(_FIT_ROUNDS):
        step_BD = tokens_BD.sum(axis=1, keepdims=True) * _SLOPE_STEP * direction_D
        both_BD = np.concatenate([tokens_BD, tokens_BD + step_BD])
        bytes_BD = cost.memory_bytes(grouping, both_BD, np.concatenate([heads_BD, heads_BD]))
        need_BD, need_after_step_BD = bytes_BD[: len(rows)], bytes_BD[len(rows) :]
        fits_B = (need_BD <= cost.capacity_bytes_D).all(axis=1)
        for i in np.flatnonzero(fits_B):
            fitted[rows[i]] = tokens_BD[i]
        bytes_per_token_BD = np.maximum((need_after_step_BD - need_BD) / step_BD, 1.0)
        spare_BD = _FILLED_SHARE * (cost.capacity_bytes_D - need_BD) / bytes_per_token_BD  # in tokens; negative if full
        most_BD = np.where(has_work_BD, np.maximum(tokens_BD + spare_BD, 0.0), 0.0)
        capped_BD = np.minimum(tokens_BD, most_BD)
        room_BD = most_BD - capped_BD
        room_B1 = room_BD.sum(axis=1, keepdims=True)
        surplus_B1 = total_B1 - capped_BD.sum(axis=1, keepdims=True)
        goes_on_B = ~fits_B & (room_B1 >= surplus_B1)[:, 0]
        if not goes_on_B.any():
            break
        given_share_B1 = surplus_B1[goes_on_B] / room_B1[goes_on_B]
        tokens_BD = capped_BD[goes_on_B] + room_BD[goes_on_B] * given_share_B1
        heads_BD, rows = heads_BD[goes_on_B], rows[goes_on_B]
        total_B1, has_work_BD = total_B1[goes_on_B], has_work_BD[goes_on_B]
    return fitted


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
