"""Objective that a search minimizes: the time of an optimizer step, its price per token, or its energy per token.

    time     seconds per step
    cost     step x (sum of the prices of devices with work) / tokens of the step
    energy   sum over devices with work of (busy x watts + (step - busy) x idle watts) / tokens of the step

Devices without work count nothing, so a plan for ``cost`` or ``energy`` may leave devices out; `ds_hetero.cost.price`
says what they add to the bill.
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
# Value of a plan whose step takes longer than `Objective.at_most_s`: larger than the value of any acceptable plan,
# whether in seconds, money or joules. Chosen, never measured.
TOO_LONG = 1e12


@dataclass(frozen=True, slots=True)
class Objective:
    """Objective of a search: linear in the step's time and in the time that devices compute."""

    name: str  # one of `OBJECTIVES`
    constant: float  # value per second of the step, whichever devices work
    per_s: tuple[float, ...]  # value per second of the step, for a working device of each kind
    per_busy_s: tuple[float, ...]  # value per second of computing, for a device of each kind
    at_most_s: float | None = None  # longest acceptable step; None for any

    @classmethod
    def of(cls, name: str, kinds: Sequence[DeviceSpec], tokens: int, at_most_s: float | None = None) -> Objective:
        """Make the objective ``name`` from the prices, or the powers, of a cluster's kinds of devices.

        Args:
            tokens: tokens of an optimizer step.

        Raises:
            PlanError: the name is unknown, or a device has no price or power.
        """
        zeros = (0.0,) * len(kinds)
        if name == "time":
            return cls(name, 1.0, zeros, zeros, at_most_s)
        if name == "cost":
            prices = [_required_field(kind, "price_per_hour", name) for kind in kinds]
            return cls(name, 0.0, tuple(p / SECONDS_PER_HOUR / tokens for p in prices), zeros, at_most_s)
        if name == "energy":
            load_watts = [_required_field(kind, "watts", name) for kind in kinds]
            idle = [idle_watts(kind) for kind in kinds]
            per_s = tuple(idle_w / tokens for idle_w in idle)
            per_busy_s = tuple((load_w - idle_w) / tokens for load_w, idle_w in zip(load_watts, idle, strict=True))
            return cls(name, 0.0, per_s, per_busy_s, at_most_s)
        raise PlanError(f"objective {shortened(name)} is unknown; it is one of {', '.join(OBJECTIVES)}.")

    def value(self, step_s: float, per_s: float, busy: float) -> float:
        """Return the value of a plan; if its step is too long, at least `TOO_LONG`, and more the longer it takes.

        Args:
            per_s: sum of `per_s` over the plan's devices.
            busy: sum over the plan's devices of `per_busy_s` x the seconds that they compute.
        """
        if self.at_most_s is not None and step_s > self.at_most_s:
            return TOO_LONG * step_s / self.at_most_s
        return step_s * (self.constant + per_s) + busy


def _required_field(device: DeviceSpec, field: str, objective: str) -> float:
    """Read a field that the objective needs. Raises `PlanError`: the device does not have it."""
    value: float | None = getattr(device, field)
    if value is None:
        raise PlanError(
            f"--objective {objective} needs {field} of every device, and {device.name} has none. "
            f"Add it to the cluster file: devices: {{{device.name}: {{{field}: ...}}}}"
            f"{f', or give --price {device.name}=...' if field == 'price_per_hour' else ''}."
        )
    return value
