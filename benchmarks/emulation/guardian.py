"""Remove CPU groups when the process that made them has ended, in any way; see `benchmarks.emulation.quota`.

The standard input is a pipe from that process, which ends with it. Processes that are left in the groups are killed
then, because ranks without a parent do no useful work.

    python guardian.py GROUP... < pipe        groups in the order in which they can be removed
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

_PATIENCE_S = 5.0


def main() -> None:
    """Wait for the end of the input, then remove the groups."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    sys.stdin.read()
    for group in map(Path, sys.argv[1:]):
        _remove(group)


def _remove(group: Path) -> None:
    """Kill the processes of a group, and remove it when they have ended, which takes a moment."""
    give_up = time.monotonic() + _PATIENCE_S
    while group.is_dir() and time.monotonic() < give_up:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.01)


if __name__ == "__main__":
    main()
