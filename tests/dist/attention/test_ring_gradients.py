"""``"ring_gradients": "bf16"``: half the bytes of dK/dV on the wire, and an error below the bound that the job names.

The bound is that of `ds_hetero.runtime.attention.lane_mail.GradientBlocks`: K - 1 roundings of the sum of the parts. In
float64 nothing else is rounded, so the difference to the exact run is the error of the messages alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.documents.wire import counted_bytes
from ds_hetero.decision.chosen_text import BF16_ROUNDOFF
from ds_hetero.planner.document_search.traffic import KVBytes, ring_bytes
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import agree_on_batch, batch_layout
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.attention.local_batch import LocalBatch
from ds_hetero.runtime.attention.reference import dense_attention
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.replica import Replica, make_replica
from ds_hetero.values.baselines import proportional
from ds_hetero.values.placement import Rows, stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.section import RingGradients
from tests.dist.attention.cases import Case, case_by_heads, random_case, routed_case
from tests.support import run_ranks

CPU = torch.device("cpu")
NODES = (0, 0, 1, 1)


def test_bf16_has_the_roundoff_that_the_bound_assumes() -> None:
    numbers = 1 + torch.arange(2**12, dtype=torch.float64) / 2**12
    relative_error = (numbers.to(torch.bfloat16).double() - numbers).abs() / numbers
    assert 0.98 * BF16_ROUNDOFF < relative_error.max() <= BF16_ROUNDOFF


def test_the_error_of_rounded_gradients_is_below_the_bound_that_is_named() -> None:
    """Streams, documents, routes between nodes with proxies, shared KV heads; the rest of the step to the bit."""
    for largest_share, relative_error in run_ranks(_check_bound, 4):
        assert 0.05 < largest_share <= 1  # of the bound; the largest of all elements
        assert 1e-4 < relative_error < BF16_ROUNDOFF  # of a ring of four: root mean squares of error and gradient


def _check_bound(rank: int) -> tuple[float, float]:
    far_group = ProcessGroups().of(range(4), "between nodes")
    cases = [random_case(seed, 4) for seed in range(4000, 4008)] + [random_case(seed, 4, True) for seed in range(4)]
    cases += [routed_case(seed, 4) for seed in range(8)] + [case_by_heads(seed, 2, 2) for seed in range(3)]
    cases.append(_ring_of_four())
    largest_share = relative_error = 0.0
    for seed, case in enumerate(cases):
        replica = replace(make_replica(Plan.of_replicas([case.schedule])), far_group=far_group)
        torch.manual_seed(seed)
        whole = case.tensors(torch.float64)
        exact = _train(case, replica, whole, "fp32")
        rounded = _train(case, replica, whole, "bf16")
        for index in (0, 1):
            assert torch.equal(exact[index], rounded[index]), f"seed {seed}, out and dq"
        hops = case.schedule.ring_size - 1
        mine = case.placement.positions(rank)
        for want, have, magnitude in zip(exact[2:4], rounded[2:4], _magnitudes(case, whole), strict=True):
            bound = ((1 + BF16_ROUNDOFF) ** hops - 1) * magnitude[:, :, mine] + 1e-13 * whole[3].abs().max()
            error = (have - want).abs()
            assert (error <= bound).all(), f"seed {seed}: {(error / bound).max().item()} of the bound in {case}"
            if error.numel() and hops:
                largest_share = max(largest_share, (error / bound).max().item())
    for want, have in zip(exact[2:4], rounded[2:4], strict=True):
        relative_error = max(relative_error, ((have - want).norm() / want.norm()).item())
    return largest_share, relative_error


def _ring_of_four() -> Case:
    """A causal zigzag ring of four ranks with unlike shares, without documents."""
    schedule = replace(proportional((4, 3, 2, 1), 4, 2), layout="zigzag")
    return Case(
        schedule=schedule,
        placement=stream_placement(schedule, 80),
        length=80,
        batch_size=1,
        head_dim=16,
        causal=True,
        window=None,
        softcap=None,
        sinks=False,
        documents=torch.zeros(1, 80, dtype=torch.long),
        agreed={"position_ids": torch.arange(80)[None]},
    )


def _train(
    case: Case, replica: Replica, whole: tuple[Tensor, ...], ring_gradients: RingGradients
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, dq, dk and dv of this rank's tokens."""
    q, k, v, dout, sinks = whole
    mine = case.placement.positions(replica.rank)
    local = LocalBatch(
        batch_size=case.batch_size,
        tokens=len(mine),
        dtype=q.dtype,
        placement=case.placement,
        **case.shard(replica.rank),
    )
    spec = AttentionSpec(
        select(CPU, q.dtype, case.head_dim, case.softcap, None),
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        sinks=sinks,
        ring_gradients=ring_gradients,
    )
    leaves = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, replica, agree_on_batch(replica, local), spec)
    out.backward(dout[:, :, mine].transpose(1, 2))
    dq, dk, dv = (leaf.grad for leaf in leaves)
    assert dq is not None and dk is not None and dv is not None
    return out.detach(), dq, dk, dv


