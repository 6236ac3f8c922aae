"""Attention over uneven shards equals attention of the whole sequence on one process, outputs and all gradients.

Tolerances are relative to the largest entry of the reference: float64 1e-12 and float32 1e-5 (sums of up to 90
products in another order; 1e-6 suffices for placements of documents), bfloat16 and float16 a few roundings of the
input type.
"""

import functools
import random
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hetero.errors import PeerError
from ds_hetero.runtime.attention import attention as attention_module
from ds_hetero.runtime.attention import channel as channel_module
from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import agree_on_batch
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.attention.kernels.interface import PackedBlocks
from ds_hetero.runtime.attention.kernels.torch_native import TorchKernel
from ds_hetero.runtime.attention.local_batch import LocalBatch
from ds_hetero.runtime.attention.reference import dense_attention
from ds_hetero.runtime.attention.ring import ring_backward
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.replica import make_replica
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.baselines import ring, usp
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule
from tests.dist.attention.cases import Case, case_by_heads, moved_case, random_case, routed_case
from tests.support import run_ranks

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def _few_or_many(few, many):
    """(ranks, cases): few of them in the quick suite, and these with many more in the slow one."""
    return pytest.mark.parametrize(
        ("world_size", "num_cases"), [*few, *(pytest.param(*each, marks=pytest.mark.slow) for each in many)]
    )


@pytest.mark.sweep(keep=2)
@_few_or_many(few=[(1, 10), (2, 12), (3, 12), (4, 16)], many=[(1, 40), (2, 100), (3, 100), (4, 100)])
def test_random_schedules_models_and_masks_equal_one_process(world_size, num_cases):
    run_ranks(_check_cases, world_size, num_cases, (torch.float64, torch.float32), timeout_s=240)


@pytest.mark.sweep(keep=2)
@_few_or_many(few=[(2, 10), (3, 15), (4, 20)], many=[(2, 60), (3, 80), (4, 80)])
def test_random_placements_of_documents_equal_one_process(world_size, num_cases):
    run_ranks(_check_cases, world_size, num_cases, (torch.float64, torch.float32), True, timeout_s=240)


@pytest.mark.sweep(keep=1)
@_few_or_many(few=[(3, 10), (4, 15)], many=[(3, 40), (4, 80), (6, 50)])
def test_random_routes_between_nodes_equal_one_process(world_size, num_cases):
    run_ranks(_check_routes, world_size, num_cases, timeout_s=240)


def test_routes_between_nodes_equal_one_process_where_lanes_yield():
    run_ranks(_check_routes, 4, 15, nccl_rules=False)


def _check_routes(rank, num_cases):
    world_size = dist.get_world_size()
    far_group = ProcessGroups().of(range(world_size), "between nodes")
    for seed in range(num_cases):
        case = routed_case(1000 * world_size + seed, world_size)
        replica = replace(make_replica(Plan.of_replicas([case.schedule])), far_group=far_group)
        for dtype in (torch.float64, torch.float32):
            _check_case(case, seed, replica, dtype, 1e-6)


@pytest.mark.parametrize(
    ("nodes", "per_node", "num_cases"),
    [
        (2, 1, 10),
        (2, 2, 10),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, 1, 30), (2, 2, 50), (2, 3, 30), (3, 1, 30)]),
    ],
)
def test_lanes_that_exchange_heads_between_nodes_equal_one_process(nodes, per_node, num_cases):
    counts = run_ranks(_check_by_heads, nodes * per_node, nodes, per_node, num_cases)
    assert counts[0] > num_cases // 3


def _check_by_heads(rank, nodes, per_node, num_cases):
    count = 0
    for seed in range(num_cases):
        case = case_by_heads(10_000 * nodes + 1000 * per_node + seed, nodes, per_node)
        replica = make_replica(Plan.of_replicas([case.schedule]))
        for dtype in (torch.float64, torch.float32):
            _check_case(case, seed, replica, dtype, 1e-6)
        count += any(lane.by_heads for lane in case.placement.lanes)
    return count


@pytest.mark.sweep(keep=1)
@_few_or_many(few=[(2, 8), (3, 10), (4, 16)], many=[(2, 40), (3, 60), (4, 100)])
def test_tokens_that_others_hold_outside_attention_equal_one_process(world_size, num_cases):
    """Two hundred placements in the slow suite, of every kind of lane; fp64 to 1e-12."""
    counts = run_ranks(_check_moves, world_size, num_cases, timeout_s=240)
    assert counts[0] > num_cases // 2


