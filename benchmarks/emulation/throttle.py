"""Slow a rank down, and verify its speed.

    deadline, quota   by the kernel, see `benchmarks.emulation.quota`; the program does not notice; needs root
    counted           by this process itself: after every torch operator it sleeps until the emulated device would have
                      finished, too. Needs no rights, sees operators only, and costs 10 to 20 us for each
    none              not at all

All count the CPU time of the computing thread. So none takes waiting for work, and none slows the threads that carry
messages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.emulation.quota import SpeedLimits

METHODS = ("kernel", "counted", "none")
SPEED_TOLERANCE, SPREAD_TOLERANCE = 0.05, 0.03

_PROBE = 256  # square product, about half a millisecond
_WINDOWS = 5
_SHORTEST_SLEEP_S = 1e-3
_MAX_CORRECTION = 0.15  # more is not cold caches, but a machine that is too busy to measure on
_MAX_CREDIT_S = 0.02  # for time in which the thread was ready and got no core


@dataclass(frozen=True)
class SpeedMeasurement:
    """Speed of one rank.

    Args:
        asked: cores requested.
        measured: matmul rate over that of the same rank alone at full speed.
        spread: coefficient of variation between windows.
    """

    asked: float
    measured: float
    spread: float

    @property
    def error(self) -> float:
        """Relative error."""
        return self.measured / self.asked - 1

    @property
    def good(self) -> bool:
        """Whether the error is as small as the lab promises."""
        return abs(self.error) <= SPEED_TOLERANCE and self.spread <= SPREAD_TOLERANCE


class Throttle:
    """The speed of this rank, which may change while it runs.

    Args:
        limits: from the parent.
        rank: whose group to use.
        methods: to try, in this order.

    Attributes:
        method: that works here: ``"deadline"``, ``"quota"``, ``"counted"`` or ``"none"``.
        correction: factor of the cores that makes the measured speed the requested one; see `measure_speed`.
    """

    def __init__(self, limits: SpeedLimits, rank: int, methods: Sequence[str] = METHODS) -> None:
        self._limits, self._rank, self._methods = limits, rank, methods
        self._counted: CountedTime | None = None
        self.method = "none"
        self.correction = 1.0

    def set(self, cores: float) -> None:
        """Run at ``cores`` of a core from now on; called from the computing thread."""
        cores = min(cores * self.correction, 1.0)
        for method in self._methods:
            if method == "kernel" and (kernel_method := self._limits.limit(self._rank, cores)):
                self.method = kernel_method
                return
            if method == "counted":
                self._count(cores)
                return
        self.method = "none"

    @property
    def late_s(self) -> float:
        """Seconds by which this process is late because no core was free for it; only ``counted`` knows."""
        return self._counted.late_s if self._counted else 0.0

    def _count(self, cores: float) -> None:
        self.method = "counted"
        self._limits.take_precedence()
        if self._counted is None:
            self._counted = CountedTime(cores)
            self._counted.__enter__()  # for the rest of the process
        self._counted.cores = cores


class CountedTime(TorchDispatchMode):
    """Sleeps after operators so that the thread's CPU time is ``cores`` of the time in which it is not blocked."""

    def __init__(self, cores: float) -> None:
        super().__init__()
        self.cores = cores
        self.late_s = 0.0
        self._debt_s = 0.0
        # Its second number: nanoseconds in which the thread was ready to run and had no core.
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._cpu_s, self._queued_s = time.thread_time(), self._read_queued_s()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, then sleep for its share."""
        result = func(*args, **(kwargs or {}))
        self._pay()
        return result

    def _pay(self) -> None:
        """Sleep until CPU time is ``cores`` of the elapsed time."""
        cpu_s = time.thread_time()
        due_s = (cpu_s - self._cpu_s) * (1 / self.cores - 1)
        if self._debt_s + due_s < _SHORTEST_SLEEP_S:
            return
        queued_s = self._read_queued_s()
        self._debt_s += due_s - (queued_s - self._queued_s)
        self._cpu_s, self._queued_s = cpu_s, queued_s
        if self._debt_s < -_MAX_CREDIT_S:
            self.late_s -= self._debt_s + _MAX_CREDIT_S
            self._debt_s = -_MAX_CREDIT_S
        if self._debt_s > _SHORTEST_SLEEP_S:
            begin = time.perf_counter()
            time.sleep(self._debt_s)
            self._debt_s -= time.perf_counter() - begin
            self._queued_s = self._read_queued_s()

    def _read_queued_s(self) -> float:
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9


# --- verifying --------------------------------------------------------------------------------------


def measure_speed(throttle: Throttle, cores: Sequence[float], reference: float) -> list[SpeedMeasurement]:
    """Set all ranks' speeds, measure them at the same time, and correct errors of more than a percent once.

    A slowed device has cold caches after every pause, so that it is a little too slow at first.

    Args:
        throttle: of this rank.
        cores: of every rank.
        reference: from `reference_rate`.

    Returns:
        The speeds of all ranks now. Caller: every rank.
    """
    asked = cores[dist.get_rank()]
    throttle.set(asked)
    measured = _measure(asked, reference)
    if throttle.method != "none" and max(_gather(abs(measured.error))) > 0.01:
        correction = throttle.correction / (1 + measured.error)
        throttle.correction = min(max(correction, 1 - _MAX_CORRECTION), 1 + _MAX_CORRECTION)
        throttle.set(asked)
        measured = _measure(asked, reference)
    return _gather(measured)


def describe_speeds(method: str, speeds: Sequence[SpeedMeasurement]) -> str:
    """Describe request and measurement in one line, and whether they agree."""
    asked = " ".join(f"{speed.asked:.3g}" for speed in speeds)
    got = " ".join(f"{speed.measured:.3g}" for speed in speeds)
    spread = max(speed.spread for speed in speeds)
    bad = "" if all(speed.good for speed in speeds) else " (NOT as asked for: a busy machine, or no right to)"
    return f"emulated speeds by {method}: {asked} cores asked for, {got} measured, variation up to {spread:.1%}{bad}"


def reference_rate() -> float:
    """Return matmuls per CPU second of this rank at full speed, while the others wait. Caller: every rank."""
    rate = 0.0
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == dist.get_rank():
            _rates(0.1, 1)
            rate = median(_rates(0.1, 3, time.thread_time))
    dist.barrier()
    return rate


def _measure(cores: float, reference: float) -> SpeedMeasurement:
    """Measure this rank's speed."""
    dist.barrier()
    window_s = max(0.4, 0.1 / cores)  # the kernel enforces limits by ticks of up to 10 ms
    _rates(0.1, 1)
    rates = _rates(window_s, _WINDOWS)
    dist.barrier()
    return SpeedMeasurement(cores, mean(rates) / reference, stdev(rates) / mean(rates))


def _rates(window_s: float, windows: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Return the matmul rates of several windows."""
    x = torch.ones(_PROBE, _PROBE)
    out = torch.empty_like(x)
    rates = []
    for _ in range(windows):
        begin, calls = clock(), 0
        while clock() < begin + window_s:
            torch.mm(x, x, out=out)
            calls += 1
        rates.append(calls / (clock() - begin))
    return rates


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
