"""Peaks of torch's CPU allocator, by its profiler: allocations and releases, with temporaries of operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["held_by_runs", "marked_run", "peak_allocations"]

_RUN = "one measured run"


def peak_allocations(run: Callable[[], object], repeats: int, settle: Callable[[], object]) -> list[int]:
    """Return by how many bytes allocations rose at most during each of ``repeats`` runs.

    A release on one of gloo's threads escapes the profiler, which can only add: the least of several runs counts.

    Args:
        run: what is measured.
        repeats: how often.
        settle: called before each run.
    """

    def runs() -> None:
        for _ in range(repeats):
            settle()
            with marked_run():
                run()

    return [peak - before for before, peak in held_by_runs(runs)]


def marked_run() -> AbstractContextManager[object]:
    """Mark what is inside as one run for `held_by_runs`."""
    return record_function(_RUN)


def held_by_runs(work: Callable[[], object]) -> list[tuple[int, int]]:
    """Return for each `marked_run` in ``work`` the bytes held before it and at its peak, counted from ``work`` on."""
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held, runs = 0, []
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == _RUN:
            runs.append((held, held))
        elif event.name() == "[memory]":
            held += event.nbytes()
            runs[-1:] = [(before, max(peak, held)) for before, peak in runs[-1:]]
    return runs


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
