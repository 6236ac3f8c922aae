"""Attention over all ranks under uneven schedules against its definition, output and gradients.

Each schedule is tried twice: in float32 on a short sequence, where the tolerance is small, and in the 16-bit type of
training on a long one, with the kernel that training would choose there. The two are other operators on GPUs, whose
streams and sizes of messages are other ones, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ds_hetero.runtime.attention.attention import AttentionSpec
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.replica import Replica, make_replica
from ds_hetero.selftest.attention_case import TOLERANCE, Case, largest_error
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session, dtype_name
from ds_hetero.selftest.uneven_schedules import length_for, long_length_for, uneven_schedules
from ds_hetero.values.plans import Plan

_HEAD_DIM = 64
_TIMES = 3.0  # the limit of a call: a kernel may be compiled first


def check_exchange(session: Session) -> Iterator[Line]:
    """Yield two lines per schedule. Each makes the process groups that training makes."""
    if session.size == 1:
        yield Line("ragged exchange, ring", "skip", "one process has nobody to exchange with")
        return
    for name, schedule in uneven_schedules(session.size).items():
        with session.watch.call(f"process groups of the {name}"):
            replica = make_replica(Plan.of_replicas([schedule]), session.groups)
        yield _line(name, session, replica, torch.float32, length_for(session.size))
        dtype = session.trained_dtype
        yield _line(f"{name}, {dtype_name(dtype)}", session, replica, dtype, long_length_for(session))


def _line(name: str, session: Session, replica: Replica, dtype: torch.dtype, length: int) -> Line:
    kernel = select(session.device, dtype, _HEAD_DIM, None, None)
    with session.watch.call(name, times=_TIMES):
        error = largest_error(Case(AttentionSpec(kernel), dtype, _HEAD_DIM), replica, length, session.device)
    if not error <= TOLERANCE[dtype]:
        return Line(name, "fail", f"off by {error:.1e} of the largest value, allowed {TOLERANCE[dtype]:.0e}")
    tokens = _tokens(replica.schedule.tokens(length))
    return Line(name, "pass", f"forward and backward by {kernel.name}, tokens {tokens}")


def _tokens(tokens: dict[int, int]) -> str:
    counts = [str(count) for count in tokens.values()]
    return "+".join(counts if len(counts) <= 8 else [*counts[:7], "..."])
