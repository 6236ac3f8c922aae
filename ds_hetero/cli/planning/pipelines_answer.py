"""Answer of ``ds-hetero plan --parallel full``: the best pipelines of unequal stages, with their explanation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ds_hetero.cli.planning.answer import Answer, answer_of, planner_text, price_of_plan
from ds_hetero.cli.printing import print_lines
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.text import time_text
from ds_hetero.planner.results.pipelines import PlannedPipelines
from ds_hetero.reporting.assumptions import assumed_line

if TYPE_CHECKING:
    from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate


class Goal(NamedTuple):
    """Objective of a search for pipelines, and the longest step that a result may have."""

    objective: str  # "time", "cost" or "energy"
    at_most_s: float | None  # seconds of the longest step that is allowed; None: no limit


def pipelines_answer(
    scenario: Scenario,
    global_batch: int,
    goal: Goal,
    planner: str | None,
    trained: float,
    as_json: bool,
) -> Answer:
    """Search for pipelines of unequal stages, or let a published planner search for its pipelines."""
    from ds_hetero.planner.pipelines.native_types import expect_trainable
    from ds_hetero.planner.pipelines.planning import plan_pipelines

    expect_trainable(scenario.cluster.devices, scenario.workload)
    costs = None if scenario.cost_model == "calibrated" else scenario.stage_costs()
    progress = _Progress(as_json)
    planned = plan_pipelines(
        scenario.cluster,
        scenario.model,
        scenario.workload,
        global_batch,
        costs=costs,
        objective=goal.objective,
        at_most_s=goal.at_most_s,
        progress=progress,
        planner=planner,
    )
    progress.end()
    price = price_of_plan(scenario, planned)
    lines = [*price.lines(trained), assumed_line(scenario)]
    show = partial(show_pipelines, scenario, planned, lines)
    return answer_of(scenario, planned, planned.plan.to_dict(), show, price=price.to_dict(trained))


def show_pipelines(scenario: Scenario, planned: PlannedPipelines, further: Sequence[str]) -> None:
    """Print pipelines with their prediction, the reasons for the choice, and other plans; ``further`` are lines."""
    from ds_hetero.cli.printing import print_pipelines

    if planned.finished is not None:
        print_pipelines(planned.costs, planned.finished)
    else:
        print_lines(f"one stage of sequence parallelism over ranks {planned.plan.ranks[0]} to {planned.plan.ranks[-1]}")
    recomputed = {True: "with", False: "without"}[bool(planned.plan.activation_checkpointing)]
    lines = [
        f"{scenario.model.name}, {planned.global_batch} sequences of {scenario.workload.seq_len} tokens per step, "
        f"{planned.costs.name} cost model; searched for {time_text(planned.search_s)}"
        f"{', then interrupted: the best plan so far' if planned.interrupted else ''}{planner_text(planned)}",
        f"predicted:  {time_text(planned.step_s)} per step, {planned.tokens_per_s:,.0f} tokens/s, {recomputed} "
        "recomputation",
    ]
    if planned.objective.name == "energy":
        lines.append(f"objective:  {planned.value:.4g} joules per token")
    lines += further
    lines += [f"{'why:' if i == 0 else '':12}{reason}" for i, reason in enumerate(planned.reasons)]
    for baseline in planned.baselines.values():
        if baseline.value is None:
            lines.append(f"not {baseline.name}: {baseline.reason}")
        else:
            times = f"{baseline.value / planned.value:.2f} x as much"
            lines.append(f"not {baseline.name}: {times} ({time_text(baseline.step_s or 0)} per step)")
    print_lines(*lines)


class _Progress:
    """Line on stderr that shows the best step of a long search so far, if stderr is a terminal."""

    def __init__(self, quiet: bool) -> None:
        self._watched = not quiet and sys.stderr.isatty()
        self._shown = False

    def __call__(self, best: PlanCandidate, share: float) -> None:
        """Show the best plan so far, and the share of the search that is done."""
        if self._watched:
            from ds_hetero.planner.pipelines.explain import shape_text

            self._shown = True
            step = f"{shape_text(best)}, {time_text(best.step_s)} per step"
            print(f"\r{100 * share:3.0f} %  {step} (Ctrl-C takes it)\033[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line, if one was shown."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
