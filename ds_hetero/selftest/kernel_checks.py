"""Compare every attention kernel with the definition of attention in float64, output and gradients.

Ranks exchange no messages, since every rank tests its own kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_hetero.runtime.attention.attention import AttentionSpec
from ds_hetero.runtime.attention.kernels import KERNELS, AttentionKernel, KernelEntry
from ds_hetero.runtime.replica import Replica
from ds_hetero.selftest.attention_case import TOLERANCE, AttentionCase, largest_error
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session, dtype_name
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule

_LENGTH = 203
_DOCUMENTS = ((0, 60), (60, 61), (61, 203))
_TIMES = 5.0  # limits of a call that a kernel may take: it may be compiled first


class _Trial(NamedTuple):
    """One comparison of a kernel with the definition: attention case, KV heads, length, and a name for the report."""

    feature: str  # name of the tested feature, for the report
    case: AttentionCase
    num_kv_heads: int  # of four query heads
    length: int  # tokens

    def __str__(self) -> str:
        dtype = dtype_name(self.case.dtype)
        return f"{self.feature}, {dtype}, head size {self.case.head_dim}, {self.length} tokens"


def check_kernels(session: Session) -> Iterator[Line]:
    """Yield one line per kernel: grouped heads, windows, sinks, soft caps and documents, in float32 and in 16 bits."""
    for entry in KERNELS:
        name = f"kernel {entry.name}"
        if session.device.type == "cpu" and entry.name == "triton":
            yield Line(name, "skip", "Triton runs on GPUs")
            continue
        with session.watch.call(name, times=_TIMES):
            line = _check(entry, session)
        yield line


def _check(entry: KernelEntry, session: Session) -> Line:
    """Try all cases that the kernel supports, up to the first that fails."""
    name = f"kernel {entry.name}"
    num_tried = 0
    worst_error = 0.0  # largest error, as a fraction of the tolerance
    refusals = set()
    for trial in _trials(entry, session):
        case = trial.case
        refusal = entry.refusal(session.device, case.dtype, case.head_dim, case.spec.softcap)
        if refusal is not None:
            refusals.add(refusal)
            continue
        replica = _replica_of_one(session.rank, trial.num_kv_heads)
        try:
            error = largest_error(case, replica, trial.length, session.device)
        except Exception as failure:  # a kernel of another package may raise anything
            return Line(name, "fail", f"{trial}: {type(failure).__name__}: {failure}")
        num_tried += 1
        if not error <= TOLERANCE[case.dtype]:  # NaN fails, too
            return Line(name, "fail", f"{trial}: off by {error:.1e} of the largest value")
        worst_error = max(worst_error, error / TOLERANCE[case.dtype])
    if not num_tried:
        return Line(name, "skip", "; ".join(sorted(refusals)))
    not_tried = f"; not: {'; '.join(sorted(refusals))}" if refusals else ""
    return Line(name, "pass", f"{num_tried} cases, {100 * worst_error:.0f} % of the tolerance{not_tried}")


def _trials(entry: KernelEntry, session: Session) -> Iterator[_Trial]:
    """Yield every feature on a short sequence in both types, then two of the features on long sequences in 16 bits."""
    half_dtype = session.trained_dtype
    for head_dim in (128,) if session.quick else (64, 128):
        for dtype in (torch.float32, half_dtype):
            for feature, (spec, num_kv_heads) in _features(entry.make()).items():
                documents = _DOCUMENTS if feature == "documents" else None
                with_sinks = feature == "sinks"
                case = AttentionCase(spec, dtype, head_dim, documents=documents, with_sinks=with_sinks)
                yield _Trial(feature, case, num_kv_heads, _LENGTH)
        for length in _long_lengths(session):
            for feature in ("full", "causal, grouped heads"):
                spec, num_kv_heads = _features(entry.make())[feature]
                yield _Trial(feature, AttentionCase(spec, half_dtype, head_dim), num_kv_heads, length)


def _long_lengths(session: Session) -> tuple[int, ...]:
    """Return lengths of several blocks of a kernel and a remainder, as uneven plans give them to ranks.

    On GPUs: 8,256 is 64 above a multiple of 128, where cuDNN has returned NaN (pytorch#196678); 2,497 and 5,695 are
    from a plan. CPUs have time for one length only. It exceeds the 512 keys that torch's operator for CPUs takes at a
    time (kvSplitSize of FlashAttentionKernel.cpp).
    """
    if not session.is_on_gpu:
        return (601,)
    return (2497, 8256) if session.quick else (2497, 5695, 8256)


def _features(kernel: AttentionKernel) -> dict[str, tuple[AttentionSpec, int]]:
    """Return for every feature a layer that uses it, and its number of KV heads; it has four query heads."""
    return {
        "full": (AttentionSpec(kernel, causal=False), 4),
        "causal, grouped heads": (AttentionSpec(kernel), 2),
        "window": (AttentionSpec(kernel, window=33), 1),
        "sinks": (AttentionSpec(kernel), 2),
        "soft cap": (AttentionSpec(kernel, softcap=5.0), 2),
        "documents": (AttentionSpec(kernel), 2),
    }


def _replica_of_one(rank: int, num_kv_heads: int) -> Replica:
    """Return a replica of this rank alone, with four query heads."""
    group = Group(ranks=(rank,), tokens=(1,), heads=(4,))
    schedule = Schedule(num_heads=4, num_kv_heads=num_kv_heads, groups=(group,), layout="contiguous")
    world = dist.group.WORLD
    assert world is not None
    return Replica(plan=Plan.of_replicas([schedule]), rank=rank, sp_group=world, a2a_group=None)