def _magnitudes(case: Case, whole: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the sums of the magnitudes of the parts of dK and dV that travel, [B, G, L, D] each.

    A part is that of the queries of one group and one query head; a group's own keys do not travel for it.
    """
    q, k, v, dout, sinks = whole
    per_kv_head = case.schedule.queries_per_kv_head
    leaves = [x.repeat_interleave(per_kv_head, dim=1).requires_grad_() for x in (k, v)]
    out = dense_attention(q, *leaves, case.visible[:, None], softcap=case.softcap, sinks_H=sinks)
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    for group in case.schedule.ring_groups:
        positions = torch.cat(
            [torch.as_tensor(case.placement.positions(rank), dtype=torch.long) for rank in group.ranks]
        )
        of_group = torch.zeros(case.length, 1, dtype=torch.bool)
        of_group[positions] = True
        parts = torch.autograd.grad(out, leaves, dout * of_group, retain_graph=True)
        for total, part in zip(sums, parts, strict=True):
            total += part.abs() * ~of_group
    dk, dv = (total.unflatten(1, (-1, per_kv_head)).sum(2) for total in sums)
    return dk, dv


def test_rounded_gradients_have_half_the_bytes_of_the_exact_ones_on_every_kind_of_link() -> None:
    run_ranks(_check_bytes, 4)


def _check_bytes(rank: int) -> None:
    length, head_dim = 96, 8
    schedule = proportional((4, 3, 2, 1), 4, 2)
    replica = make_replica(Plan.of_replicas([schedule]))
    placement = stream_placement(schedule, length).with_rows((Rows(0, 1, ((0, length),)),))
    q = torch.randn(1, schedule.num_heads, placement.tokens(rank), head_dim, requires_grad=True)
    k, v = (torch.randn(1, schedule.num_kv_heads, q.shape[2], head_dim, requires_grad=True) for _ in range(2))
    layout, kernel = batch_layout(placement, placement.rows), select(CPU, q.dtype, head_dim, None, None)
    sent, once = {}, 2 * head_dim * 4
    for ring_gradients, gradient_bytes in (("fp32", once), ("bf16", once // 2)):
        spec = AttentionSpec(kernel, ring_gradients=ring_gradients)
        sent[ring_gradients] = counted_bytes(
            lambda spec=spec: attention(q, k, v, replica, layout, spec).sum().backward(), NODES
        )
        assert sent[ring_gradients] == ring_bytes(placement, NODES, KVBytes(once, once, gradient_bytes))
    of_keys = ring_bytes(placement, NODES, KVBytes(once, once, 0))
    for kind, num_bytes in of_keys.items():
        assert 2 * (sent["bf16"][kind] - num_bytes) == sent["fp32"][kind] - num_bytes > 0
    dist.barrier()