def _check_moves(rank, num_cases):
    world_size, count = dist.get_world_size(), 0
    far_group = ProcessGroups().of(range(world_size), "between nodes")
    for seed in range(num_cases):
        case = moved_case(seed, world_size)
        replica = replace(make_replica(Plan.of_replicas([case.schedule])), far_group=far_group)
        for dtype in (torch.float64, torch.float32):
            _check_case(case, seed, replica, dtype, TOLERANCE[torch.float32])
        count += bool(case.placement.moves)
    return count


def test_half_precision_equals_one_process():
    run_ranks(_check_cases, 3, 15, (torch.bfloat16, torch.float16))
    run_ranks(_check_cases, 3, 15, (torch.bfloat16, torch.float16), True)


def test_lanes_that_would_wait_yield_where_messages_have_tags():
    """The order in which lanes go on depends on what has arrived, which NCCL's rules would not allow; gloo's do."""
    run_ranks(_check_cases, 4, 20, (torch.float64,), True, nccl_rules=False)


def test_lanes_of_the_backward_in_reverse_equal_one_process():
    """`benchmarks.documents lane_order` measures this order beside the forward's."""
    run_ranks(_check_in_reverse, 4, 12)


def _check_in_reverse(rank, num_cases):
    backward = functools.partial(ring_backward, in_reverse=True)
    with mock.patch.object(attention_module, "ring_backward", backward):
        _check_cases(rank, num_cases, (torch.float64,), True)


@pytest.mark.parametrize("by_documents", [False, True])
def test_kernels_that_take_many_blocks_at_a_time_equal_one_process(by_documents):
    run_ranks(_check_cases, 3, 25, (torch.float64, torch.float32), by_documents, _Packing)


class _Packing(TorchKernel):
    """A kernel for CPU that is given all blocks of a kind at once."""

    def packs(self, q, scores):
        return True

    def forward(self, q, k, v, scores, blocks):
        if isinstance(blocks, PackedBlocks):
            assert all(band.window(*_sizes(*at)) == blocks.window for *at, band in blocks.parts())
        return super().forward(q, k, v, scores, blocks)


def _sizes(queries, keys):
    return queries.stop - queries.start, keys.stop - keys.start


def _check_cases(rank, num_cases, dtypes, by_documents=False, kernel=None):
    world_size = dist.get_world_size()
    for seed in range(num_cases):
        case = random_case(1000 * world_size + seed, world_size, by_documents)
        replica = make_replica(Plan.of_replicas([case.schedule]))
        for dtype in dtypes:
            _check_case(case, seed, replica, dtype, 1e-6 if by_documents else TOLERANCE[torch.float32], kernel)


def _check_case(case, seed, replica, dtype, fp32_tolerance, kernel=None):
    torch.manual_seed(seed)
    whole = case.tensors(dtype)
    expected = _reference(case, *(x if x is None else x.to(torch.float64) for x in whole))
    found = _distributed(case, replica, *whole, kernel=kernel)
    mine = case.placement.positions(replica.rank)
    # Where a query sees one key, dq is 0 and what is computed is rounding of dP: gradients share one scale.
    largest = [0.0 if x is None else x.abs().max().item() for x in expected]
    scales = [largest[0], *[max(largest[1:4])] * 3, largest[4]]
    for name, scale, want, have in zip(("out", "dq", "dk", "dv", "dsinks"), scales, expected, found, strict=True):
        if want is None:
            continue
        if name == "dsinks":  # every rank adds what its heads and its group's tokens give
            have = have.double()
            dist.all_reduce(have)
            part = want
        else:
            part = want[:, :, mine]
        if part.numel():
            error = (have.double() - part).abs().max().item() / max(scale, 1e-3)
            tolerance = fp32_tolerance if dtype is torch.float32 else TOLERANCE[dtype]
            assert error <= tolerance, f"seed {seed} {name} {dtype}: {error:.2e} in {case}"


