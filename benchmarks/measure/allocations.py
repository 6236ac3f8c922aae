"""Peaks of torch's CPU allocator, by its profiler: allocations and releases, with temporaries of operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["peak_allocations"]

_RUN = "one measured run"


def peak_allocations(run: Callable[[], object], repeats: int, settle: Callable[[], object]) -> list[int]:
    """Return by how many bytes allocations rose at most during each of ``repeats`` runs.

    A release on one of gloo's threads escapes the profiler, which can only add: the least of several runs counts.

    Args:
        run: what is measured.
        repeats: how often.
        settle: called before each run.
    """
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(repeats):
            settle()
            with record_function(_RUN):
                run()
    peaks: list[int] = []
    held = before = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == _RUN:
            before = held
            peaks.append(0)
        elif event.name() == "[memory]":
            held += event.nbytes()
            peaks[-1:] = [max(peak, held - before) for peak in peaks[-1:]]
    return peaks


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """The profiler of some torch releases announces every start and stop."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
