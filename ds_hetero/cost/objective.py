"""Objective of a plan: the time of an optimizer step, its money per token, or its energy per token.

    time     seconds per step
    cost     step x sum of price over devices with work / tokens of the step
    energy   sum over devices with work of busy x watts + (step - busy) x idle watts, / tokens of the step

Idle devices count nothing, so ``cost`` and ``energy`` may leave devices out; `ds_hetero.cost.price` says what they add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.reading import shortened
from ds_hetero.common.units import SECONDS_PER_HOUR
from ds_hetero.cost.power import idle_watts
from ds_hetero.errors import PlanError

OBJECTIVES = ("time", "cost", "energy")
# Value of a plan whose step takes longer than is acceptable: above every value of an acceptable plan, whose unit is
# seconds, money or joules. Chosen, never measured.
TOO_LONG = 1e12


@dataclass(frozen=True, slots=True)
class Objective:
    """Objective that the search makes small: linear in the step's time and in the time that devices compute."""

    name: str  # one of `OBJECTIVES`
    constant: float  # per second of the step, whichever devices work
    per_s: tuple[float, ...]  # of each kind of device, per second of the step
    per_busy_s: tuple[float, ...]  # of each kind of device, per second of computing
    at_most_s: float | None = None  # longest step that is acceptable; None for any

    @classmethod
    def of(cls, name: str, kinds: Sequence[DeviceSpec], tokens: int, at_most_s: float | None = None) -> Objective:
        """Bind an objective to a cluster's devices. Raises `PlanError`: an unknown name, or no price or power."""
        zeros = (0.0,) * len(kinds)
        if name == "time":
            return cls(name, 1.0, zeros, zeros, at_most_s)
        if name == "cost":
            prices = [_known(kind, "price_per_hour", name) for kind in kinds]
            return cls(name, 0.0, tuple(p / SECONDS_PER_HOUR / tokens for p in prices), zeros, at_most_s)
        if name == "energy":
            watts = [_known(kind, "watts", name) for kind in kinds]
            idle = [idle_watts(kind) for kind in kinds]
            busy = tuple((full - rest) / tokens for full, rest in zip(watts, idle, strict=True))
            return cls(name, 0.0, tuple(rest / tokens for rest in idle), busy, at_most_s)
        raise PlanError(f"objective {shortened(name)} is unknown; it is one of {', '.join(OBJECTIVES)}.")

    def value(self, step_s: float, per_s: float, busy: float) -> float:
        """Return the objective of a plan; at least `TOO_LONG` where its step takes too long, more the longer it takes.

        Args:
            per_s: sum of `per_s` over its devices.
            busy: sum over its devices of `per_busy_s` x the seconds that they compute.
        """
        if self.at_most_s is not None and step_s > self.at_most_s:
            return TOO_LONG * step_s / self.at_most_s
        return step_s * (self.constant + per_s) + busy


def _known(device: DeviceSpec, field: str, objective: str) -> float:
    value: float | None = getattr(device, field)
    if value is None:
        raise PlanError(
            f"--objective {objective} needs {field} of every device, and {device.name} has none. "
            f"Add it to the cluster file: devices: {{{device.name}: {{{field}: ...}}}}"
            f"{f', or give --price {device.name}=...' if field == 'price_per_hour' else ''}."
        )
    return value
