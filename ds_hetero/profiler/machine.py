"""Detect busy machines: a profile that was measured beside other work does not describe the devices.

Every profile has two signs of other work: the share of a host's cores that other processes used during the measurement,
and the spread of the times of one matmul, which is repeated after every part of the measurement.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from ds_hetero.common.reading import JsonObject

MAX_OTHERS = 0.25  # share of a host's cores that other processes may use; chosen, never measured
MAX_SPREAD = 0.25  # relative excess of the slowest over the fastest of the equal timings; chosen, never measured


class CpuUse(NamedTuple):
    """Load on the cores of this rank's host while it was measured."""

    host: str
    busy_cores: float | None  # mean number of busy cores; None if the operating system does not tell
    own_cores: float  # mean number of cores that this rank used
    num_cores: int


@dataclass(frozen=True, slots=True)
class Quietness:
    """Signs of whether other programs ran on the machines during the measurement."""

    others_share: float | None  # share of a host's cores that other processes used, on the busiest host; None: unknown
    spread: float  # relative excess of the slowest over the fastest of equal timings, on the worst rank


class CpuWatch:
    """Measures the use of the cores from its construction on.

    Args:
        host: name of this rank's host.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._begin_s = time.perf_counter()
        self._busy_before_s = _busy_s()
        self._process_before_s = time.process_time()

    def read(self) -> CpuUse:
        """Return the use of the cores from the construction until now."""
        elapsed_s = time.perf_counter() - self._begin_s
        busy_s = _busy_s()
        busy_cores = None
        if busy_s is not None and self._busy_before_s is not None:
            busy_cores = (busy_s - self._busy_before_s) / elapsed_s
        own_cores = (time.process_time() - self._process_before_s) / elapsed_s
        return CpuUse(self._host, busy_cores, own_cores, os.cpu_count() or 1)


def _busy_s() -> float | None:
    """Return the seconds of work of all cores of this host since it was started; None outside Linux."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return None
    return float((user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK"))


def quietness_of(uses: Sequence[CpuUse], repeats: Sequence[Sequence[float]]) -> Quietness:
    """Return the worst signs of other work over all ranks.

    Args:
        uses: use of the cores, by rank.
        repeats: rates or seconds of equal timings, by rank.
    """
    shares = []
    for host in sorted({use.host for use in uses}):
        on_host = [use for use in uses if use.host == host]
        busy_cores = [use.busy_cores for use in on_host if use.busy_cores is not None]
        if busy_cores:
            # All ranks of a host measure the same busy cores; the time that no rank used was used by other processes.
            other_cores = max(busy_cores) - sum(use.own_cores for use in on_host)
            shares.append(max(other_cores, 0.0) / on_host[0].num_cores)
    spreads = [max(timings) / min(timings) - 1 for timings in repeats if timings]
    return Quietness(max(shares, default=None), max(spreads, default=0.0))


def busy_reason(profile: JsonObject) -> str | None:
    """Return why a profile was measured on busy machines; None if it was not, or if that is unknown."""
    signs = {**asdict(Quietness(None, 0.0)), **profile.get("machine", {})}  # profiles of earlier releases have none
    reasons = []
    if (signs["others_share"] or 0.0) > MAX_OTHERS:
        reasons.append(f"other processes kept {signs['others_share']:.0%} of the cores busy, above {MAX_OTHERS:.0%}")
    if signs["spread"] > MAX_SPREAD:
        reasons.append(f"equal timings differed by {signs['spread']:.0%}, above {MAX_SPREAD:.0%}")
    return " and ".join(reasons) or None
