"""Time of attention in a ring of groups: a max-plus recurrence without barriers.

In HexiSeq's Eq. 2 every ring step waits for the slowest device of all (arXiv:2605.07569). The runtime has no such
barrier: a group waits only for its next KV block, which travels while the group computes on the block before.

    S_p(t)      start of step t in group p
    E_p(t)      = S_p(t) + compute_p(block at t)                          end of the computation
    R_p(t + 1)  = max(S_p(t), S_{p-1}(t)) + transfer_p(block at t + 1)    arrival of the next block: sender and receiver
                                                                          both post it when they begin step t
    S_p(t + 1)  = max(E_p(t), R_p(t + 1))

Forward, group p works on the block of group p - t at step t. Backward, the ring turns the other way, since the last
block of the forward is still in memory: group p works on the block of group p + 1 + t. While it computes it receives
the next KV block, and dK and dV of the present block from its neighbour, in fp32 or bf16 (the runtime sends them on as
soon as a group has added its part). There are K - 1 transfers of KV forward, K - 2 of KV and K - 1 of dK/dV backward.

That is what messages on communicators of their own do (`ds_hetero.batch.ring_colours`), and those of gloo. If a group
sends and receives on one communicator of NCCL, both are one kernel, and a rendezvous: it ends only when the receiver
has also posted. Such a ring is *coupled*, and group p begins step t + 1 only after it has sent:

    S_p(t + 1)  = max(E_p(t), R_p(t + 1), R_{p+1}(t + 1))

Predictions do not count it: uneven rings of three and more groups have communicators by colour, in even ones it costs
next to nothing. Lanes of documents between groups that are not neighbours are coupled, which is not counted either. Of
ring orders that are predicted to be equally fast, the planner takes one that is fast if coupled, too
(`ds_hetero.planner.search.coupled_order`).

Example: tokens 4:4:1:1 on speeds 4:4:1:1, free transfers. A step on a block of n tokens takes n s on
every group, so the ring takes 10 s. Coupled, groups wait for neighbours that still work on blocks of 4 tokens: 12 s.

Example: two groups, a step takes 4 s in group 0 and 2 s in group 1, a transfer 3 s, and both start at 0. Both next
blocks arrive at 0 + 3 = 3 s. Group 0 begins step 1 at max(4, 3) = 4 s and ends at 8 s; group 1 begins it at max(2, 3) =
3 s and ends at 5 s. The ring ends at 8 s. With a barrier group 1 would begin step 1 only at 4 s.

Dimension key: B assignments, K groups in ring order, T steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hetero.common.arrays import Bools, Floats, Ints

# Rings of equal blocks with more groups than this are not computed step by step; `ring_finish_s` says what accuracy
# that costs. Chosen, never measured.
LARGE_RING = 256
# Entries of a table of steps that is computed at once. 256 KiB of numbers stay in the cache: 1,024 groups take 11 ms,
# and 48 ms with one table of all steps (commit 62f7eaa7).
STEP_TABLE = 1 << 15


class RingCoefficients(NamedTuple):
    """Terms of the time of one pass around the ring; arrays are ``[B, K]``.

    Times of computing on a KV block, and of sending the block, are linear in its tokens.

    Attributes:
        slope_s, fixed_s: compute time of a group per token of the block, and per block.
        kv_s, gradient_s: time of a transfer into a group per token of the block, of KV and of dK/dV; ``gradient_s`` is
            0 in a forward pass.
        shared_kv_s, shared_gradient_s: least time of those transfers, set by a NIC or switch that other transfers use
            as well.
    """

    start_s: Floats  # time at which a group is ready for step 0
    length: Floats  # tokens of every group, and so of the KV block that starts there
    slope_s: Floats
    fixed_s: Floats
    latency_s: Floats  # start-up of a transfer into a group
    kv_s: Floats
    gradient_s: Floats
    shared_kv_s: Floats
    shared_gradient_s: Floats
    backward: bool  # direction of the ring
    contiguous_causal: bool  # a group computes half of its own block, all of earlier blocks, nothing of later ones
    coupled: bool = False  # a group also waits for the group that it sends to

    def take(self, rows: Ints) -> RingCoefficients:
        """Select the coefficients of some assignments."""
        return RingCoefficients._make(field if isinstance(field, bool) else field.take(rows, axis=0) for field in self)

    def coupled_in_orders(self, orders_PK: Ints) -> RingCoefficients:
        """Return one assignment as a coupled ring with free transfers, in every order of its groups, ``[P, K]``.

        Transfers depend on the links between neighbours, so those of another order are not known here.

        Args:
            orders_PK: groups in the order of the new ring, by their present positions.
        """
        free_PK = np.zeros(orders_PK.shape)
        return self._replace(
            start_s=self.start_s[0][orders_PK],
            length=self.length[0][orders_PK],
            slope_s=self.slope_s[0][orders_PK],
            fixed_s=self.fixed_s[0][orders_PK],
            latency_s=free_PK,
            kv_s=free_PK,
            gradient_s=free_PK,
            shared_kv_s=free_PK,
            shared_gradient_s=free_PK,
            coupled=True,
        )


def alone_s(ring: RingCoefficients) -> Floats:
    """Return the time at which every group ends if it never waits for KV, ``[B, K]``.

    Every group computes on all blocks here, so contiguous causal groups have no such time.
    """
    num_groups = ring.length.shape[1]
    all_tokens_B1 = np.add.reduce(ring.length, axis=1, keepdims=True)
    return np.asarray(ring.start_s + ring.slope_s * all_tokens_B1 + ring.fixed_s * num_groups)


def ring_finish_s(ring: RingCoefficients) -> Floats:
    """Return the time at which the last group ends, ``[B]``.

    The recurrence is evaluated for coupled rings, and for assignments to which neither of two shortcuts applies:

    1. Even the longest transfer, plus the largest difference of the starts, is shorter than the shortest step. Then no
       group waits: a path through the recurrence that changes groups replaces a step by a shorter transfer, so the
       slowest group alone decides, as in `alone_s`.
    2. All groups have equal lengths, and there are more than `LARGE_RING`. Then the slowest group decides, with an
       error of at most the differences of the starts and one step, which is 1 / K of the result.
    """
    num_groups = ring.length.shape[1]
    if (ring.contiguous_causal or ring.coupled) and num_groups > 1:
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
    start_difference_B = largest(ring.start_s) - least(ring.start_s)
    is_hidden_B = largest(longest_transfer_BK) + start_difference_B <= least(shortest_step_BK)
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
    """Return the time at which the last group ends, computed step by step, ``[B]``.

    `now_BK` and `neighbour_BK` are views of one array with K + 1 columns. One column repeats a group to close the ring,
    so a step copies this column alone. With groups 0, 1 and 2:

        forward     2' 0  1  2     now: the last three columns; neighbour, the group before: the first three
        backward    0  1  2  0'    now: the first three columns; neighbour, the group after: the last three
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
            if ring.coupled:
                arrival_BK = _with_sends(arrival_BK, backward=ring.backward)
            np.add(now_BK, compute_BK, out=now_BK)
            np.maximum(now_BK, arrival_BK, out=now_BK)
    return np.asarray(np.maximum.reduce(now_BK, axis=1))


