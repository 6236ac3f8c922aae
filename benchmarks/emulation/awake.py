"""Keep the cores of a virtual machine from halting while ranks are emulated on it.

Ranks that are slowed down pause many times a second. A core that halts meanwhile is returned to the host, which gives
it to others, and comes back with cold caches. On two such cores the same attention took four equal ranks 0.65 to 0.75 s
of CPU time, depending on the pauses, and 0.57 s without halts. So one process per core runs an empty loop at the lowest
of all priorities (SCHED_IDLE), when no other process wants to run.

    with awake_cores() as pids:          # empty if cores are not virtual

The processes end with the process that started them, in any case.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_LOOKS_UP = 1_000_000  # turns of the loop between two looks at who the parent is, about 20 ms


@contextmanager
def awake_cores() -> Iterator[tuple[int, ...]]:
    """Keep every core that this process may use from halting; yield the process ids of the loops."""
    with ExitStack() as until_end:
        pids = []
        for core in sorted(os.sched_getaffinity(0)) if _is_virtual() else ():
            # In a session of its own, so that Ctrl-C does not reach it.
            command = [sys.executable, __file__, str(core), str(os.getpid())]
            process = until_end.enter_context(subprocess.Popen(command, start_new_session=True))
            until_end.callback(process.kill)
            pids.append(process.pid)
        yield tuple(pids)


def _is_virtual() -> bool:
    """Return whether the cores belong to a hypervisor."""
    return " hypervisor" in Path("/proc/cpuinfo").read_text()


def _stay_awake(core: int, parent: int) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        for _ in range(_LOOKS_UP):
            pass


if __name__ == "__main__":
    _stay_awake(*map(int, sys.argv[1:]))
