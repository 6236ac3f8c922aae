"""The ring without barriers: against message-by-message simulation, and in cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ds_hetero.cost.terms import ring as ring_time
from ds_hetero.cost.terms.ring import RingCoefficients, ring_finish_s, ring_schedule


def ring(
    length,
    slope,
    *,
    start=None,
    fixed=0.0,
    latency=0.0,
    kv=0.0,
    gradient=0.0,
    backward=False,
    causal=False,
    coupled=False,
):
    shape = (1, len(length))

    def row(values):
        return np.broadcast_to(np.asarray(values, dtype=float), shape).copy()

    return RingCoefficients(
        start_s=row(0.0 if start is None else start),
        length=row(length),
        slope_s=row(slope),
        fixed_s=row(fixed),
        latency_s=row(latency),
        kv_s=row(kv),
        gradient_s=row(gradient),
        shared_kv_s=row(0.0),
        shared_gradient_s=row(0.0),
        backward=backward,
        contiguous_causal=causal,
        coupled=coupled,
    )


def test_hidden_transfers_leave_the_compute_of_the_slowest_group():
    # Groups of 3 and 1 seconds per token over blocks of 2 and 4 tokens: the slower computes 3 x (2 + 4) = 18 s. The
    # shortest step, 1 x 2 s, hides every transfer of at most 0.5 x 4 s.
    assert ring_finish_s(ring([2, 4], [3, 1], kv=0.5)).item() == 18


def test_no_barrier_between_steps():
    # Two groups whose steps are long in turns: 1 x 2, then 1 x 8 and 1 x 8, then 1 x 2. Each computes 10 s; a barrier
    # after every step would make it 16 s.
    assert ring_finish_s(ring([2, 8], [1, 1])).item() == 10


def test_transfers_longer_than_steps_decide():
    # Three equal groups, a step 1 s, a transfer 2 + 0.5 x 4 s: two transfers, then the last step.
    assert ring_finish_s(ring([4, 4, 4], [0.25] * 3, latency=2, kv=0.5)).item() == 2 * 4 + 1


def test_backward_sends_kv_and_gradients_together():
    # Two groups: nothing travels in step 0 (the last remote KV is still there), the gradient in step 1 beside the local
    # block. A step is 1 s, the gradient 3 s: 1 + 3.
    assert ring_finish_s(ring([4, 4], [0.25] * 2, kv=100, gradient=0.75, backward=True)).item() == 1 + 3
    # Three groups: step 0 beside one KV hop, step 1 beside the gradient alone, step 2 beside the last gradient.
    found = ring_finish_s(ring([4] * 3, [0.25] * 3, kv=0.5, gradient=0.75, backward=True)).item()
    assert found == max(1, 4 * 0.5) + max(1, 4 * 0.75) + max(1, 4 * 0.75)


def test_contiguous_causal_groups_do_what_they_see():
    # Three groups of 2 tokens, 1 s per token: the last one computes two whole blocks and half of its own.
    assert ring_finish_s(ring([2, 2, 2], [1, 1, 1], causal=True)).item() == 2 + 2 + 1
    starts, arrivals = ring_schedule(ring([2, 2, 2], [1, 1, 1], kv=0.1, causal=True))
    assert np.isneginf(arrivals[0][0, 0])  # nothing travels to the first group
    assert np.isfinite(arrivals[0][0, 1:]).all() and starts.shape == (3, 1, 3)


def test_late_groups_make_their_neighbours_wait():
    # Group 0 starts 5 s late; group 1 has its own block done after 1 s and waits for group 0's KV: 5 + 0.5 + 1.
    assert ring_finish_s(ring([1, 1], [1, 1], start=[5, 0], kv=0.5)).item() == 7
    _, arrivals = ring_schedule(ring([1, 1], [1, 1], start=[5, 0], kv=0.5))
    assert arrivals[0].tolist() == [[5.5, 5.5]]


def test_coupled_groups_wait_for_the_group_that_they_send_to():
    # Speeds as tokens, free transfers: a step takes as many seconds as its block has tokens, on every group. Uncoupled
    # nobody waits, and the ring takes the sum. The excess of the coupled ring depends on the order alone.
    for lengths, coupled_s in [((4, 4, 1, 1), 12), ((4, 1, 4, 1), 10), ((8, 4, 2, 1), 20), ((4, 3, 2, 1), 11)]:
        slopes = [1.0] * len(lengths)
        assert ring_finish_s(ring(lengths, slopes)).item() == sum(lengths)
        assert ring_finish_s(ring(lengths, slopes, coupled=True)).item() == coupled_s
        assert ring_finish_s(ring(lengths, slopes, coupled=True, backward=True)).item() == coupled_s
    # Two groups send to each other, and equal blocks keep all groups in step: no coupling.
    assert ring_finish_s(ring([9, 1], [1, 1], coupled=True)).item() == 10
    assert ring_finish_s(ring([3] * 5, [1, 1, 2, 1, 1], coupled=True)).item() == 30


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_a_simulation_of_every_message(backward, causal, coupled):
    rng = np.random.default_rng(7)
    for _ in range(100):
        size = int(rng.integers(2, 7))
        values = {key: rng.random(size) for key in ("slope", "start", "fixed", "kv")}
        gradient = rng.random(size) if backward else 0.0
        one = ring(
            rng.integers(1, 9, size),
            latency=rng.random(),
            gradient=gradient,
            backward=backward,
            causal=causal,
            coupled=coupled,
            **values,
        )
        assert ring_time._recurrence(one).item() == pytest.approx(_simulate(one), rel=1e-12)


def test_shortcuts_agree_with_the_recurrence():
    rng = np.random.default_rng(3)
    used = 0
    for _ in range(300):
        size = int(rng.integers(2, 9))
        one = ring(
            rng.uniform(1, 1.5, size),
            rng.uniform(1, 1.5, size),
            start=rng.random(size) * 0.2,
            kv=rng.random(size) * rng.choice([0.1, 2.0]),
        )
        exact = ring_time._recurrence(one).item()
        assert ring_finish_s(one).item() == pytest.approx(exact, rel=1e-12)
        used += exact == pytest.approx((one.start_s + one.slope_s * one.length.sum()).max())
    assert used > 50


def test_large_equal_rings_are_close_without_the_recurrence():
    rng = np.random.default_rng(5)
    size = ring_time.LARGE_RING + 1
    one = ring([2.0] * size, rng.uniform(0.5, 1.0, size), kv=rng.uniform(0.0, 2.0, size))
    assert ring_finish_s(one).item() == pytest.approx(ring_time._recurrence(one).item(), rel=2 / size)


def test_many_steps_are_worked_on_in_parts(monkeypatch):
    rng = np.random.default_rng(9)
    one = ring(rng.random(40), rng.random(40), kv=rng.random(40) * 3, gradient=rng.random(40), backward=True)
    whole = ring_time._recurrence(one)
    monkeypatch.setattr(ring_time, "STEP_TABLE", 40 * 7)
    assert ring_time._recurrence(one) == whole


def _simulate(one: RingCoefficients) -> float:
    """Rank by rank with dictionaries: who holds which block when."""
    length, size = one.length[0], one.length.shape[1]
    begin = {p: one.start_s[0][p] for p in range(size)}
    for step in range(size):
        end, arrival = {}, {}
        for p in range(size):
            block = (p + 1 + step) % size if one.backward else (p - step) % size
            following = (block + 1) % size if one.backward else (block - 1) % size
            neighbour = (p + 1) % size if one.backward else (p - 1) % size
            visible = 1.0
            if one.contiguous_causal:
                visible = 0.5 if block == p else float(block < p)
            end[p] = begin[p] + visible * (one.slope_s[0][p] * length[block] + one.fixed_s[0][p])
            sizes = []
            if step < size - (2 if one.backward else 1) and (not one.contiguous_causal or following < p):
                sizes.append(one.kv_s[0][p] * length[following])
            # Backward: what the neighbour has added for this block, if the block has been there.
            if one.backward and step > 0 and (not one.contiguous_causal or block <= p < size - 1):
                sizes.append(one.gradient_s[0][p] * length[block])
            if sizes:
                arrival[p] = max(begin[p], begin[neighbour]) + one.latency_s[0][p] + sum(sizes)
        receiver = {p: (p - 1) % size if one.backward else (p + 1) % size for p in range(size)}
        sent = {p: arrival.get(receiver[p], 0.0) if one.coupled else 0.0 for p in range(size)}
        begin = {p: max(end[p], arrival.get(p, 0.0), sent[p]) for p in range(size)}
    return max(begin.values())
