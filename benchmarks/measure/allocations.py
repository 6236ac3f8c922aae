"""Peaks of torch's CPU allocator, by its profiler: allocations and releases, with temporaries of operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

_RUN = "one measured run"


def peak_allocations(run: Callable[[], object], repeats: int, settle: Callable[[], object]) -> list[int]:
    """Return by how many bytes allocations rose at most during each of ``repeats`` runs.

    A release on one of gloo's threads escapes the profiler until its address is handed out again, which can only add:
    the least of several runs counts.

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
    """Return for each `marked_run` in ``work`` the bytes held before it and at its peak, counted from ``work`` on.

    Where a block is handed out at the address of one that is still held, that one was released unseen.
    """
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held, size_at, runs = 0, dict[int, int](), list[tuple[int, int]]()
    for event in _events_in_order(profiler.profiler.kineto_results.experimental_event_tree()):
        if event.tag != _EventType.Allocation:
            runs.append((held, held))
            continue
        size, address = event.typed[1].alloc_size, event.typed[1].ptr
        known = size_at.pop(address, None)
        if size > 0:
            held += size - (known or 0)
            size_at[address] = size
        else:
            held += size  # negative
        runs[-1:] = [(before, max(peak, held)) for before, peak in runs[-1:]]
    return runs


def _events_in_order(roots: list[Any]) -> list[Any]:
    """Allocations, releases and beginnings of runs, by time."""
    found, todo = [], list(roots)
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation or (event.tag == _EventType.TorchOp and event.name == _RUN):
            found.append(event)
    return sorted(found, key=lambda event: event.start_time_ns)


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
