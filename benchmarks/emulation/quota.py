"""Make ranks of unequal speed on equal cores: the kernel gives the computing thread a share of a core.

    with speed_limits(num_ranks) as limits:      # in the parent
        method = limits.limit(rank, cores)       # in the rank's process, from its main thread; again to change it

Only the main thread is limited, so that gloo's threads carry messages at full speed while it computes, as a NIC does.
All work of the thread is slowed down equally, of a profiler or of a training step. Both methods count CPU time, so that
waiting for a message does not count as work.

    deadline    SCHED_DEADLINE: a number of milliseconds in every ten, whatever else the machine does; needs root
    quota       CFS bandwidth control, if deadlines are not allowed; needs a writable cpu controller (cgroup v1)

If that controller is writable, the ranks' other threads are in a group that has precedence over other processes. The
groups are removed at the end, also after SIGKILL (`benchmarks.emulation.guardian`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class SpeedLimits:
    """Data by which a rank limits itself; picklable.

    Args:
        group: CPU group of all ranks, with ``rank<n>`` below it; None if groups cannot be made.
    """

    group: Path | None

    def limit(self, rank: int, cores: float) -> str | None:
        """Give the calling thread ``cores`` of a core, and this process precedence; return the method, or None.

        Other threads of the process, and threads and processes that it starts later, are not limited.
        """
        self.take_precedence()
        if _set_deadline(cores):
            return "deadline"
        if self.group is None:
            return None
        rank_group = self.group / f"rank{rank}"
        (rank_group / "cpu.cfs_period_us").write_text(str(_QUOTA_PERIOD_US))
        (rank_group / "cpu.cfs_quota_us").write_text(str(round(cores * _QUOTA_PERIOD_US)))
        (rank_group / "tasks").write_text(str(threading.get_native_id()))
        return "quota"

    def take_precedence(self) -> None:
        """Give this process precedence over processes outside of the groups, if groups can be made."""
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def speed_limits(num_ranks: int) -> Iterator[SpeedLimits]:
    """Make the CPU groups if this machine allows it; at the end kill the processes in them and remove them."""
    if not os.access(_ROOT / "cpu.shares", os.W_OK):
        yield SpeedLimits(None)
        return
    group = _ROOT / f"ds_hetero_{os.getpid()}"
    parts = [group / f"rank{rank}" for rank in range(num_ranks)]
    # In a session of its own, so that Ctrl-C does not reach it.
    guardian = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("guardian.py")), *map(str, (*parts, group))],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert guardian.stdin is not None
    try:
        for path in (group, *parts):
            path.mkdir()
        (group / "cpu.shares").write_text(str(_SHARES))
        yield SpeedLimits(group)
    finally:
        guardian.stdin.close()
        guardian.wait()


def _set_deadline(cores: float) -> bool:
    """Reserve ``cores`` of a core for the calling thread, and limit it to them, but not threads that it starts."""
    call = _SCHED_SETATTR.get(platform.machine())
    if call is None:
        return False
    period = _DEADLINE_PERIOD_NS
    attributes = _Attributes(ctypes.sizeof(_Attributes), _SCHED_DEADLINE, _RESET_ON_FORK, 0, 0, 0, period, period)
    attributes.runtime = round(cores * period)
    return ctypes.CDLL(None, use_errno=True).syscall(call, 0, ctypes.byref(attributes), 0) == 0
