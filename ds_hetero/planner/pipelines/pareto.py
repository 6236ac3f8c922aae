"""Plans of pipelines of which no other is better in time, in money and in energy at once (the Pareto front).

Searches for the fastest plan, and for the cheapest and the thriftiest one: without a limit, and with the step at most
so long, in equal ratios between the two. The front is what is left of these plans: it may miss some, and has none that
another one of them beats. Money and energy are those of the devices with work, as in the objectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.cost.price import price_of
from ds_hetero.errors import PlanError
from ds_hetero.planner.results.pipelines import PlannedPipelines

LIMITS = 3  # longest steps that are tried between the fastest plan and one without a limit; chosen, never measured
ALIKE = 1e-3  # of a value: plans that differ less are one, as they are in a table with three digits


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A plan with what it takes for a million tokens."""

    planned: PlannedPipelines  # the plan
    money: float | None  # None where the price of a device is not known
    kwh: float | None  # None where the power of a device is not known

    @property
    def values(self) -> tuple[float, float, float]:
        """Seconds of a step, money and energy; 0 for what is not known of any plan."""
        return self.planned.step_s, self.money or 0.0, self.kwh or 0.0

    def beats(self, other: Choice) -> bool:
        """Whether it is as good as the other one in everything, but for `ALIKE`."""
        return all(own <= theirs * (1 + ALIKE) for own, theirs in zip(self.values, other.values, strict=True))


def pareto_front(
    search: Callable[[str, float | None], PlannedPipelines], devices: Sequence[DeviceSpec]
) -> list[Choice]:
    """Return the plans of the front, fastest first. Raises `PlanError`: nothing has a price, or no plan fits.

    Args:
        search: the best plan for an objective and a longest step, see `plan_pipelines`.
        devices: of the cluster, by rank.
    """
    known = {"cost": [each.price_per_hour for each in devices], "energy": [each.watts for each in devices]}
    objectives = [name for name, values in known.items() if None not in values]
    if not objectives:
        raise PlanError(
            "--objective pareto sets time against money and energy, and neither price_per_hour nor watts is known of "
            "every device. Add one to the cluster file, or give --price."
        )
    found = [search("time", None)]
    for name in objectives:
        found.append(search(name, None))
        ratio = found[-1].step_s / found[0].step_s
        for i in range(1, LIMITS + 1 if ratio > 1 + ALIKE else 1):
            with contextlib.suppress(PlanError):  # within the limit the search may find none
                found.append(search(name, found[0].step_s * ratio ** (i / (LIMITS + 1))))
    front: list[Choice] = []
    for choice in sorted((_priced(each, devices, objectives) for each in found), key=lambda each: each.values):
        if not any(other.beats(choice) for other in front):
            front.append(choice)
    return front


def _priced(planned: PlannedPipelines, devices: Sequence[DeviceSpec], objectives: Sequence[str]) -> Choice:
    """A plan with the price of its devices with work, as far as ``objectives`` are known."""
    working, shares = zip(*sorted(planned.busy.items()), strict=True)
    price = price_of([devices[rank] for rank in working], dict(enumerate(shares)), planned.step_s, planned.tokens, 0.0)
    money = price.per_million_tokens if "cost" in objectives else None
    kwh = price.kwh_per_million_tokens if "energy" in objectives else None
    return Choice(planned=planned, money=money, kwh=kwh)
