"""Attention under uneven schedules against its definition, output and gradients: each kernel alone, then all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.runtime.attention.attention import AttentionSpec, attention
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.attention.kernels import KERNELS, AttentionKernel, KernelEntry, select
from ds_hetero.runtime.attention.reference import dense_attention
from ds_hetero.runtime.devices import has_native_bf16
from ds_hetero.runtime.documents import Documents, rows_of
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.replica import Replica, make_replica
from ds_hetero.selftest.meeting import Session
from ds_hetero.selftest.summary import Line
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule
from ds_hetero.values.splits import share

_LENGTH = 203
_DOCUMENTS = ((0, 60), (60, 61), (61, 203))
_TIMES = 5.0  # the limit of a call: a kernel may be compiled first


def check_kernels(session: Session) -> Iterator[Line]:
    """One line per kernel: grouped heads, windows, sinks, soft caps and documents in every native type."""
    for entry in KERNELS:
        name = f"kernel {entry.name}"
        if session.device.type == "cpu" and entry.name == "triton":
            yield Line(name, "skip", "Triton runs on GPUs")
            continue
        with session.watch.call(name, times=_TIMES):
            line = _check(entry, session)
        yield line


def _check(entry: KernelEntry, session: Session) -> Line:
    name, worst, reasons, num_cases = f"kernel {entry.name}", 0.0, set(), 0
    for feature, case, num_kv_heads in _cases(entry, session):
        block = (session.device, case.dtype, case.head_dim, case.spec.softcap)
        if (reason := entry.refusal(*block)) is not None:
            reasons.add(reason)
            continue
        replica = _replica_of_one(session.rank, num_kv_heads)
        try:
            error = largest_error(case, replica, _LENGTH, session.device)
        except Exception as failure:  # a kernel of another package may raise anything
            return Line(name, "fail", f"{_text(feature, case)}: {type(failure).__name__}: {failure}")
        num_cases += 1
        if not error <= TOLERANCE[case.dtype]:
            return Line(name, "fail", f"{_text(feature, case)}: off by {error:.1e} of the largest value")
        worst = max(worst, error / TOLERANCE[case.dtype])
    if not num_cases:
        return Line(name, "skip", "; ".join(sorted(reasons)))
    left_out = f"; not: {'; '.join(sorted(reasons))}" if reasons else ""
    return Line(name, "pass", f"{num_cases} cases, {100 * worst:.0f} % of the tolerance{left_out}")


def _cases(entry: KernelEntry, session: Session) -> Iterator[tuple[str, Case, int]]:
    """Feature, case, KV heads of four query heads."""
    short = torch.bfloat16 if has_native_bf16(session.device) else torch.float16
    for head_dim in (128,) if session.quick else (64, 128):
        for dtype in (torch.float32, short):
            for feature, (spec, num_kv_heads) in _features(entry.make()).items():
                documents = _DOCUMENTS if feature == "documents" else None
                sinks = feature == "sinks"
                yield feature, Case(spec, dtype, head_dim, documents=documents, with_sinks=sinks), num_kv_heads


def _features(kernel: AttentionKernel) -> dict[str, tuple[AttentionSpec, int]]:
    """The layer that uses a feature, and its KV heads."""
    return {
        "full": (AttentionSpec(kernel, causal=False), 4),
        "causal, grouped heads": (AttentionSpec(kernel), 2),
        "window": (AttentionSpec(kernel, window=33), 1),
        "sinks": (AttentionSpec(kernel), 2),
        "soft cap": (AttentionSpec(kernel, softcap=5.0), 2),
        "documents": (AttentionSpec(kernel), 2),
    }


def _replica_of_one(rank: int, num_kv_heads: int) -> Replica:
    group = Group(ranks=(rank,), tokens=(1,), heads=(4,))
    schedule = Schedule(num_heads=4, num_kv_heads=num_kv_heads, groups=(group,), layout="contiguous")
    world = dist.group.WORLD
    assert world is not None
    return Replica(plan=Plan.of_replicas([schedule]), rank=rank, sp_group=world, a2a_group=None)


def _text(feature: str, case: Case) -> str:
    return f"{feature}, {str(case.dtype).removeprefix('torch.')}, head size {case.head_dim}"


_HEAD_DIM = 64


def check_exchange(session: Session) -> Iterator[Line]:
    """One line per schedule. Each makes the process groups that training makes."""
    if session.size == 1:
        yield Line("ragged exchange, ring", "skip", "one process has nobody to exchange with")
        return
    kernel = select(session.device, torch.float32, _HEAD_DIM, None, None)
    case, length = Case(AttentionSpec(kernel), torch.float32, _HEAD_DIM), length_for(session.size)
    groups = ProcessGroups()
    for name, schedule in uneven_schedules(session.size).items():
        with session.watch.call(f"process groups of the {name}"):
            replica = make_replica(Plan.of_replicas([schedule]), groups)
        with session.watch.call(name):
            error = largest_error(case, replica, length, session.device)
        tolerance = TOLERANCE[torch.float32]
        if error <= tolerance:
            yield Line(
                name, "pass", f"forward and backward, tokens {_tokens(schedule.tokens(length_for(session.size)))}"
            )
        else:
            yield Line(name, "fail", f"off by {error:.1e} of the largest value, allowed {tolerance:.0e}")


def _tokens(tokens: dict[int, int]) -> str:
    counts = [str(count) for count in tokens.values()]
    return "+".join(counts if len(counts) <= 8 else [*counts[:7], "..."])


# Of the largest entry. Sums in another order, and for 16-bit types a few roundings of inputs, outputs and gradients.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, eq=False)
class Case:
    """Case of attention."""

    spec: AttentionSpec  # of the layer, without sinks
    dtype: torch.dtype
    head_dim: int  # D
    documents: Documents | None = None  # of the one row; None for one document
    with_sinks: bool = False  # a sink for every head


def largest_error(case: Case, replica: Replica, length: int, device: torch.device) -> float:
    """Error of this rank's part of output and gradients, relative to the largest entry of each.

    Caller: every rank of the replica.
    Collectives: those of `attention`, forward and backward.
    """
    placement = stream_placement(replica.schedule, length)
    documents = case.documents or ((0, length),)
    layout = batch_layout(placement, rows_of([documents]))
    whole, sinks = _tensors(case, replica, length, device)
    expected = _expected(case, documents, whole, sinks)
    mine = torch.tensor(placement.positions(replica.rank), dtype=torch.long, device=device)
    q, k, v = (x.index_select(2, mine).detach().requires_grad_() for x in whole[:3])
    out = attention(q, k, v, replica, layout, replace(case.spec, sinks=sinks))
    torch.autograd.backward(out, whole[3].index_select(2, mine).transpose(1, 2))
    found = [out.detach().transpose(1, 2), q.grad, k.grad, v.grad]
    # Where a query sees one key dq is 0, and what is computed is the rounding of dP: gradients share one scale.
    scales = [expected[0].abs().max(), *[max(x.abs().max() for x in expected[1:])] * 3]
    errors = [
        (have.double() - want.index_select(2, mine)).abs().max() / scale
        for have, want, scale in zip(found, expected, scales, strict=True)
        if have is not None and have.numel()
    ]
    return max((float(error) for error in errors), default=0.0)


def _tensors(
    case: Case, replica: Replica, length: int, device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
    """Whole q, k, v and gradient of the output, alike on all ranks, and the sinks."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = replica.schedule.num_heads, replica.schedule.num_kv_heads
    q, k, v, dout = (
        torch.randn(1, heads, length, case.head_dim, generator=generator).to(device, case.dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    sinks = torch.linspace(-1, 1, num_heads, device=device, dtype=case.dtype) if case.with_sinks else None
    return (q, k, v, dout), sinks


def _expected(
    case: Case, documents: Documents, whole: tuple[Tensor, Tensor, Tensor, Tensor], sinks: Tensor | None
) -> list[Tensor]:
    """Output, dq, dk and dv of the whole sequence in float64."""
    q, k, v = (x.double().requires_grad_() for x in whole[:3])
    number = torch.empty(q.shape[2], dtype=torch.long, device=q.device)
    for index, (start, stop) in enumerate(documents):
        number[start:stop] = index
    at = torch.arange(q.shape[2], device=q.device)
    visible = number[:, None] == number[None, :]
    if case.spec.causal:
        visible &= at[None, :] <= at[:, None]
    if case.spec.window is not None:
        visible &= at[None, :] > at[:, None] - case.spec.window
    wide_sinks = None if sinks is None else sinks.double()
    out = dense_attention(q, k, v, visible, softcap=case.spec.softcap, sinks_H=wide_sinks)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3].double())]


NUM_HEADS, NUM_KV_HEADS = 8, 4


def uneven_schedules(size: int) -> dict[str, Schedule]:
    """By name: one group, a ring of single ranks, and, from three ranks on, a ring of two groups with other cuts."""
    ranks = tuple(range(size))
    schedules = {"ragged exchange": _schedule([ranks]), "ring": _schedule([(rank,) for rank in ranks])}
    if size >= 3:
        schedules["sub-rings"] = _schedule([ranks[: size // 2], ranks[size // 2 :]])
    return schedules


def length_for(size: int) -> int:
    """Tokens of a sequence that gives every rank some, and divides by nothing."""
    return 24 * size + 7


def _schedule(groups: list[tuple[int, ...]]) -> Schedule:
    made = []
    for index, ranks in enumerate(groups):
        weights = [1 + (rank + index) % 3 for rank in ranks]
        made.append(Group(ranks=ranks, tokens=tuple(weights[::-1]), heads=share(NUM_HEADS, weights)))
    return Schedule(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, groups=tuple(made), layout="zigzag")
