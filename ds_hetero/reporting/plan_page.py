"""Make the page of a plan, ``plan.html``, from the plan file and, after a run, also from the run file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import time_text
from ds_hetero.cost import CostModel, Prediction
from ds_hetero.cost.price import price_of_prediction
from ds_hetero.errors import PlanError
from ds_hetero.planner.jobs.job import FoundJobs
from ds_hetero.planner.results.sentences import describe, idle_ranks
from ds_hetero.reporting.advice import add_jobs, advice_lines, find_faster_jobs, idle_line
from ds_hetero.reporting.assumptions import assumptions
from ds_hetero.reporting.described_plan import DescribedPlan
from ds_hetero.reporting.grid import grid_of
from ds_hetero.reporting.html import Page, definitions, details, preformatted
from ds_hetero.reporting.pipelines_sections import add_pipelines
from ds_hetero.reporting.run_file import RunFile, plan_digest
from ds_hetero.reporting.scenario import PlanScenario
from ds_hetero.reporting.schedule_sections import ReplicaSections, add_documents
from ds_hetero.reporting.shared_sections import (
    add_launch,
    add_run,
    links_picture,
    links_table,
    measured_text,
    price_cards,
)
from ds_hetero.values.plans import Plan, read_plan


def with_scenario_of_run(plan: DescribedPlan | Plan, run: RunFile | None) -> DescribedPlan:
    """Return the plan with the scenario of the run file if it has one, else with that of the plan file.

    Raises:
        PlanError: the run file is of another plan, or neither file has a scenario.
    """
    bare_plan, scenario = (plan.plan, plan.scenario) if isinstance(plan, DescribedPlan) else (plan, None)
    if run is not None:
        # A job repeats the only schedule of a file for all its replicas.
        if bare_plan.is_replicas and len(bare_plan.pipelines) == 1 and len(run.plan.pipelines) > 1:
            bare_plan = read_plan(bare_plan.schedules[0].to_dict(), len(run.plan.ranks))
        is_run_plan = plan_digest(bare_plan) == plan_digest(run.plan)
        # A job of pipelines writes the layers of every stage, which a plan file may leave out.
        if not is_run_plan and plan_digest(bare_plan.with_layers()) == plan_digest(run.plan):
            bare_plan, is_run_plan = run.plan, True
        if not is_run_plan:
            raise PlanError(
                f"the run file is of another plan: its digest is {plan_digest(run.plan)}, that of the plan "
                f"{plan_digest(bare_plan)}. Give the plan that the job ran, or the run.json of a job that ran this "
                "plan."
            )
        if run.scenario is not None:
            lengths, left_out = (None, ()) if scenario is None else (scenario.lengths, scenario.left_out)
            scenario = replace(run.scenario, lengths=lengths, left_out=left_out)
    if scenario is None:
        raise PlanError(
            'the plan file does not say what it was made for (it has no "scenario"). Write it with "ds-hetero plan ... '
            '--out FILE", or give --run with the run.json of a job that ran it.'
        )
    return DescribedPlan(plan=bare_plan, scenario=scenario)


def plan_page(described: DescribedPlan, run: RunFile | None = None, sliders: bool = True) -> str:
    """Return the HTML of the page. Raises `PlanError`: the plan does not fit its scenario.

    Args:
        run: measurements of a job that ran the plan.
        sliders: True adds the section "What if?", for which up to 125 points are predicted.
    """
    scenario = described.scenario
    measured = "measured is what a job wrote into its run file" if run else "nothing here was measured"
    page = Page(
        f"Plan for {scenario.model.name}, {scenario.workload.seq_len:,} tokens, {len(described.plan.ranks)} ranks",
        f"Predictions are those of the {scenario.cost_model} cost model of ds_hetero; {measured}.",
    )
    found = find_faster_jobs(described)
    if described.num_replicas:
        _add_replicas(page, described, run, found)
        if sliders:
            _add_sliders(page, described)
    else:
        add_pipelines(page, described, run, found)
    if run is not None:
        add_run(page, run)
    add_launch(page, described)
    text = json.dumps(described.to_dict())
    page.section("The plan file", details("As JSON, to copy", preformatted(text)))
    return page.render()


def _add_replicas(page: Page, described: DescribedPlan, run: RunFile | None, found: FoundJobs | None) -> None:
    """Add the sections of a plan of replicas, once for each set of equal replicas."""
    costs = [described.cost_of(replica) for replica in range(described.num_replicas)]
    predictions = [cost.predict(described.schedule_of(replica)) for replica, cost in enumerate(costs)]
    step_s = max(prediction.iteration_s for prediction in predictions)
    advice = advice_lines(found, step_s, described.scenario)
    for replica in _distinct_replicas(described):
        if idle := idle_ranks(described.schedule_of(replica)):
            names = [device.name for device in costs[replica].cluster.devices]
            advice.append(idle_line(idle, predictions[replica].memory_bytes, names))
    _add_summary(page, described.scenario, costs, predictions, run, advice)
    for replica in _distinct_replicas(described):
        schedule, cost = described.schedule_of(replica), costs[replica]
        job_ranks = described.plan.schedules[replica].ranks
        sections = ReplicaSections(
            page=page,
            cost=cost,
            schedule=schedule,
            prediction=predictions[replica],
            ranks=[run.ranks[rank] for rank in job_ranks] if run else [],
            trace=[run.trace[rank] for rank in job_ranks] if run and run.trace else [],
        )
        suffix = f" of replica {replica}" if len(costs) > 1 else ""
        label = f"Ranks{suffix} by machine, the links between machines, and the ring"
        page.section(
            f"Ranks and links{suffix}",
            f"{describe(schedule, cost.cluster)}; layout {schedule.layout}.",
            page.chart("links", label, links_picture(cost.cluster, schedule), 320),
            links_table(cost.cluster),
        )
        page.section(f"Who does what{suffix}", *sections.shares())
        page.section(f"A block{suffix}", *sections.block())
        page.section(f"A step{suffix}", *sections.step())
        page.section(f"Other plans, and why they lose{suffix}", *sections.baselines())
        if described.scenario.lengths is not None:
            add_documents(page, cost, schedule, described.scenario.lengths, suffix)
    add_jobs(page, found, step_s)


def _add_sliders(page: Page, described: DescribedPlan) -> None:
    """Add the section with sliders, or say why the plan has none."""
    grid = grid_of(described)
    if grid is None:
        page.section("What if?", "Sliders are for plans of one replica; give the plan of one replica to see them.")
        return
    page.section(
        "What if?",
        "Move a slider with the arrow keys or a finger. Every answer was computed by the same cost model when this "
        "page was made; nothing is predicted in the browser. Plans are made anew where at most one slider has moved.",
        page.sliders({**grid, "today": described.cost_of(0).workload.seq_len}),
    )


def _distinct_replicas(described: DescribedPlan) -> list[int]:
    """Return the first replica of each set of replicas with equal schedule, devices and batches."""
    first_replica: dict[Any, int] = {}
    for replica, pipeline in enumerate(described.plan.pipelines):
        batches = pipeline.micro_batch_size, pipeline.micro_batches
        kind = described.schedule_of(replica), described.cluster_of(replica).devices, batches
        first_replica.setdefault(kind, replica)
    return list(first_replica.values())


def _range_text(prediction: Prediction) -> str:
    """Say between which times a step is, and on how many measurements that rests."""
    shortest, longest = (time_text(seconds) for seconds in prediction.range_s)
    return f"In 8 of 10 cases a step takes {shortest} to {longest}; {prediction.confidence}."


def _add_summary(
    page: Page,
    scenario: PlanScenario,
    costs: Sequence[CostModel],
    predictions: Sequence[Prediction],
    run: RunFile | None,
    advice: Sequence[str],
) -> None:
    """Add the section with the most important numbers, those of the slowest replica, and the advice."""
    work = costs[0].workload
    slowest = max(predictions, key=lambda prediction: prediction.iteration_s)
    step_s = slowest.iteration_s
    tokens = sum(cost.workload.step_tokens for cost in costs)
    prices = price_cards(list(map(price_of_prediction, costs, predictions)))
    too_much = next((prediction.reason for prediction in predictions if prediction.reason), None)
    cards: JsonDict = {
        "Predicted step": time_text(step_s),
        "Tokens per second": f"{tokens / step_s:,.0f}",
        "Of the speed at perfect balance": f"{slowest.bound_s / slowest.block_s:.1%}",
        "Memory": "does not fit" if too_much else "every rank fits",
        **prices,
    }
    if run is not None:
        cards["Measured step"] = measured_text(step_s, run)
    replicas = f"{len(costs)} replicas, each " if len(costs) > 1 else ""
    batches = f"{work.micro_batches} micro-batch{'es' if work.micro_batches > 1 else ''}"
    attention = "causal" if work.causal else "full"
    page.section(
        "In short",
        definitions(cards),
        *advice,
        f"{replicas}{batches} of {work.micro_batch} x {work.seq_len:,} tokens per step, ZeRO-{work.zero_stage}, "
        f"{', '.join((f'{attention} attention', *work.memory_savers))}.",
        f"What decides: {slowest.bottleneck.text}.",
        _range_text(slowest),
        *([f"Memory: {too_much}."] if too_much else []),
        f"Assumed: {'; '.join(assumptions(scenario))}.",
    )