def _reference(case: Case, q, k, v, dout, sinks) -> list[Tensor | None]:
    leaves = [x if x is None else x.requires_grad_() for x in (q, k, v, sinks)]
    out = dense_attention(*leaves[:3], case.visible[:, None], softcap=case.softcap, sinks_H=leaves[3])
    out.backward(dout)
    return [out.detach(), *(x if x is None else x.grad for x in leaves)]


def _distributed(case: Case, replica, q, k, v, dout, sinks, kernel=None) -> list[Tensor | None]:
    mine = case.placement.positions(replica.rank)
    q, k, v = (x[:, :, mine].detach().requires_grad_() for x in (q, k, v))
    sinks = None if sinks is None else sinks.detach().requires_grad_()
    shard = LocalBatch(
        batch_size=case.batch_size,
        tokens=len(mine),
        dtype=q.dtype,
        placement=case.placement,
        **case.shard(replica.rank),
    )
    batch = agree_on_batch(replica, shard)
    spec = AttentionSpec(
        kernel() if kernel else select(CPU, q.dtype, case.head_dim, case.softcap, None),
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        sinks=sinks,
    )
    out = attention(q, k, v, replica, batch, spec)
    out.backward(dout[:, :, mine].transpose(1, 2))
    return [out.detach().transpose(1, 2), q.grad, k.grad, v.grad, None if sinks is None else sinks.grad]


# --- recomputation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_recomputes_the_same(use_reentrant):
    run_ranks(_check_checkpointing, 3, use_reentrant)


def _check_checkpointing(rank, use_reentrant):
    case = random_case(7, 3)
    replica = make_replica(Plan.of_replicas([case.schedule]))
    torch.manual_seed(0)
    q, k, v, dout, _ = case.tensors(torch.float64)
    mine = stream_placement(case.schedule, case.length).positions(rank)
    batch = agree_on_batch(
        replica, LocalBatch(batch_size=case.batch_size, tokens=len(mine), dtype=q.dtype, **case.shard(rank))
    )
    spec = AttentionSpec(select(CPU, q.dtype, case.head_dim, None, None), causal=case.causal)

    def layers(q, k, v):
        for _ in range(2):
            q = attention(q, k, v, replica, batch, spec).transpose(1, 2)
        return q

    grads = []
    for run in (layers, lambda *x: checkpoint(layers, *x, use_reentrant=use_reentrant)):
        leaves = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
        run(*leaves).backward(dout[:, :, mine])
        grads.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# --- what travels ------------------------------------------------------------------------------------


