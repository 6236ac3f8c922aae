"""Whether the machines were quiet while they were measured: a profile of busy ones is no measure of the devices.

Two signs are kept with every profile: the share of a host's cores that other processes kept busy meanwhile, and how
much the same product, timed again after every part of the measurement, differs from itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from ds_hetero.common.reading import JsonObject

MAX_OTHERS = 0.25  # of a host's cores, kept busy by other processes
MAX_SPREAD = 0.25  # by which the slowest of the equal timings may exceed the fastest


class CpuUse(NamedTuple):
    """Load on the cores of this rank's host while it was measured."""

    host: str
    busy_cores: float | None  # cores that were busy, in the mean; None where the operating system does not say
    own_cores: float  # cores that this rank itself kept busy
    num_cores: int


@dataclass(frozen=True, slots=True)
class Quietness:
    """Signs of how quiet the machines were."""

    others_share: float | None  # largest share of a host's cores that others kept busy; None: unknown
    spread: float  # how much the slowest of equal timings exceeds the fastest, on the rank where it is most


class CpuWatch:
    """Measures the use of the cores from when it is made. ``host``: name of this rank's host."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._begin = time.perf_counter(), _busy_s(), time.process_time()

    def read(self) -> CpuUse:
        """The use until now."""
        begin, busy_before, own_before = self._begin
        elapsed, busy = time.perf_counter() - begin, _busy_s()
        return CpuUse(
            self._host,
            None if busy is None or busy_before is None else (busy - busy_before) / elapsed,
            (time.process_time() - own_before) / elapsed,
            os.cpu_count() or 1,
        )


def _busy_s() -> float | None:
    """Seconds that the cores of this host have been busy since it was started; None outside Linux."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return None
    return float((user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK"))


def quietness_of(uses: Sequence[CpuUse], repeats: Sequence[Sequence[float]]) -> Quietness:
    """Judge what ranks have seen: use of the cores, and rates or seconds of equal timings, by rank."""
    shares = []
    for host in sorted({use.host for use in uses}):
        on_host = [use for use in uses if use.host == host]
        busy = [use.busy_cores for use in on_host if use.busy_cores is not None]
        if busy:
            others = max(busy) - sum(use.own_cores for use in on_host)
            shares.append(max(others, 0.0) / on_host[0].num_cores)
    spread = max((max(of_rank) / min(of_rank) - 1 for of_rank in repeats if of_rank), default=0.0)
    return Quietness(max(shares, default=None), spread)


def busy_reason(profile: JsonObject) -> str | None:
    """Why a profile is one of busy machines, for people; None if they were quiet, or it has no signs."""
    signs = {**asdict(Quietness(None, 0.0)), **profile.get("machine", {})}
    reasons = []
    if (signs["others_share"] or 0.0) > MAX_OTHERS:
        reasons.append(f"other processes kept {signs['others_share']:.0%} of the cores busy, above {MAX_OTHERS:.0%}")
    if signs["spread"] > MAX_SPREAD:
        reasons.append(f"equal timings differed by {signs['spread']:.0%}, above {MAX_SPREAD:.0%}")
    return " and ".join(reasons) or None
