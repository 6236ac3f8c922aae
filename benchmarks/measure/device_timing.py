"""Time work on a device without the host's time: medians between CUDA events, or of a clock on CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch


def median_s(device: torch.device, fn: Callable[[], object], repeats: int = 5, warm_ups: int = 2) -> float:
    """Return the median seconds of several runs after some to warm up.

    Between events, so that the host's time does not count.
    """
    for _ in range(warm_ups):
        fn()
    if device.type != "cuda":
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            fn()
            seconds.append(time.perf_counter() - begin)
        return median(seconds)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        fn()
        mark.record()
    torch.cuda.synchronize(device)
    return median(first.elapsed_time(second) for first, second in pairwise(marks)) / 1e3


def first_call_s(device: torch.device, fn: Callable[[], object]) -> float:
    """Return the seconds of one call on the host's clock until the device has finished, with all that it builds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    fn()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
