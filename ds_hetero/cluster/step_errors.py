"""Relative error of predicted step times by device: 8 of 10 predictions have a smaller one."""

from __future__ import annotations

MEASURED_ERROR = {"A100-SXM-80GB": 0.15, "A100-SXM-40GB": 0.15, "H100-SXM-80GB": 0.15}
"""Devices with many measured steps. Set by hand: 8 of 10 steps of `python -m benchmarks.real_cards` lie inside."""

FEW_MEASUREMENTS = {"RTX-3090": 10, "RTX-4090": 9, "RTX-A5000": 3, "H200-SXM-141GB": 7}
"""Devices with few measured steps, and how many `python -m benchmarks.real_cards` has of each."""

FEW_ERROR = 0.30
"""Error of steps on devices with few measured steps.

8 of 10 of their steps are within 0.25, 0.19, 0.13 and 0.20, and no rate was fitted to these. The error is wider than
that, since the first three were measured with LoRA and QLoRA alone.
"""

PROFILED_ERROR = 0.15
"""Error of steps on devices with a profile: as in `MEASURED_ERROR`. Chosen, never measured."""

UNMEASURED_ERROR = 0.45
"""Error of steps on devices without a measurement: three times `MEASURED_ERROR`. Chosen, never measured."""


def step_error(name: str) -> float:
    """Return the relative error of predicted steps on a device of the catalogue, such as 0.15."""
    if name in FEW_MEASUREMENTS:
        return FEW_ERROR
    return MEASURED_ERROR.get(name, UNMEASURED_ERROR)
