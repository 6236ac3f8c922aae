"""Two things measured by turns in the same processes, so that whatever happens to the machine happens to both."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure.machine import cpu_s_of, machine_busy_s
from benchmarks.measure.ranks import Report

__all__ = ["Outcome", "alternate", "number_of_pairs", "timed_run"]

_WARM_UPS = 2  # pages, caches, connections; and the plans that ours keeps by batch layout
_MAX_PAIRS = 101

Outcome = dict[str, Any]
"""``{"seconds": {name: [one per pair]}, "foreign_cores": cores that others used meanwhile}``"""


def alternate(
    actions: Mapping[str, Callable[[], object]],
    budget_s: float,
    min_pairs: int,
    report: Report,
    own_pids: Sequence[int],
) -> Outcome:
    """Run the actions in turns, every second round the other way round, for about ``budget_s``.

    Every run starts at a barrier, and its time is that of the slowest rank.

    Args:
        min_pairs: rounds, however long they take.
        report: takes the share that is done, 0 to 1.
        own_pids: processes besides the ranks that work for the measurement.

    Caller: every rank.
    """
    gc.collect()
    gc.freeze()  # what DeepSpeed and transformers loaded is not searched again in the middle of a run
    begin = time.perf_counter()
    warm_up: list[list[float]] = []
    for done in range(_WARM_UPS):
        report(done / (_WARM_UPS + min_pairs), "warming up")
        warm_up.append([timed_run(action) for action in actions.values()])
    pairs = _agreed(number_of_pairs(sum(warm_up[-1]), budget_s - (time.perf_counter() - begin), min_pairs))
    pids = _all_pids(own_pids)
    busy_s, own_s, begin = machine_busy_s(), cpu_s_of(pids), time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for pair in range(pairs):
        report((_WARM_UPS + pair) / (_WARM_UPS + pairs), f"pair {pair + 1} of {pairs}")
        for name in list(actions) if pair % 2 else reversed(list(actions)):
            times[name].append(timed_run(actions[name]))
    busy_s, own_s = machine_busy_s() - busy_s, cpu_s_of(pids) - own_s
    foreign_cores = max(0.0, busy_s - own_s) / (time.perf_counter() - begin)
    return {"seconds": {name: _slowest(values) for name, values in times.items()}, "foreign_cores": foreign_cores}


def number_of_pairs(pair_s: float, left_s: float, min_pairs: int) -> int:
    """How many pairs of ``pair_s`` fit into ``left_s``, at least ``min_pairs``; odd: the median is one of them."""
    pairs = max(min(int(left_s / pair_s), _MAX_PAIRS), min_pairs)
    return pairs - 1 + pairs % 2


def timed_run(action: Callable[[], object]) -> float:
    """Seconds of this rank from a barrier to the end of ``action``."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _agreed(number: int) -> int:
    """Rank 0's."""
    box = torch.tensor(number)
    dist.broadcast(box, src=0)
    return int(box)


def _all_pids(own_pids: Sequence[int]) -> list[int]:
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return [*pids, *own_pids]


def _slowest(seconds: list[float]) -> list[float]:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()
