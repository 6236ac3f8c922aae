"""Attention over all ranks under uneven schedules against its definition, output and gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ds_hetero.runtime.attention.attention import AttentionSpec
from ds_hetero.runtime.attention.kernels import select
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.replica import make_replica
from ds_hetero.selftest.attention_case import TOLERANCE, Case, largest_error
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session
from ds_hetero.selftest.uneven_schedules import length_for, uneven_schedules
from ds_hetero.values.plans import Plan

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
