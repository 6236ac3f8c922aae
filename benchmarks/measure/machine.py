"""Describe the machine of a measurement, and its other load meanwhile."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def describe_machine() -> dict[str, Any]:
    """Return CPU, memory, kernel and the relevant releases."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }


def machine_busy_s() -> float:
    """Return the CPU seconds that all processes of the machine have used since it started."""
    user, nice, system, _, _, interrupts, soft_interrupts, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + interrupts + soft_interrupts) * _TICK_S


def cpu_s_of(pids: Iterable[int]) -> float:
    """Return the CPU seconds that these processes have used, with all their threads."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * _TICK_S
