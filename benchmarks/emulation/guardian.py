"""Removes CPU groups when the process that made them is gone, however it went; see `benchmarks.emulation.quota`.

Its standard input is a pipe from that process, which ends with it. What is left in the groups then is killed: ranks
without a parent have nothing to work for.

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
    """Wait for the end of the input, then clean up."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    sys.stdin.read()
    for group in map(Path, sys.argv[1:]):
        _remove(group)


def _remove(group: Path) -> None:
    """A group can be removed when nothing runs in it; what is killed takes a moment to leave."""
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
