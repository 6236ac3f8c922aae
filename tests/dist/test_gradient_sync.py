"""The bucketer on real ranks: exact sums for random layouts, training of tensor-parallel replicas of unlike degree."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gradient_sync import ring_reduce_scatter_elements
from benchmarks.measure.traffic import Traffic
from ds_hetero.errors import SyncError
from ds_hetero.gradient_sync import AsymmetricGradientSync
from ds_hetero.gradient_sync.model_layouts import tensor_parallel_layouts
from ds_hetero.gradient_sync.shards import Shard
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout
from ds_hetero.values.splits import share
from tests.support import run_ranks

WORLD = 5
REPLICAS = ((3,), (0, 4), (2, 1))


def test_sums_and_values_of_random_layouts_are_exact():
    run_ranks(_check_random_layouts, WORLD)


def _check_random_layouts(rank):
    for seed in range(12):
        draw = random.Random(seed)
        dtypes = draw.choices([torch.float32, torch.bfloat16, torch.float64], k=4)
        layouts = {f"p{i}": _random_layout(draw) for i in range(4)}
        torch.manual_seed(seed)
        values = {n: torch.randint(-9, 9, v.shape).to(d) for (n, v), d in zip(layouts.items(), dtypes, strict=True)}
        parameters = {
            n: torch.nn.Parameter(_local(values[n], layout, rank, junk=rank)) for n, layout in layouts.items()
        }
        sync = AsymmetricGradientSync(
            parameters, layouts, bucket_bytes=draw.choice([1, 64, 1 << 20]), alignment=draw.choice([1, 4])
        )
        _check_values(parameters, values, layouts, rank)

        gradients = [{n: torch.randint(-9, 9, v.shape).to(v) for n, v in values.items()} for _ in REPLICAS]
        mine = next((i for i, ranks in enumerate(REPLICAS) if rank in ranks), None)
        loss = sum((p * _share_of(gradients[mine][n], layouts[n], rank)).sum() for n, p in parameters.items())
        loss.backward()
        sync.finish()
        with torch.no_grad():
            for owned in sync.owned.values():
                owned += owned.grad
        sync.gather()
        sums = {n: _summed(layout, [g[n] for g in gradients]) for n, layout in layouts.items()}
        assert all(torch.equal(sums[n], sum(g[n].double() for g in gradients)) for n in layouts)
        expected = {n: (v.double() + sums[n]).to(v.dtype) for n, v in values.items()}
        _check_values(parameters, expected, layouts, rank)
        sync.close()


def _summed(layout, gradient_by_replica):
    """The plain twin, given what every rank holds."""
    held = {r: _share_of(g, layout, r) for g, ranks in zip(gradient_by_replica, REPLICAS, strict=True) for r in ranks}
    return summed_gradient(layout, held, [1.0] * len(REPLICAS))


def _check_values(parameters, values, layouts, rank):
    for name, parameter in parameters.items():
        assert torch.equal(parameter, _local(values[name], layouts[name], rank, junk=None)), (rank, name)


def _random_layout(draw):
    shape = tuple(draw.randrange(0, 9) for _ in range(draw.randrange(0, 4)))
    owners = draw.choice([None, _random_cut(draw, shape, draw.sample(range(WORLD), 3), copies=False)])
    return ParameterLayout(shape, tuple(_random_cut(draw, shape, ranks) for ranks in REPLICAS), owners)


def _random_cut(draw, shape, ranks, copies=True):
    if copies and draw.random() < 0.4:
        return Cut.whole(shape, *ranks, partial=draw.random() < 0.5)
    dim = draw.choice([None, *range(len(shape))])
    units = torch.Size(shape).numel() if dim is None else shape[dim]
    return Cut.along(dim, ranks, share(units, [draw.random() for _ in ranks]))


def _local(whole, layout, rank, junk):
    """What ``rank`` holds of ``whole``; with ``junk`` unless it is of the first replica."""
    for cut in layout.cuts:
        extent = cut.part(rank)
        if extent is None:
            continue
        local = whole if cut.dim is not None or extent[1] - extent[0] == whole.numel() else whole.reshape(-1)
        if local.dim() and (cut.dim is not None or local is not whole):
            local = local.narrow(cut.dim or 0, extent[0], extent[1] - extent[0])
        return local.clone() if junk is None or rank in REPLICAS[0] else torch.full_like(local, junk)
    return whole[:0].clone() if whole.dim() else whole.clone()


def _share_of(gradient, layout, rank):
    """A rank's gradient: of partial copies the first has 2 g, the others add up to - g."""
    local = _local(gradient, layout, rank, junk=None)
    for cut in layout.cuts:
        if rank in cut.ranks and cut.partial and len(cut.holders[0]) > 1:
            return 2 * local if rank == cut.holders[0][0] else -local
    return local


