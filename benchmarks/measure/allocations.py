"""Measure peaks of torch's CPU allocator by its profiler: allocations and releases, with temporaries of operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

_RUN = "one measured run"


def peak_allocations(run: Callable[[], object], repeats: int, settle: Callable[[], object]) -> list[int]:
    """Return the largest increase of the allocated bytes during each of ``repeats`` runs.

    The profiler does not see a release on one of gloo's threads until the address is allocated again, which can only
    raise the result: use the least of several runs.

    Args:
        run: to measure.
        repeats: number of runs.
        settle: called before each run.
    """

    def runs() -> None:
        for _ in range(repeats):
            settle()
            with marked_run():
                run()

    return [peak - before for before, peak in held_by_runs(runs)]


def marked_run() -> AbstractContextManager[object]:
    """Mark the calls inside as one run for `held_by_runs`."""
    return record_function(_RUN)


def held_by_runs(work: Callable[[], object]) -> list[tuple[int, int]]:
    """Return the bytes held before each `marked_run` in ``work`` and at its peak, counted from the begin of ``work``.

    If a block is allocated at the address of one that is still held, the release of the former was not seen.
    """
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held_bytes, size_at, runs = 0, dict[int, int](), list[tuple[int, int]]()
    for event in _events_in_order(profiler.profiler.kineto_results.experimental_event_tree()):
        if event.tag != _EventType.Allocation:
            runs.append((held_bytes, held_bytes))
            continue
        size, address = event.typed[1].alloc_size, event.typed[1].ptr
        known = size_at.pop(address, None)
        if size > 0:
            held_bytes += size - (known or 0)
            size_at[address] = size
        else:
            held_bytes += size  # negative
        runs[-1:] = [(before, max(peak, held_bytes)) for before, peak in runs[-1:]]
    return runs


def _events_in_order(roots: list[Any]) -> list[Any]:
    """Return allocations, releases and begins of runs, by time."""
    events, todo = [], list(roots)
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation or (event.tag == _EventType.TorchOp and event.name == _RUN):
            events.append(event)
    return sorted(events, key=lambda event: event.start_time_ns)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard stderr inside: the profiler of some torch releases prints every start and stop."""
    stderr_copy = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