def test_a_ring_sends_the_bytes_of_its_table():
    """Four ranks, 2 KV heads of size 4, 64 tokens: a KV block is 2 x 2 heads x 16 tokens x 4 in fp32 = 1024 bytes."""
    block = 2 * 2 * 16 * 4 * 4
    full = run_ranks(_count_bytes, 4, ring(4, 8, 2), False, None)
    assert [sent for sent, _ in full] == [3 * block] * 4
    assert [sent for _, sent in full] == [2 * block + 3 * block] * 4  # the last remote KV is kept; dK/dV go all the way
    contiguous = Schedule(num_heads=8, num_kv_heads=2, groups=ring(4, 8, 2).groups, layout="contiguous")
    causal = run_ranks(_count_bytes, 4, contiguous, True, None)
    assert [sent for sent, _ in causal] == [block, 2 * block, 3 * block, 0]  # nothing goes to earlier positions
    window = run_ranks(_count_bytes, 4, contiguous, True, 5)  # four tokens to the next rank, and no further
    assert [sent for sent, _ in window] == [block // 4] * 3 + [0]


def test_sub_rings_split_the_traffic_of_a_group():
    """2 x 2 ranks with equal cuts: two sub-rings, each with half the heads; one hop of 32 tokens."""
    sent = run_ranks(_count_bytes, 4, usp(4, 8, 2, 2), False, None)
    assert [forward for forward, _ in sent] == [2 * 1 * 32 * 4 * 4] * 4


def _count_bytes(rank, schedule, causal, window):
    sent = [0]
    original = channel_module.Channel.post

    def post(self, receives, sends):
        sent[0] += sum(message.tensor.nbytes for message in sends)
        return original(self, receives, sends)

    channel_module.Channel.post = post
    replica = make_replica(Plan.of_replicas([schedule]))
    mine = stream_placement(schedule, 64).positions(rank)
    batch = agree_on_batch(replica, LocalBatch(batch_size=1, tokens=len(mine), dtype=torch.float32))
    q = torch.randn(1, 8, len(mine), 4, requires_grad=True)
    k, v = torch.randn(2, 1, 2, len(mine), 4).unbind()
    spec = AttentionSpec(select(CPU, q.dtype, 4, None, None), causal=causal, window=window)
    out = attention(q, k.requires_grad_(), v.requires_grad_(), replica, batch, spec)
    forward, sent[0] = sent[0], 0
    out.sum().backward()
    return forward, sent[0]


# --- what is measured --------------------------------------------------------------------------------


def test_every_phase_is_named_and_work_is_counted_where_it_is_done():
    """Two groups of two, causal: 96 * 97 / 2 pairs a head, 8 heads of 4, shared out as the schedule says.

    The second group begins late, so that the first waits for its keys and values.
    """
    groups = (Group(ranks=(0, 1), tokens=(3, 1), heads=(5, 3)), Group(ranks=(2, 3), tokens=(2, 2), heads=(8, 0)))
    schedule = Schedule(num_heads=8, num_kv_heads=2, groups=groups)
    found = run_ranks(_trace, 4, schedule)
    phases = {"gather_sequence", "attention", "ring_finish", "scatter_output"}
    phases |= {"forward", "backward", "gather_output_heads", "attention_backward", "scatter_sequence"}
    for names, _ in found[:2]:
        assert "ring_wait" in names
    for names, times in found:
        assert phases <= names
        assert min(times.attention_s, times.all_to_all_s, times.ring_wait_s, times.model_s) > 0
        inside = times.attention_s + times.all_to_all_s + times.ring_wait_s + times.model_s
        assert inside < times.step_s
    flops = [times.attention_flops for _, times in found]
    assert sum(flops) == (4 + 10) * 8 * 4 * 96 * 97 // 2
    assert flops[3] == 0
    assert flops[0] / flops[1] == 5 / 3


def _trace(rank, schedule):
    replica = make_replica(Plan.of_replicas([schedule]))
    mine = stream_placement(schedule, 96).positions(rank)
    batch = agree_on_batch(replica, LocalBatch(batch_size=1, tokens=len(mine), dtype=torch.float32))
    spec, clock = AttentionSpec(select(CPU, torch.float32, 4, None, None)), StepClock(CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        q, kv = torch.randn(1, 8, len(mine), 4), torch.randn(2, 1, 2, len(mine), 4)
        leaves = [x.requires_grad_() for x in (q, *kv.unbind())]
        if rank == 3:
            time.sleep(0.5)
        with clock.forward(training=True):
            out = attention(*leaves, replica, batch, spec, clock)
        with clock.backward():
            out.sum().backward()
        clock.end_step()
    names = {event.key.removeprefix("ds_hetero.") for event in profile.key_averages() if "ds_hetero." in event.key}
    return names, clock.pop_finished()[0]


# --- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ring", "all-to-all"])
def test_a_rank_that_dies_stops_the_others_with_one_message(strategy):
    with pytest.raises(AssertionError) as failure:
        run_ranks(_die, 3, strategy, timeout_s=40)
    report = str(failure.value)
    assert report.count("PeerError: rank 1 gone: killed, or crashed without a last word") == 2


def _die(rank, strategy):
    groups = (
        tuple(Group(ranks=(r,), tokens=(1,), heads=(4,)) for r in range(3))
        if strategy == "ring"
        else (Group(ranks=(0, 1, 2), tokens=(1, 1, 1), heads=(2, 1, 1)),)
    )
    schedule = Schedule(num_heads=4, num_kv_heads=4, groups=groups)
    replica = make_replica(Plan.of_replicas([schedule]))
    mine = stream_placement(schedule, 48).positions(rank)
    batch = agree_on_batch(replica, LocalBatch(batch_size=1, tokens=len(mine), dtype=torch.float32))
    q, k, v = torch.randn(3, 1, 4, len(mine), 8)
    spec = AttentionSpec(select(CPU, q.dtype, 8, None, None))
    attention(q, k, v, replica, batch, spec)
    if rank == 1:
        raise RuntimeError("rank 1 runs out of luck")
    try:
        for _ in range(1000):
            attention(q, k, v, replica, batch, spec)
    except PeerError:
        raise
    random.seed(0)
