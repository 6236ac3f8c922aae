"""Slow a process down to a given share of one core, so that equal cores behave like unequal devices.

    speed = EmulatedSpeed(0.3)      # a "device" of 0.3 cores
    speed.attach(model)

Whenever a layer or a parameter's gradient is done, the process has used some CPU time; it then sleeps until the
emulated device would be done as well. It counts CPU time, not elapsed time. Waiting for another rank therefore is not
work, and other work on the machine makes the device late only where the sleep cannot make up for it. Threads
that carry communication are not slowed down.

Call such times "emulated": they show that work follows the schedule, not how fast a real device is.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

_SCHEDSTAT = Path("/proc/thread-self/schedstat")  # its second number: nanoseconds ready to run with no core free
_SHORTEST_SLEEP_S = 1e-3
_MOST_CREDIT_S = 0.02  # for elapsed time in which less was computed than the emulated device could have


class EmulatedSpeed:
    """Makes this process's main thread run at ``cores`` of one core, 0 < cores <= 1.

    ``late_s`` adds up by how much the process fell behind because no core was free for it.
    """

    def __init__(self, cores: float) -> None:
        self.cores = cores
        self.late_s = 0.0
        self._debt_s = 0.0
        self._read_clocks()

    def attach(self, model: torch.nn.Module) -> None:
        """Tick after every leaf module's forward and every parameter's gradient."""
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(self.tick)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.tick)

    def tick(self, *_: Any) -> None:
        """Sleep off what has been computed since the last tick."""
        wall_s, cpu_s, queued_s = self._wall_s, self._cpu_s, self._queued_s
        self._read_clocks()
        self._debt_s += (self._cpu_s - cpu_s) / self.cores - (self._wall_s - wall_s)
        self.late_s += min(max(-self._debt_s, 0.0), self._queued_s - queued_s)
        self._debt_s = max(self._debt_s, -_MOST_CREDIT_S)
        if self._debt_s > _SHORTEST_SLEEP_S:
            before_s = self._wall_s
            time.sleep(self._debt_s)
            self._read_clocks()
            self._debt_s -= self._wall_s - before_s

    def _read_clocks(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()
        self._queued_s = int(_SCHEDSTAT.read_text().split()[1]) / 1e9 if _SCHEDSTAT.exists() else 0.0
