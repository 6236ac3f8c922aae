"""Find the Pareto front of plans of pipelines in time, money and energy: no plan of it beats another one in all three.

The fastest plan is searched, then the cheapest one and the one with least energy: without a limit, and with limits on
the step's time. If the fastest step takes 1 s and the cheapest 16 s, the limits are 2, 4 and 8 s. Of all these plans
the front keeps those that no other one beats; a plan that none of the searches found may be missing. Money and energy
count the devices with work, as in the objectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.cost.price import price_of
from ds_hetero.errors import PlanError
from ds_hetero.planner.results.pipelines import PlannedPipelines

# Number of limits on the step's time between the fastest plan and the plan without a limit. Chosen, never measured.
NUM_LIMITS = 3
ALIKE = 1e-3  # relative difference of values up to which plans count as equal, as in a table with three digits


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A plan with its money and energy for a million tokens."""

    planned: PlannedPipelines  # the plan
    money: float | None  # for a million tokens, in the currency of the prices; None if a device's price is not known
    kwh: float | None  # energy for a million tokens; None if a device's power is not known

    @property
    def values(self) -> tuple[float, float, float]:
        """Seconds of a step, money and energy; 0 for money or energy that is not known."""
        return self.planned.step_s, self.money or 0.0, self.kwh or 0.0

    def beats(self, other: Choice) -> bool:
        """Whether this plan is at least as good as ``other`` in time, money and energy, up to `ALIKE`."""
        pairs = zip(self.values, other.values, strict=True)
        return all(value <= other_value * (1 + ALIKE) for value, other_value in pairs)


def pareto_front(
    search: Callable[[str, float | None], PlannedPipelines], devices: Sequence[DeviceSpec]
) -> list[Choice]:
    """Return the plans of the front, fastest first.

    Args:
        search: returns the best plan for an objective and a longest step, see `plan_pipelines`.
        devices: devices of the cluster, by rank.

    Raises:
        PlanError: neither the prices nor the powers of all devices are known, or no plan fits.
    """
    rates = {"cost": [device.price_per_hour for device in devices], "energy": [device.watts for device in devices]}
    objectives = [name for name, values in rates.items() if None not in values]
    if not objectives:
        raise PlanError(
            "--objective pareto sets time against money and energy, and neither price_per_hour nor watts is known of "
            "every device. Add one to the cluster file, or give --price."
        )
    fastest = search("time", None)
    plans = [fastest]
    for name in objectives:
        without_limit = search(name, None)
        plans.append(without_limit)
        ratio = without_limit.step_s / fastest.step_s
        if ratio <= 1 + ALIKE:
            continue
        for i in range(1, NUM_LIMITS + 1):
            with contextlib.suppress(PlanError):  # within the limit the search may find no plan
                plans.append(search(name, fastest.step_s * ratio ** (i / (NUM_LIMITS + 1))))
    choices = [_priced(planned, devices, objectives) for planned in plans]
    front: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: choice.values):
        if not any(other.beats(choice) for other in front):
            front.append(choice)
    return front


def _priced(planned: PlannedPipelines, devices: Sequence[DeviceSpec], objectives: Sequence[str]) -> Choice:
    """Return a plan with its money and energy; None for values that are not among ``objectives``."""
    ranks, busy_shares = zip(*sorted(planned.busy.items()), strict=True)  # ranks with work
    working_devices = [devices[rank] for rank in ranks]
    price = price_of(working_devices, dict(enumerate(busy_shares)), planned.step_s, planned.tokens, 0.0)
    money = price.per_million_tokens if "cost" in objectives else None
    kwh = price.kwh_per_million_tokens if "energy" in objectives else None
    return Choice(planned=planned, money=money, kwh=kwh)