def _with_sends(arrival_BK: Floats, *, backward: bool) -> Floats:
    """Return when the round of every group is over in a coupled ring: what it receives and what it sends have arrived.

    Example, forward: blocks arrive at groups 0, 1 and 2 at 3, 5 and 4 s. Group 0 sends to group 1, and its round is
    over at 5 s, as is that of group 1; group 2 sends to group 0, and its round is over at 4 s.
    """
    to_receiver = 1 if backward else -1  # np.roll by -1 puts the group after in a group's place
    return np.maximum(arrival_BK, np.roll(arrival_BK, to_receiver, axis=1))


def ring_schedule(ring: RingCoefficients) -> tuple[Floats, Floats]:
    """Return the start of every step, and the end of the transfer during it (-inf for none), each ``[steps, B, K]``.

    The function evaluates the same recurrence as `ring_finish_s`, without shortcuts, and keeps every step.
    """
    to_neighbour = -1 if ring.backward else 1  # np.roll by 1 puts the group before in a group's place
    now_BK = ring.start_s
    starts, arrivals = [], []
    for compute_TBK, transfer_TBK in _step_tables_s(ring):
        for compute_BK, transfer_BK in zip(compute_TBK, transfer_TBK, strict=True):
            neighbour_BK = np.roll(now_BK, to_neighbour, axis=1)
            arrival_BK = np.maximum(now_BK, neighbour_BK) + transfer_BK
            if ring.coupled:
                arrival_BK = _with_sends(arrival_BK, backward=ring.backward)
            starts.append(now_BK)
            arrivals.append(arrival_BK)
            now_BK = np.maximum(now_BK + compute_BK, arrival_BK)
    return np.array(starts), np.array(arrivals)


def _step_tables_s(ring: RingCoefficients) -> Iterator[tuple[Floats, Floats]]:
    """Yield tables of T steps: compute time of each, and time of the transfer during it (-inf for none), ``[T, B, K]``.

    A shift is the distance from a group to the one whose block it works on: -t forward, 1 + t backward. KV travels at
    all steps but the last forward, at all but the last two backward. Gradients travel backward at all steps but the
    first.
    """
    num_groups = ring.length.shape[1]
    rows = max(1, STEP_TABLE // ring.length.size)
    for first in range(0, num_groups, rows):
        last = min(first + rows, num_groups)
        # One shift more than there are steps: the block of the step after these travels during the last of them.
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
    """Return the blocks that contiguous causal groups compute and need: a group sees earlier groups and half of itself.

    Returns:
        For every step and group, each ``[T, K]``: the share of the present block that the group computes; whether it
        needs the next block; whether the group one position further has added to the present block's gradient.
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
    """Return ``length[b, (p + shift_t) % K]`` as ``[T, B, K]``.

    The function copies rows of a strided view, which is faster than gathering single numbers. With B = 1 and lengths 5,
    6 and 7:

        twice           5 6 7 5 6 7
        view, by shift  5 6 7  /  6 7 5  /  7 5 6       row s begins at the number s
    """
    num_sets, num_groups = length_BK.shape
    twice = np.concatenate([length_BK, length_BK], axis=1)
    to_next_set, to_next = twice.strides
    shape, strides = (num_groups, num_sets, num_groups), (to_next, to_next_set, to_next)
    view: npt.NDArray[Any] = np.ndarray(shape, twice.dtype, twice, 0, strides)
    return np.asarray(view[shift_T % num_groups])
