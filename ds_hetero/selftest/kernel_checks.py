"""Every attention kernel against its definition in float64, output and gradients, on each rank alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from ds_hetero.runtime.attention.attention import AttentionSpec
from ds_hetero.runtime.attention.kernels import KERNELS, AttentionKernel, KernelEntry
from ds_hetero.runtime.replica import Replica
from ds_hetero.selftest.attention_case import TOLERANCE, Case, largest_error
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session, dtype_name
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule

_LENGTH = 203
_DOCUMENTS = ((0, 60), (60, 61), (61, 203))
_TIMES = 5.0  # the limit of a call: a kernel may be compiled first


def check_kernels(session: Session) -> Iterator[Line]:
    """Yield one line per kernel: grouped heads, windows, sinks, soft caps and documents in every native type."""
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
    for feature, case, num_kv_heads, length in _cases(entry, session):
        block = (session.device, case.dtype, case.head_dim, case.spec.softcap)
        if (reason := entry.refusal(*block)) is not None:
            reasons.add(reason)
            continue
        replica = _replica_of_one(session.rank, num_kv_heads)
        try:
            error = largest_error(case, replica, length, session.device)
        except Exception as failure:  # a kernel of another package may raise anything
            return Line(name, "fail", f"{_text(feature, case, length)}: {type(failure).__name__}: {failure}")
        num_cases += 1
        if not error <= TOLERANCE[case.dtype]:
            return Line(name, "fail", f"{_text(feature, case, length)}: off by {error:.1e} of the largest value")
        worst = max(worst, error / TOLERANCE[case.dtype])
    if not num_cases:
        return Line(name, "skip", "; ".join(sorted(reasons)))
    left_out = f"; not: {'; '.join(sorted(reasons))}" if reasons else ""
    return Line(name, "pass", f"{num_cases} cases, {100 * worst:.0f} % of the tolerance{left_out}")


def _cases(entry: KernelEntry, session: Session) -> Iterator[tuple[str, Case, int, int]]:
    """Feature, case, KV heads of four query heads, tokens."""
    short = session.trained_dtype
    for head_dim in (128,) if session.quick else (64, 128):
        for dtype in (torch.float32, short):
            for feature, (spec, num_kv_heads) in _features(entry.make()).items():
                documents = _DOCUMENTS if feature == "documents" else None
                sinks = feature == "sinks"
                case = Case(spec, dtype, head_dim, documents=documents, with_sinks=sinks)
                yield feature, case, num_kv_heads, _LENGTH
        for length in _long_lengths(session):
            for feature in ("full", "causal, grouped heads"):
                spec, num_kv_heads = _features(entry.make())[feature]
                yield feature, Case(spec, short, head_dim), num_kv_heads, length


def _long_lengths(session: Session) -> tuple[int, ...]:
    """Several blocks of a kernel and a rest: what uneven shares are.

    8,256 is 64 beyond a multiple of 128, at which cuDNN has given NaN (pytorch#196678); 2,497 and 5,695 are shares of a
    plan. CPUs have time for one that is longer than the 512 keys of a block of torch's operator there (kvSplitSize of
    FlashAttentionKernel.cpp).
    """
    if not session.is_on_gpu:
        return (601,)
    return (2497, 8256) if session.quick else (2497, 5695, 8256)


def _features(kernel: AttentionKernel) -> dict[str, tuple[AttentionSpec, int]]:
    """Return the layer that uses a feature, and its KV heads."""
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


def _text(feature: str, case: Case, length: int) -> str:
    return f"{feature}, {dtype_name(case.dtype)}, head size {case.head_dim}, {length} tokens"
