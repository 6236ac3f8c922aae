"""Let a rank of any command take its place in an emulated cluster; called by the injected ``sitecustomize``."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.emulation.emulator import limit_memory
from benchmarks.emulation.quota import SpeedLimits
from benchmarks.emulation.throttle import Throttle, describe_speeds, measure_speed, reference_rate

_throttle: Throttle | None = None


def join(settings: Mapping[str, Any]) -> None:
    """Set this rank's memory limit and speed, and verify the speeds of all ranks. Once per process.

    Caller: every rank, when the default process group exists.
    """
    global _throttle
    if _throttle is not None:
        return
    rank = dist.get_rank()
    if (budget := settings["memory_bytes"][rank]) is not None:
        limit_memory(budget)
    # A slow end of the interpreter makes torch abort ("terminate called without an active exception").
    atexit.register(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0))
    group = settings["group"]
    _throttle = Throttle(SpeedLimits(group and Path(group)), rank, settings["speed_methods"])
    if not settings["verify"] or dist.get_backend() != "gloo":
        _throttle.set(settings["cores"][rank])
        return
    speeds = measure_speed(_throttle, settings["cores"], reference_rate())
    if rank == 0:
        print(describe_speeds(_throttle.method, speeds), file=sys.stderr, flush=True)
