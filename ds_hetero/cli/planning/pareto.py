"""``ds-hetero plan --objective pareto``: shows the Pareto front of time, money and energy as table and picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ds_hetero.cli.printing import PICTURES, check_out, print_json, print_lines, print_table, print_written
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import time_text
from ds_hetero.planner.pipelines.explain import shape_text
from ds_hetero.planner.pipelines.native_types import expect_trainable
from ds_hetero.planner.pipelines.pareto import Choice, pareto_front
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.values.plans.plan import SCENARIO


def show_front(scenario: Scenario, global_batch: int, out: Path | None, *, as_json: bool) -> None:
    """Search for the front, print it, and draw it if ``out`` is given.

    Args:
        global_batch: sequences per optimizer step.
        out: picture to write, .svg or .png.

    Raises:
        PlanError: ``out`` cannot be written, or `pareto_front` finds no plan.
    """
    check_out(out, endings=PICTURES)
    expect_trainable(scenario.cluster.devices, scenario.workload)
    costs = None if scenario.cost_model == "calibrated" else scenario.stage_costs()
    search = partial(plan_pipelines, scenario.cluster, scenario.model, scenario.workload, global_batch, costs=costs)
    front = pareto_front(lambda name, most_s: search(objective=name, at_most_s=most_s), scenario.cluster.devices)
    if out is not None:
        _draw(front, out)
    if as_json:
        print_json({"front": list(map(_to_dict, front)), SCENARIO: scenario.to_dict()})
        return
    columns = ("step", "tokens/s", "price", "kWh", "devices", "plan")
    print_table(columns, [_row(scenario, choice) for choice in front])
    print_lines("No plan found is better than these in all; price and kWh: a million tokens, of the devices with work")
    print_written(out)


def _to_dict(choice: Choice) -> JsonDict:
    """Return plain data of a plan on the front for ``--json``."""
    return {
        "step_s": choice.planned.step_s,
        "per_million_tokens": choice.money,
        "kwh_per_million_tokens": choice.kwh,
        "plan": choice.planned.plan.to_dict(),
    }


def _row(scenario: Scenario, choice: Choice) -> tuple[str, ...]:
    """Return the cells of a plan on the front."""
    planned = choice.planned
    busy_devices = Counter(scenario.cluster.devices[rank].name for rank in planned.busy)
    return (
        time_text(planned.step_s),
        f"{planned.tokens_per_s:,.0f}",
        _number_text(choice.money),
        _number_text(choice.kwh),
        ", ".join(f"{count} {name}" for name, count in busy_devices.items()),
        "sequence parallelism" if planned.finished is None else shape_text(planned.finished.candidate),
    )


def _number_text(value: float | None) -> str:
    """Return a number with three digits; "-" if it is unknown."""
    return "-" if value is None else f"{value:,.3g}"


def _draw(front: Sequence[Choice], out: Path) -> None:
    """Draw price over time, and energy over time; without prices, or without watts, that diagram is left out."""
    from matplotlib.figure import Figure

    values_by_name = {"price": [choice.money for choice in front], "kWh": [choice.kwh for choice in front]}
    drawn = {name: values for name, values in values_by_name.items() if None not in values}
    figure = Figure(figsize=(7.0, 2.6 * len(drawn) + 0.4), layout="constrained")
    all_axes = figure.subplots(len(drawn), 1, squeeze=False)[:, 0]
    for axes, (name, values) in zip(all_axes, drawn.items(), strict=True):
        axes.plot([choice.planned.step_s for choice in front], values, "o", color="#4c78a8")
        axes.set_xlabel("seconds per step")
        axes.set_ylabel(f"{name} per million tokens")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=120)
