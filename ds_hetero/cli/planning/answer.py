"""Answer of a search of ``ds-hetero plan``, and what all answers have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.reading import JsonObject
from ds_hetero.cost.price import Price
from ds_hetero.cost.terms.flops import training_flops
from ds_hetero.planner.results.planned import Planned
from ds_hetero.reporting.assumptions import assumptions
from ds_hetero.values.plans.plan import SCENARIO


class Answer(NamedTuple):
    """Result of a search, with functions that print it, or make the files that ``ds-hetero plan --out`` writes."""

    plan: JsonObject  # content of the plan file
    scenario: Scenario  # scenario that the plan file has with it
    data: Callable[[], JsonObject]  # returns the object that --json prints
    show: Callable[[], None]  # prints the tables and lines for people
    folder: Callable[[], Mapping[str, str]] | None = None  # returns the files of a folder that starts the job


def answer_of(
    scenario: Scenario, planned: Planned, plan_file: JsonObject, show: Callable[[], None], **further: Any
) -> Answer:
    """Make the answer of a search; ``further`` are keys that its JSON object has besides those of ``planned``."""

    def data() -> JsonObject:
        return {**planned.to_dict(), **further, "assumed": assumptions(scenario), SCENARIO: scenario.to_dict()}

    return Answer(plan_file, scenario, data, show)


def price_of_plan(scenario: Scenario, planned: Planned) -> Price:
    """Return the money, the energy and the model FLOPs utilization of what was planned."""
    work = scenario.workload
    flops = training_flops(scenario.model, work.seq_len, causal=work.causal)
    return planned.price(scenario.cluster.devices, flops)


def planner_text(planned: Planned) -> str:
    """Return ``, by planner NAME``, the end of a line, for a published planner; empty for the project's own planner."""
    return f", by planner {planned.planner}" if planned.planner is not None else ""
