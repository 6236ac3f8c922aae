"""Speeds of the ranks in the attention of a batch, taken while all of them compute it.

Products of small matrices say what share of a core a rank has. Attention also needs caches and memory, which the ranks
of one machine share, so where all compute at once each may be slower, or faster, than its share says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from benchmarks.measure.turns import timed_run
from ds_hetero.runtime.step_clock import ATTENTION, Clock

__all__ = ["WorkClock", "speeds_at_work"]

_PASSES = 2


class WorkClock(Clock):
    """Counts this rank's attention and the seconds of its kernels.

    Attributes:
        flops: per head and element of a head, as `Clock.count_attention` gets them.
        busy_s: in kernels, waiting for messages excluded.
    """

    def __init__(self) -> None:
        self.flops, self.busy_s = 0, 0.0

    @contextmanager
    def phase(self, kind: str, name: str) -> Iterator[None]:
        """Time what computes."""
        begin = time.perf_counter()
        yield
        if kind == ATTENTION:
            self.busy_s += time.perf_counter() - begin

    def count_attention(self, flops: int, backward: bool) -> None:
        """Count operations."""
        self.flops += flops


def speeds_at_work(action: Callable[[], object], clock: WorkClock) -> list[float]:
    """By rank, batches a second if it computed the whole one at this speed; 0 where a rank has nothing to do.

    Args:
        action: forward and backward of the batch on all ranks.
        clock: that ``action`` runs under.

    Caller: every rank.
    """
    clock.flops, clock.busy_s = 0, 0.0
    for _ in range(_PASSES):
        timed_run(action)
    found = torch.zeros(dist.get_world_size() + 1, dtype=torch.float64)
    found[dist.get_rank()] = clock.flops / clock.busy_s if clock.flops else 0.0
    found[-1] = clock.flops / _PASSES
    dist.all_reduce(found)
    return (found[:-1] / found[-1]).tolist()
