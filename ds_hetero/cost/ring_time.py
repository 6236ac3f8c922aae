"""When the last group of a ring is done: a max-plus recurrence without barriers.

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

Dimension key: B assignments, K groups in ring order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RingCoefficients", "ring_finish_s", "ring_schedule"]

Floats = npt.NDArray[np.float64]

LARGE_RING = 256


@dataclass(frozen=True, slots=True)
class RingCoefficients:
    """One pass around the ring, every time linear in the tokens of the block; arrays are ``[B, K]``.

    Attributes:
        start_s: when every group is ready for step 0.
        length: tokens of every group, which are the block's when it travels.
        slope_s, fixed_s: compute time of a group per token of the block, and per block.
        latency_s: start-up of a transfer into a group.
        kv_s, gradient_s: time of a transfer into a group per token of the block, KV and dK/dV; 0 in a forward pass.
        shared_kv_s, shared_gradient_s: least time of those transfers, set by a NIC or switch that others use as well.
        backward: direction of the ring.
        contiguous_causal: half of the local block, all of earlier blocks and nothing of later ones is computed.
    """

    start_s: Floats
    length: Floats
    slope_s: Floats
    fixed_s: Floats
    latency_s: Floats
    kv_s: Floats
    gradient_s: Floats
    shared_kv_s: Floats
    shared_gradient_s: Floats
    backward: bool
    contiguous_causal: bool

    def take(self, rows: npt.NDArray[np.int64]) -> RingCoefficients:
        """The coefficients of some assignments."""
        arrays = {n: getattr(self, n)[rows] for n in self.__slots__ if n not in ("backward", "contiguous_causal")}
        return RingCoefficients(**arrays, backward=self.backward, contiguous_causal=self.contiguous_causal)


def ring_finish_s(ring: RingCoefficients) -> Floats:
    """When the last group is done, ``[B]``.

    Two shortcuts. If even the longest transfer (plus the unevenness of the starts) hides under the shortest step, a
    path through the recurrence that changes groups gains nothing over one that stays with the slowest group: every
    change replaces a compute step by a transfer, and no longer step is left out for it. If all groups are of one length
    in a ring of more than 256, the slowest group's steps decide to within the start and one step, 1/K of the whole.
    """
    num_groups = ring.length.shape[1]
    whole_B = ring.length.sum(axis=1)
    if ring.contiguous_causal and num_groups > 1:
        return _recurrence(ring)
    alone_BK = ring.start_s + ring.slope_s * whole_B[:, None] + ring.fixed_s * num_groups
    finish_B = alone_BK.max(axis=1)
    if num_groups == 1:
        return np.asarray(finish_B)
    longest_B, shortest_B = ring.length.max(axis=1), ring.length.min(axis=1)
    step_BK = ring.slope_s * shortest_B[:, None] + ring.fixed_s
    kv_BK = np.maximum(ring.kv_s * longest_B[:, None], ring.shared_kv_s)
    gradient_BK = np.maximum(ring.gradient_s * longest_B[:, None], ring.shared_gradient_s)
    transfer_BK = ring.latency_s + kv_BK + gradient_BK
    uneven_B = ring.start_s.max(axis=1) - ring.start_s.min(axis=1)
    hidden_B = transfer_BK.max(axis=1) + uneven_B <= step_BK.min(axis=1)
    if hidden_B.all():
        return np.asarray(finish_B)
    if num_groups > LARGE_RING and bool((longest_B == shortest_B).all()):
        slowest_BK = ring.start_s + np.maximum(step_BK, transfer_BK) * (num_groups - 1) + step_BK
        return np.asarray(np.where(hidden_B, finish_B, slowest_BK.max(axis=1)))
    rows = np.flatnonzero(~hidden_B)
    finish_B[rows] = _recurrence(ring.take(rows))
    return np.asarray(finish_B)


def _recurrence(ring: RingCoefficients) -> Floats:
    now_BK = ring.start_s
    for step in range(ring.length.shape[1]):
        compute_BK, transfer_BK = _step_s(ring, step)
        done_BK = now_BK + compute_BK
        if transfer_BK is not None:
            np.fmax(done_BK, _arrival_s(ring, now_BK, transfer_BK), out=done_BK)
        now_BK = done_BK
    return np.asarray(now_BK.max(axis=1))


def ring_schedule(ring: RingCoefficients) -> tuple[Floats, Floats]:
    """Start of every step and end of the transfer into the group beside it (0 for none), each ``[steps, B, K]``."""
    now_BK = ring.start_s
    starts, received = [], []
    for step in range(ring.length.shape[1]):
        compute_BK, transfer_BK = _step_s(ring, step)
        starts.append(now_BK)
        received.append(np.zeros_like(now_BK))
        if transfer_BK is not None:
            received[-1] = _arrival_s(ring, now_BK, transfer_BK)
        now_BK = np.fmax(now_BK + compute_BK, received[-1])
    return np.array(starts), np.array(received)


def _arrival_s(ring: RingCoefficients, now_BK: Floats, transfer_BK: Floats) -> Floats:
    """A transfer starts when both ends have begun the step; where nothing travels (NaN) nothing arrives."""
    other_BK = np.roll(now_BK, -1 if ring.backward else 1, axis=1)
    return np.asarray(np.maximum(now_BK, other_BK) + transfer_BK)


def _step_s(ring: RingCoefficients, step: int) -> tuple[Floats, Floats | None]:
    """Compute time of every group in a step, and the time of the transfer into it meanwhile (None for none)."""
    num_groups = ring.length.shape[1]
    if ring.backward:
        block_BK = np.roll(ring.length, -(step + 1), axis=1)  # of group p + 1 + step
        gradient_BK, next_BK = block_BK, np.roll(ring.length, -(step + 2), axis=1)
        sends_gradient, sends_kv = step > 0, step < num_groups - 2
    else:
        block_BK = np.roll(ring.length, step, axis=1)  # of group p - step
        gradient_BK, next_BK = block_BK, np.roll(ring.length, step + 1, axis=1)
        sends_gradient, sends_kv = False, step < num_groups - 1
    compute_BK = ring.slope_s * block_BK + ring.fixed_s
    needs_kv = needs_gradient = np.True_
    if ring.contiguous_causal:
        position = np.arange(num_groups)
        source = (position + 1 + step if ring.backward else position - step) % num_groups
        compute_BK = compute_BK * np.where(source == position, 0.5, np.where(source < position, 1.0, 0.0))
        following = (source + 1 if ring.backward else source - 1) % num_groups
        needs_kv = following < position
        needs_gradient = (source <= position) & (position < num_groups - 1)
    if not (sends_gradient or sends_kv):
        return compute_BK, None
    transfer_BK = ring.latency_s
    if sends_kv:
        transfer_BK = transfer_BK + np.where(needs_kv, np.maximum(ring.kv_s * next_BK, ring.shared_kv_s), 0.0)
    if sends_gradient:
        gradient_s_BK = np.maximum(ring.gradient_s * gradient_BK, ring.shared_gradient_s)
        transfer_BK = transfer_BK + np.where(needs_gradient, gradient_s_BK, 0.0)
    travels = (needs_kv & sends_kv) | (needs_gradient & sends_gradient)
    return compute_BK, np.where(travels, transfer_BK, np.nan) if ring.contiguous_causal else transfer_BK
