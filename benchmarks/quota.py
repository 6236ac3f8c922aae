"""Ranks of unequal speed on equal cores: a CPU quota for the thread that computes.

    with SpeedLimits(num_ranks) as limits:       # in the parent; needs root and a writable cpu controller (cgroup v1)
        method = limits.join(rank, cores)        # in the rank's process, from its main thread

Only the main thread is limited, so that gloo's threads carry messages at full speed while it computes, as a NIC would.
Everything that the thread does is slowed down alike, whether a profiler or a training step asks for it.

    deadline    SCHED_DEADLINE: so many milliseconds in every ten, whatever else the machine has to do
    quota       CFS bandwidth control, where deadlines are not allowed; a busy machine takes some of the quota

All ranks' other threads are in a group that is given precedence over other processes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from pathlib import Path

__all__ = ["SpeedLimits"]

_ROOT = Path("/sys/fs/cgroup/cpu")
_SHARES = 262_144  # the most there is; 1,024 is normal
_QUOTA_PERIOD_US = 20_000  # several ticks of the scheduler; shorter periods undershoot
_DEADLINE_PERIOD_NS = 10_000_000
_SCHED_DEADLINE, _RESET_ON_FORK = 6, 1
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # number of the system call


class _Attributes(ctypes.Structure):
    """struct sched_attr of linux/sched/types.h."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


class SpeedLimits:
    """A CPU group for all ranks of a measurement, with one below it per rank; gone at the end."""

    def __init__(self, num_ranks: int) -> None:
        self.path = _ROOT / f"ds_hetero_{os.getpid()}"
        self._ranks = [self.path / f"rank{rank}" for rank in range(num_ranks)]

    @staticmethod
    def available() -> bool:
        """Whether this machine lets us limit threads."""
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

    def join(self, rank: int, cores: float) -> str:
        """Give this process precedence and its main thread ``cores`` of a core; says by which method."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))
        if _set_deadline(cores):
            return "deadline"
        mine = self._ranks[rank]
        (mine / "cpu.cfs_period_us").write_text(str(_QUOTA_PERIOD_US))
        (mine / "cpu.cfs_quota_us").write_text(str(round(cores * _QUOTA_PERIOD_US)))
        (mine / "tasks").write_text(str(threading.get_native_id()))
        return "quota"


def _set_deadline(cores: float) -> bool:
    """Reserve ``cores`` of a core for the calling thread, and not more; threads it starts are ordinary ones."""
    call = _SCHED_SETATTR.get(platform.machine())
    if call is None:
        return False
    period = _DEADLINE_PERIOD_NS
    wanted = _Attributes(ctypes.sizeof(_Attributes), _SCHED_DEADLINE, _RESET_ON_FORK, 0, 0, 0, period, period)
    wanted.runtime = round(cores * period)
    return ctypes.CDLL(None, use_errno=True).syscall(call, 0, ctypes.byref(wanted), 0) == 0
