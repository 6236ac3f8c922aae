"""Compare attention over all ranks under uneven schedules with its definition, output and gradients.

Each schedule is tried twice: in float32 on a short sequence, where the tolerance is small, and on a long sequence in
the 16-bit type of training, with the kernel that training would choose. On GPUs the two differ in the operators, in
their streams and in the sizes of messages.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ds_hetero.runtime.attention.attention import AttentionSpec
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.replica import Replica, make_replica
from ds_hetero.selftest.attention_case import TOLERANCE, AttentionCase, largest_error
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session, dtype_name
from ds_hetero.selftest.uneven_schedules import length_for, long_length_for, uneven_schedules
from ds_hetero.values.plans import Plan

_HEAD_DIM = 64
_TIMES = 3.0  # limits of a call that a sequence may take: a kernel may be compiled first


def check_exchange(session: Session) -> Iterator[Line]:
    """Yield two lines per schedule, in float32 and in 16 bits, over process groups made as training makes them."""
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
    """Try a sequence of ``length`` tokens and return the verdict of this rank."""
    kernel = select(session.device, dtype, _HEAD_DIM, None, None)
    with session.watch.call(name, times=_TIMES):
        error = largest_error(AttentionCase(AttentionSpec(kernel), dtype, _HEAD_DIM), replica, length, session.device)
    if not error <= TOLERANCE[dtype]:
        return Line(name, "fail", f"off by {error:.1e} of the largest value, allowed {TOLERANCE[dtype]:.0e}")
    tokens = _tokens(replica.schedule.tokens(length))
    return Line(name, "pass", f"forward and backward by {kernel.name}, tokens {tokens}")


def _tokens(tokens: dict[int, int]) -> str:
    """Return the ranks' tokens as "17+9+5", shortened from nine ranks on."""
    counts = [str(count) for count in tokens.values()]
    return "+".join(counts if len(counts) <= 8 else [*counts[:7], "..."])
