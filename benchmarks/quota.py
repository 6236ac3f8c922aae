"""Ranks of unequal speed on equal cores: a CPU quota for the thread that computes.

    with SpeedLimits(len(cores)) as limits:      # in the parent; needs root and a writable cpu controller (cgroup v1)
        limits.join(rank, cores)                 # in the rank's process, from its main thread

Only the main thread is limited, so that gloo's threads carry messages at full speed while it computes, as a NIC would.
Everything that the thread does is slowed down alike, whether a profiler or a training step asks for it. The group is
given precedence over other processes, so that a busy machine disturbs little.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

__all__ = ["SpeedLimits"]

_ROOT = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 20_000  # several ticks of the scheduler; shorter periods undershoot
_SHARES = 262_144  # the most there is; 1,024 is normal


class SpeedLimits:
    """A CPU group for all ranks of a measurement, with one below it per rank; gone at the end."""

    def __init__(self, num_ranks: int) -> None:
        self.path = _ROOT / f"ds_hetero_{os.getpid()}"
        self._ranks = [self.path / f"rank{rank}" for rank in range(num_ranks)]

    @staticmethod
    def available() -> bool:
        """Whether this machine lets us set quotas."""
        return os.access(_ROOT / "cpu.shares", os.W_OK)

    def __enter__(self) -> SpeedLimits:
        for path in (self.path, *self._ranks):
            path.mkdir()
        (self.path / "cpu.shares").write_text(str(_SHARES))
        return self

    def __exit__(self, *_: object) -> None:
        for path in (*self._ranks, self.path):
            for task in (path / "tasks").read_text().split():
                (_ROOT / "tasks").write_text(task)
            path.rmdir()

    def join(self, rank: int, cores: float) -> None:
        """Give this process precedence, and its main thread ``cores`` of a core."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))
        mine = self._ranks[rank]
        (mine / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (mine / "cpu.cfs_quota_us").write_text(str(round(cores * _PERIOD_US)))
        (mine / "tasks").write_text(str(threading.get_native_id()))