# --- replicas of tensor-parallel degree 1, 2 and 4 --------------------------------------------------


class Block(nn.Module):
    """Attention and an MLP, cut by heads and by hidden units as torch's tensor parallelism does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # of a bias the gradient is rounding alone, which Adam inflates
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x_BSW):
        y = self.norm(x_BSW)
        q, k, v = (layer(y).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BSW = x_BSW + self.out(heads)
        return x_BSW + self.down(F.gelu(self.up(x_BSW)))


WIDTH = 16  # 8 heads of 2
DEGREES = ((0,), (1, 2), (3, 4, 5, 6))
PLAN = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel) | dict.fromkeys(("out", "down"), RowwiseParallel)
STEPS = 4


def test_replicas_of_degree_one_two_and_four_train_as_one_process():
    run_ranks(_check_training, 7)


def _check_training(rank):
    meshes = [DeviceMesh("cpu", torch.tensor(ranks)) for ranks in DEGREES]
    mine = next(i for i, ranks in enumerate(DEGREES) if rank in ranks)
    for accumulation in (1, 2):
        _train(meshes[mine], mine, accumulation)


def _train(mesh, mine, accumulation):
    torch.manual_seed(mine)  # replicas begin apart; the first one's values count
    model = nn.Sequential(Block(), Block()).double()
    parallelize_module(model, mesh, {f"{block}.{layer}": style() for block in "01" for layer, style in PLAN.items()})
    parameters = dict(model.named_parameters())
    layouts = tensor_parallel_layouts(parameters, DEGREES[mine])
    sync = AsymmetricGradientSync(parameters, layouts, bucket_bytes=4096, alignment=4)
    optimizer = torch.optim.AdamW(sync.owned.values(), lr=1e-2)

    torch.manual_seed(0)
    whole = nn.Sequential(Block(), Block()).double()
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(4):
        torch.manual_seed(step)
        sizes = [[1 + (step == mb), 1 + mb] for mb in range(3)]  # sequences of a replica's micro-batches
        batches = [[torch.randn(n, 5, WIDTH).double() for n in replica[-accumulation:]] for replica in sizes]
        counted = [batches[0], [], batches[2]] if step == 3 else batches  # at last a replica has no valid label
        tokens = sum(map(len, counted[mine])) * 5

        sync.start(tokens)
        for i, batch in enumerate(batches[mine]):
            with sync.no_sync() if i < accumulation - 1 else nullcontext():
                (model(batch).square().sum() / (tokens or torch.nan)).backward()
        sync.finish()
        norm = sync.grad_norm()
        optimizer.step()
        sync.gather()

        reference.zero_grad()
        batch = torch.cat([batch for replica in counted for batch in replica])
        (whole(batch).square().sum() / (len(batch) * 5)).backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
        reference.step()
        assert norm == pytest.approx(expected.item(), rel=1e-12), step
    for (name, found), expected in zip(parameters.items(), whole.parameters(), strict=True):
        found = found.full_tensor() if isinstance(found, DTensor) else found
        # float64: what differs is the order of additions
        assert torch.allclose(found, expected, rtol=0, atol=1e-12), (name, (found - expected).abs().max())
    sync.close()


# --- 16 bits ----------------------------------------------------------------------------------------


def test_16_bit_gradients_are_added_up_in_fp32():
    run_ranks(_check_bf16, 3)


def _check_bf16(rank):
    layouts = {"w": ParameterLayout((6,), tuple(Cut.whole((6,), r) for r in range(3)))}
    parameter = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    sync = AsymmetricGradientSync({"w": parameter}, layouts, alignment=1)
    (parameter * (1.0, 2**-8, 2**-8)[rank]).sum().backward()  # in bf16, 1 + 2**-8 is 1
    sync.finish()
    assert sync.owned["w"].grad.tolist() == [1 + 2**-7] * 2
    for gradient in (256, 1, 1):  # in bf16, 256 + 1 is 256
        with sync.no_sync():
            (parameter * gradient).sum().backward()
    sync.finish()  # nothing outside no_sync: what added up inside counts
    assert sync.owned["w"].grad.tolist() == [3 * 258] * 2

    sync.owned["w"].data.fill_(1 + 2**-7 + 2**-12)  # kept in fp32, handed out in bf16
    sync.gather()
    assert parameter.tolist() == [1 + 2**-7] * 6
    assert sync.owned["w"].tolist() == [1 + 2**-7 + 2**-12] * 2


# --- overlap ----------------------------------------------------------------------------------------


def test_a_bucket_arrives_while_the_backward_runs():
    run_ranks(_check_overlap, 3)


def _check_overlap(rank):
    """The backward of the first layer waits for the buckets of the last: without overlap it would wait in vain."""
    model = nn.Sequential(nn.Linear(64, 64), _WaitInBackward(), nn.Linear(64, 64))
    names = dict(model.named_parameters())
    cuts = Cut.whole((64, 64), 0), Cut.whole((64, 64), 1), Cut.whole((64, 64), 2)
    layouts = {name: ParameterLayout((64, 64), cuts) for name in ("0.weight", "2.weight")}
    sync = AsymmetricGradientSync(names, layouts, bucket_bytes=1024)

    def first_bucket_has_arrived() -> bool:
        return sync._next_reduction == 1 and (not sync._in_flight or sync._in_flight[0].has_arrived())

    model[1].has_arrived = first_bucket_has_arrived
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            with record_function("the backward"):
                model(torch.ones(2, 64)).sum().backward()
            sync.finish()
        (backward,) = [event.time_range for event in trace.events() if event.name == "the backward"]
        sent = [event.time_range for event in trace.events() if event.name.startswith("ds_hetero: gradients")]
        assert len(sent) == 2
        assert all(backward.start < bucket.start < backward.end for bucket in sent)
    assert model[1].waited == 3
    assert torch.equal(names["2.bias"].grad, torch.full((64,), 6.0))  # not in the layouts: left alone


class _WaitInBackward(nn.Module):
    waited = 0

    def forward(self, x):
        x.register_hook(self._wait)
        return x

    def _wait(self, grad):
        deadline = time.monotonic() + 30
        while not self.has_arrived():
            assert time.monotonic() < deadline, "no bucket has arrived since its gradients came"
            time.sleep(0.001)
        self.waited += 1


# --- bytes ------------------------------------------------------------------------------------------


def test_bytes_sent_are_those_of_the_symmetric_algorithm():
    sent = run_ranks(_count_bytes, 7)
    held = 96 * 64 * 4
    for ranks in DEGREES:
        for rank in ranks:
            symmetric = ring_reduce_scatter_elements(held // len(ranks), len(DEGREES))
            assert sent[rank] == (symmetric, symmetric)


def _count_bytes(rank):
    shape = (96, 64)
    cuts = (
        Cut.whole(shape, 0),
        Cut.along(1, (1, 2), (32, 32)),
        Cut.along(0, (3, 4, 5, 6), (24,) * 4),
    )
    layouts = {"w": ParameterLayout(shape, cuts)}
    parameter = nn.Parameter(torch.zeros(Shard.of(layouts["w"], rank).shape))
    sync = AsymmetricGradientSync({"w": parameter}, layouts)
    with Traffic() as reduced:
        parameter.sum().backward()
        sync.finish()
    with Traffic() as gathered:
        sync.gather()
    assert {*reduced.calls, *gathered.calls} == {"alltoall_base"}
    return reduced.sent_bytes.total(), gathered.sent_bytes.total()


# --- errors -----------------------------------------------------------------------------------------


def test_a_faulty_layout_is_refused_on_every_rank():
    for messages in zip(*run_ranks(_provoke, 3), strict=True):
        assert len(set(messages)) == 1, messages


def _provoke(rank):
    cuts = tuple(Cut.whole((4,), r) for r in range(3))
    good = {"a": ParameterLayout((4,), cuts), "b": ParameterLayout((2,), tuple(Cut.whole((2,), r) for r in range(3)))}

    def make(sizes=(4, 2), layouts=good, dtype=torch.float32, **settings):
        parameters = {n: nn.Parameter(torch.zeros(size, dtype=dtype)) for n, size in zip("ab", sizes, strict=False)}
        return parameters, AsymmetricGradientSync(parameters, layouts, **settings)

    messages = [
        _message(
            SyncError,
            r"holds a shard of shape \[4\] of a, but its parameter has shape \[5\]",
            make,
            (4 + (rank == 1), 2),
        ),
        _message(SyncError, "rank 2 holds .* of b, but `parameters` has no such", make, (4, 2)[: 1 + (rank != 2)]),
        _message(SyncError, "differ between ranks: fingerprints", make, bucket_bytes=100 + rank),
        _message(SyncError, "differ between ranks", make, layouts=dict(sorted(good.items(), reverse=rank == 0))),
        _message(
            SyncError,
            "a is torch.float64 on rank 1, but torch.float32",
            make,
            dtype=(torch.float32, torch.float64)[rank % 2],
        ),
        _message(
            SyncError, r"has ranks \[3\]", make, layouts={"a": ParameterLayout((4,), (*cuts, Cut.whole((4,), 3)))}
        ),
        _message(
            SyncError,
            r"one cut for every replica.* \[2, 3\]",
            make,
            layouts=good | {"b": ParameterLayout((2,), good["b"].cuts[:2])},
        ),
        _message(
            SyncError,
            "rank 2 is in replica 2, but the layout of b has it in 1",
            make,
            layouts=good | {"b": ParameterLayout((2,), tuple(good["b"].cuts[r] for r in (0, 2, 1)))},
        ),
    ]
    parameters, sync = make()
    with sync.no_sync():
        parameters["a"].sum().backward()
    parameters["a"].sum().backward()
    messages.append(
        _message(SyncError, "two backwards have made a gradient of a in one step", parameters["a"].sum().backward)
    )
    messages.append(_message(SyncError, "before this backward", sync.start, tokens=1))
    sync.finish()  # and b counts as zeros
    assert sync.owned.keys() <= {"a", "b"}
    assert all(owned.grad.unique().tolist() == [6.0 if name == "a" else 0.0] for name, owned in sync.owned.items())
    _, sync = make(layouts={"a": ParameterLayout((4,), (Cut.whole((4,), 0, 1), Cut.whole((4,), 2)))})
    sync.start(tokens=5 + rank)
    messages.append(_message(SyncError, r"the tokens \{0: 5, 1: 6\} by rank from the ranks of replica 0", sync.finish))
    return messages


def _message(error, pattern, fn, *args, **kwargs):
    with pytest.raises(error, match=pattern) as caught:
        fn(*args, **kwargs)
    return str(caught.value)


def summed_gradient(layout: ParameterLayout, gradients: Mapping[int, Tensor], weights: Sequence[float]) -> Tensor:
    """Sum the gradients of one parameter over its replicas.

    Args:
        layout: which rank holds what of the parameter.
        gradients: of its shard, by every rank that holds one.
        weights: one per replica.

    Returns:
        ``[*layout.shape]``, in float64.
    """
    replicas = [_assemble(layout.shape, cut, gradients) for cut in layout.cuts]
    return torch.stack([weight * whole for weight, whole in zip(weights, replicas, strict=True)]).sum(dim=0)


def _assemble(shape: tuple[int, ...], cut: Cut, gradients: Mapping[int, Tensor]) -> Tensor:
    """Put the gradient of one replica together: copies of a part are equal, or partial sums that add up."""
    parts = []
    for holders in cut.holders:
        copies = torch.stack([gradients[rank].double() for rank in holders])
        parts.append(copies.sum(dim=0) if cut.partial else copies[0])
    if cut.dim is None:
        return torch.cat([part.reshape(-1) for part in parts]).view(shape)
    return torch.cat(parts, dim=cut.dim)
