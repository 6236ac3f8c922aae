"""``ds-hetero plan --objective pareto``: the plans of the front of time, money and energy, as table and picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ds_hetero.cli.printing import PICTURES, check_out, print_json, print_table, print_written
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.text import time_text
from ds_hetero.planner.pipelines.explain import shape_text
from ds_hetero.planner.pipelines.native_types import expect_trainable
from ds_hetero.planner.pipelines.pareto import Choice, pareto_front
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.values.plans.plan import SCENARIO


def show_front(scenario: Scenario, global_batch: int, out: Path | None, *, as_json: bool) -> None:
    """Search the front, print it, and draw it if a picture is asked for. Raises `PlanError`, see `pareto_front`."""
    check_out(out, endings=PICTURES)
    expect_trainable(scenario.cluster.devices, scenario.workload)
    costs = None if scenario.cost_model == "calibrated" else scenario.stage_costs()
    search = partial(plan_pipelines, scenario.cluster, scenario.model, scenario.workload, global_batch, costs=costs)
    front = pareto_front(lambda name, most_s: search(objective=name, at_most_s=most_s), scenario.cluster.devices)
    if out is not None:
        _draw(front, out)
    if as_json:
        keys = ("step_s", "per_million_tokens", "kwh_per_million_tokens", "plan")
        rows = [(each.planned.step_s, each.money, each.kwh, each.planned.plan.to_dict()) for each in front]
        print_json({"front": [dict(zip(keys, row, strict=True)) for row in rows], SCENARIO: scenario.to_dict()})
        return
    columns = ("step", "tokens/s", "price", "kWh", "devices", "plan")
    print_table(columns, [_row(scenario, choice) for choice in front])
    print("No plan found is better than these in all; price and kWh: a million tokens, of the devices with work")
    print_written(out)


def _row(scenario: Scenario, choice: Choice) -> tuple[str, ...]:
    planned = choice.planned
    names = Counter(scenario.cluster.devices[rank].name for rank in planned.busy)
    return (
        time_text(planned.step_s),
        f"{planned.tokens_per_s:,.0f}",
        *("-" if value is None else f"{value:,.3g}" for value in (choice.money, choice.kwh)),
        ", ".join(f"{count} {name}" for name, count in names.items()),
        "sequence parallelism" if planned.finished is None else shape_text(planned.finished.candidate),
    )


def _draw(front: Sequence[Choice], out: Path) -> None:
    """Time against money and energy, as far as they are known."""
    from matplotlib.figure import Figure

    values = {"price": [choice.money for choice in front], "kWh": [choice.kwh for choice in front]}
    known = {name: each for name, each in values.items() if None not in each}
    figure = Figure(figsize=(7.0, 2.6 * len(known) + 0.4), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(len(known), 1, squeeze=False)[:, 0], known.items(), strict=True):
        axes.plot([choice.planned.step_s for choice in front], points, "o", color="#4c78a8")
        axes.set_xlabel("seconds per step")
        axes.set_ylabel(f"{name} per million tokens")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=120)
