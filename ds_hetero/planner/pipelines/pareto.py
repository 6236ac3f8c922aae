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
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.price import JOULES_PER_KWH, MILLION, price_of
from ds_hetero.errors import PlanError
from ds_hetero.planner.planned import PlannedPipelines

LIMITS = 3  # longest steps that are tried between the fastest plan and one without a limit
ALIKE = 1e-3  # of a value: plans that differ less are one


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A plan with what it takes."""

    planned: PlannedPipelines  # the plan
    step_s: float  # of an optimizer step
    money: float | None  # per million tokens; None where a price is not known
    kwh: float | None  # per million tokens; None where the power of a device is not known

    @classmethod
    def of(cls, planned: PlannedPipelines, devices: Sequence[DeviceSpec]) -> Choice:
        """Price the devices with work of a plan."""
        busy = sorted(planned.busy.items())
        working, shares = [devices[rank] for rank, _ in busy], dict(enumerate(share for _, share in busy))
        price = price_of(working, shares, planned.step_s, planned.tokens, 0.0)
        kwh = None if price.joules is None else MILLION * price.joules / planned.tokens / JOULES_PER_KWH
        return cls(planned=planned, step_s=planned.step_s, money=price.per_million_tokens, kwh=kwh)

    def beats(self, other: Choice) -> bool:
        """Whether it is as good as the other one in everything that is known, `ALIKE` included."""
        pairs = ((self.step_s, other.step_s), (self.money, other.money), (self.kwh, other.kwh))
        return all(own <= theirs * (1 + ALIKE) for own, theirs in pairs if own is not None and theirs is not None)

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {
            "step_s": self.step_s,
            "tokens_per_s": self.planned.tokens_per_s,
            "per_million_tokens": self.money,
            "kwh_per_million_tokens": self.kwh,
            "plan": self.planned.plan.to_dict(),
        }


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
    found = [Choice.of(search("time", None), devices)]
    for name in objectives:
        found.append(Choice.of(search(name, None), devices))
        ratio = found[-1].step_s / found[0].step_s
        for i in range(1, LIMITS + 1 if ratio > 1 + ALIKE else 1):
            with contextlib.suppress(PlanError):  # within the limit the search may find none
                found.append(Choice.of(search(name, found[0].step_s * ratio ** (i / (LIMITS + 1))), devices))
    front: list[Choice] = []
    for choice in sorted(found, key=lambda each: (each.step_s, each.money or 0.0, each.kwh or 0.0)):
        if not any(other.beats(choice) for other in front):
            front.append(choice)
    return front
