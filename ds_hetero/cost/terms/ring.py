"""Time of attention in a ring of groups: a max-plus recurrence without barriers.

HexiSeq's Eq. 2 lets every ring step wait for the slowest device of all (arXiv:2605.07569). The runtime has no such
barrier: a group waits for its own KV only, which travels while it computes on the block before.

    S_p(t)      group p begins step t
    E_p(t)      = S_p(t) + compute_p(block at t)
    R_p(t + 1)  = max(S_p(t), S_{p-1}(t)) + transfer_p(block at t + 1)     both ends are there, one block ahead
    S_p(t + 1)  = max(E_p(t), R_p(t + 1))

Forward, group p works on the block of group p - t. Backward, the ring turns the other way: the last remote block of
the forward is still there, block p + 1 + t is worked on at step t, and while a group computes it receives the
next KV block and the fp32 dK and dV that its neighbour has finished for the present one (the runtime sends them on
right after its own part has been added). That makes K - 1 hops of KV forward, K - 2 of KV and K - 1 of dK/dV backward.

Dimension key: B assignments, K groups in ring order, T steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hetero.common.arrays import Bools, Floats, Ints

# Groups from which a ring of equal blocks is not computed step by step; what that costs in accuracy is in
# `ring_finish_s`. Chosen, never measured.
LARGE_RING = 256
# Entries of a table of steps that are worked on at once. 256 KiB of numbers stay in the cache: 1,024 groups take 11 ms,
# with a table of all steps 48 ms (commit 62f7eaa7).
STEP_TABLE = 1 << 15


class RingCoefficients(NamedTuple):
    """One pass around the ring, every time linear in the tokens of the block; arrays are ``[B, K]``.

    Attributes:
        slope_s, fixed_s: compute time of a group per token of the block, and per block.
        kv_s, gradient_s: time of a transfer into a group per token of the block, KV and dK/dV; 0 in a forward pass.
        shared_kv_s, shared_gradient_s: least time of those transfers, set by a NIC or switch that others use as well.
    """

    start_s: Floats  # when every group is ready for step 0
    length: Floats  # tokens of every group, which are the block's when it travels
    slope_s: Floats
    fixed_s: Floats
    latency_s: Floats  # start-up of a transfer into a group
    kv_s: Floats
    gradient_s: Floats
    shared_kv_s: Floats
    shared_gradient_s: Floats
    backward: bool  # direction of the ring
    contiguous_causal: bool  # half of the local block, all of earlier blocks and nothing of later ones is computed

    def take(self, rows: Ints) -> RingCoefficients:
        """The coefficients of some assignments."""
        return RingCoefficients._make(field if isinstance(field, bool) else field.take(rows, axis=0) for field in self)


def alone_s(ring: RingCoefficients) -> Floats:
    """When every group would be done if KV were always there, ``[B, K]``; not for contiguous causal groups."""
    num_groups = ring.length.shape[1]
    all_tokens_B1 = np.add.reduce(ring.length, axis=1, keepdims=True)
    return np.asarray(ring.start_s + ring.slope_s * all_tokens_B1 + ring.fixed_s * num_groups)


def ring_finish_s(ring: RingCoefficients) -> Floats:
    """When the last group is done, ``[B]``.

    Two shortcuts. If even the longest transfer (plus the unevenness of the starts) hides under the shortest step, a
    path through the recurrence that changes groups gains nothing over one that stays with the slowest group: every
    change replaces a compute step by a transfer, and no longer step is left out for it. If all groups are of one length
    in a ring of more than 256, the slowest group's steps decide to within the start and one step, 1/K of the whole.
    """
    num_groups = ring.length.shape[1]
    if ring.contiguous_causal and num_groups > 1:
        return _recurrence(ring)
    largest, least = partial(np.maximum.reduce, axis=1), partial(np.minimum.reduce, axis=1)
    finish_B = largest(alone_s(ring))
    if num_groups == 1:
        return np.asarray(finish_B)
    longest_B, shortest_B = largest(ring.length), least(ring.length)
    shortest_step_BK = ring.slope_s * shortest_B[:, None] + ring.fixed_s
    longest_transfer_BK = ring.latency_s + np.maximum(ring.kv_s * longest_B[:, None], ring.shared_kv_s)
    if ring.backward:
        longest_transfer_BK += np.maximum(ring.gradient_s * longest_B[:, None], ring.shared_gradient_s)
    uneven_B = largest(ring.start_s) - least(ring.start_s)
    is_hidden_B = largest(longest_transfer_BK) + uneven_B <= least(shortest_step_BK)
    if is_hidden_B.all():
        return np.asarray(finish_B)
    has_equal_blocks = bool((longest_B == shortest_B).all())
    if num_groups > LARGE_RING and has_equal_blocks:
        slowest_step_BK = np.maximum(shortest_step_BK, longest_transfer_BK)
        slowest_BK = ring.start_s + slowest_step_BK * (num_groups - 1) + shortest_step_BK
        return np.asarray(np.where(is_hidden_B, finish_B, slowest_BK.max(axis=1)))
    if not is_hidden_B.any():
        return _recurrence(ring)
    rows = np.flatnonzero(~is_hidden_B)
    finish_B[rows] = _recurrence(ring.take(rows))
    return np.asarray(finish_B)


def _recurrence(ring: RingCoefficients) -> Floats:
    """When the last group is done by the recurrence itself, ``[B]``.

    `now_BK` and `neighbour_BK` are views of one array with K + 1 columns, of which one repeats a group to close the
    ring, so that no step copies more than this column. Of groups 0, 1 and 2:

        forward     2' 0  1  2     now is the last three columns, the group before each the first three
        backward    0  1  2  0'    now is the first three columns, the group after each the last three
    """
    num_sets, num_groups = ring.length.shape
    columns = np.empty((num_sets, num_groups + 1))
    if ring.backward:
        now_BK, neighbour_BK = columns[:, :-1], columns[:, 1:]
        repeated, original = columns[:, -1], columns[:, 0]
    else:
        now_BK, neighbour_BK = columns[:, 1:], columns[:, :-1]
        repeated, original = columns[:, 0], columns[:, -1]
    now_BK[:] = ring.start_s
    arrival_BK = np.empty_like(now_BK)
    for compute_TBK, transfer_TBK in _step_tables_s(ring):
        for compute_BK, transfer_BK in zip(compute_TBK, transfer_TBK, strict=True):
            repeated[:] = original
            np.maximum(now_BK, neighbour_BK, out=arrival_BK)
            np.add(arrival_BK, transfer_BK, out=arrival_BK)
            np.add(now_BK, compute_BK, out=now_BK)
            np.maximum(now_BK, arrival_BK, out=now_BK)
    return np.asarray(np.maximum.reduce(now_BK, axis=1))


def ring_schedule(ring: RingCoefficients) -> tuple[Floats, Floats]:
    """Start of every step and end of the transfer into the group meanwhile (-inf for none), each ``[steps, B, K]``.

    The recurrence as the module's docstring has it, which keeps every step.
    """
    to_neighbour = -1 if ring.backward else 1  # np.roll by 1 puts the group before in a group's place
    now_BK = ring.start_s
    starts, arrivals = [], []
    for compute_TBK, transfer_TBK in _step_tables_s(ring):
        for compute_BK, transfer_BK in zip(compute_TBK, transfer_TBK, strict=True):
            neighbour_BK = np.roll(now_BK, to_neighbour, axis=1)
            arrival_BK = np.maximum(now_BK, neighbour_BK) + transfer_BK
            starts.append(now_BK)
            arrivals.append(arrival_BK)
            now_BK = np.maximum(now_BK + compute_BK, arrival_BK)
    return np.array(starts), np.array(arrivals)


def _step_tables_s(ring: RingCoefficients) -> Iterator[tuple[Floats, Floats]]:
    """Compute time of every step and time of the transfer meanwhile (-inf for none), ``[T, B, K]``, T steps at a time.

    At step t group p works on the block of group p - t forward, of group p + 1 + t backward; shifts say so. Forward
    there are K - 1 transfers of KV, at all steps but the last. Backward there are K - 2 of KV, at all steps but the
    last two, and K - 1 of gradients, at all steps but the first.
    """
    num_groups = ring.length.shape[1]
    rows = max(1, STEP_TABLE // ring.length.size)
    for first in range(0, num_groups, rows):
        last = min(first + rows, num_groups)
        # Shifts of the blocks at these steps, and at the one after them, whose block travels during the last one.
        shift = np.arange(first + 1, last + 2) if ring.backward else -np.arange(first, last + 1)
        num_kv = num_groups - 2 if ring.backward else num_groups - 1
        sends_kv = slice(0, max(num_kv - first, 0))  # rows of this table
        sends_gradient = slice(0, 0)
        if ring.backward:
            sends_gradient = slice(0 if first else 1, None)
        length_TBK = _shifted(ring.length, shift)
        block_TBK, next_TBK = length_TBK[:-1], length_TBK[1:]
        compute_TBK = ring.slope_s * block_TBK + ring.fixed_s
        kv_TBK = np.maximum(ring.kv_s * next_TBK[sends_kv], ring.shared_kv_s)
        transfer_TBK = np.empty_like(compute_TBK)
        transfer_TBK[:] = -np.inf
        if ring.contiguous_causal:
            work_TK, needs_kv_TK, needs_gradient_TK = _visible(num_groups, shift[:-1], shift[1:])
            compute_TBK *= work_TK[:, None]
            kv_TBK *= needs_kv_TK[sends_kv, None]
            is_sent_TK = np.zeros((last - first, num_groups), dtype=bool)
            is_sent_TK[sends_kv] = needs_kv_TK[sends_kv]
            is_sent_TK[sends_gradient] |= needs_gradient_TK[sends_gradient]
            np.copyto(transfer_TBK, ring.latency_s, where=is_sent_TK[:, None])
        else:
            transfer_TBK[sends_kv] = ring.latency_s
            transfer_TBK[sends_gradient] = ring.latency_s
        transfer_TBK[sends_kv] += kv_TBK
        if ring.backward:
            gradient_TBK = np.maximum(ring.gradient_s * block_TBK[sends_gradient], ring.shared_gradient_s)
            if ring.contiguous_causal:
                gradient_TBK *= needs_gradient_TK[sends_gradient, None]
            transfer_TBK[sends_gradient] += gradient_TBK
        yield compute_TBK, transfer_TBK


def _visible(num_groups: int, shift_T: Ints, next_shift_T: Ints) -> tuple[Floats, Bools, Bools]:
    """Keys that contiguous causal groups see: those of earlier groups, which travel to them, and half of their own.

    Share of the block that is computed, whether the next block is needed, and whether the group one position further
    has added to the block's gradient, each ``[T, K]``.
    """
    position = np.arange(num_groups)
    source_TK = _shifted(position[None], shift_T)[:, 0]
    next_source_TK = _shifted(position[None], next_shift_T)[:, 0]
    work_TK = np.where(source_TK < position, 1.0, 0.0)
    work_TK = np.where(source_TK == position, 0.5, work_TK)
    needs_kv_TK = next_source_TK < position
    needs_gradient_TK = (source_TK <= position) & (position < num_groups - 1)
    return work_TK, needs_kv_TK, needs_gradient_TK


def _shifted(length_BK: npt.NDArray[Any], shift_T: Ints) -> npt.NDArray[Any]:
    """``length[b, (p + shift_t) % K]`` as ``[T, B, K]``.

    Rows of a strided view are copied whole, since gathering single numbers is slower. Lengths 5, 6, 7 of one set:

        twice           5 6 7 5 6 7
        view, by shift  5 6 7  /  6 7 5  /  7 5 6       row s begins at the number s
    """
    num_sets, num_groups = length_BK.shape
    twice = np.concatenate([length_BK, length_BK], axis=1)
    to_next_set, to_next = twice.strides
    shape, strides = (num_groups, num_sets, num_groups), (to_next, to_next_set, to_next)
    view: npt.NDArray[Any] = np.ndarray(shape, twice.dtype, twice, 0, strides)
    return np.asarray(view[shift_T % num_groups])
