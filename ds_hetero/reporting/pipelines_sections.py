"""Sections of the page on a plan of pipelines: stages, memory, timeline of a step, baselines and a "What if?" table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ds_hetero.cluster import Cluster
from ds_hetero.cluster.remarks import confidence
from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.common.units import GIB
from ds_hetero.cost.price import price_of
from ds_hetero.cost.stages.pipeline_time import run_pipeline
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.cost.terms.flops import training_flops
from ds_hetero.errors import HeteroError
from ds_hetero.planner.jobs.job import FoundJobs
from ds_hetero.planner.pipeline_search.block_times import stage_options
from ds_hetero.planner.pipeline_search.finish import Finished, memory_bytes
from ds_hetero.planner.pipelines.baselines import best_grid, best_published, best_sequence
from ds_hetero.planner.pipelines.explain import reasons_of
from ds_hetero.planner.pipelines.given import judge_given
from ds_hetero.planner.published.registry import PLANNERS
from ds_hetero.planner.results.pipelines import BaselinePlan, busy_ranks
from ds_hetero.planner.results.sentences import slower_text
from ds_hetero.reporting.advice import add_jobs, advice_lines, idle_line
from ds_hetero.reporting.assumptions import assumptions
from ds_hetero.reporting.described_plan import DescribedPlan
from ds_hetero.reporting.html import Markup, Page, definitions, html_table
from ds_hetero.reporting.run_file import RunFile
from ds_hetero.reporting.shared_sections import MAX_ROWS, links_table, measured_text, price_cards, scaled_links

MAX_PIPELINES = 12  # different pipelines that are drawn
MAX_MICRO_BATCHES = 24  # micro-batches that a timeline shows
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of "What if?": factors on the sequence length, and on the speed of links
_MICRO_BATCH_SIZES = (1, 2, 4)
_MEASURED = {
    "attention": "attention",
    "rest of the passes": "model",
    "exchanges and hops": "all-to-all",
    "waiting for other stages": "wait",
    "gradients, optimizer and the rest": "step",
}
"""Parts of a measured step, each with the name of its colour in the charts."""


class PredictedPipelines(NamedTuple):
    """The predicted times of a plan of pipelines, and the cost model that predicts them."""

    costs: StageCosts  # cost model that predicts it
    finished: Finished  # the plan with its predicted times


def predict_pipelines(
    described: DescribedPlan, cluster: Cluster | None = None, seq_len: int | None = None
) -> PredictedPipelines:
    """Predict the step of a plan of pipelines.

    Args:
        cluster: cluster to predict on; None: that of the plan's scenario.
        seq_len: tokens of a sequence; None: those of the plan's scenario.

    Raises:
        PlanError: the plan does not fit the cluster or into memory.
    """
    scenario = described.scenario
    work = replace(scenario.workload, seq_len=seq_len or scenario.workload.seq_len)
    cluster = cluster or scenario.clusters[0]
    return PredictedPipelines(*judge_given(described.plan, scenario.cost_model, cluster, scenario.model, work))


def pipeline_bars(finished: Finished, pipeline: int, micro_batches: int) -> list[list[tuple[str, float, float]]]:
    """Return what each stage of a pipeline does during a step of ``micro_batches``: forward, backward or wait.

    A bar is kind, start and stop in seconds; a stage's bars have no gaps.
    """
    cut = finished.candidate.cuts[pipeline]
    run = run_pipeline(cut.forward_s, cut.backward_s, cut.hop_s, micro_batches, finished.in_flight[pipeline])
    rows = []
    for stage, (forward, backward) in enumerate(zip(run.forward_end_s, run.backward_end_s, strict=True)):
        busy = [("forward", end - cut.forward_s[stage], end) for end in forward]
        busy += [("backward", end - cut.backward_s[stage], end) for end in backward]
        bars, now_s = [], 0.0
        for kind, start_s, stop_s in sorted(busy, key=lambda bar: bar[1]):
            if start_s > now_s:
                bars.append(("wait", now_s, start_s))
            bars.append((kind, max(start_s, now_s), stop_s))
            now_s = stop_s
        if run.total_s > now_s:
            bars.append(("wait", now_s, run.total_s))
        rows.append(bars)
    return rows


def add_pipelines(
    page: Page, described: DescribedPlan, run: RunFile | None = None, found: FoundJobs | None = None
) -> None:
    """Add the sections on a plan of pipelines to the page.

    Args:
        page: page to which they are added.
        described: the plan.
        run: measurements of a job that ran the plan.
        found: the best job of every kind on the same devices; None if they were not searched.
    """
    costs, finished = predict_pipelines(described)
    plan, work, step_s = described.plan, described.scenario.workload, finished.step_s
    samples = sum(pipeline.samples for pipeline in plan.pipelines)
    saved = replace(work, activation_checkpointing=bool(plan.activation_checkpointing))
    flops = training_flops(described.scenario.model, work.seq_len, causal=work.causal)
    busy = busy_ranks(described.plan, finished.candidate, step_s)
    cards: JsonDict = {
        "Predicted step": time_text(step_s),
        "Tokens per second": f"{samples * work.seq_len / step_s:,.0f}",
        "Samples per step": samples,
        **price_cards([price_of(costs.cluster.devices, busy, step_s, samples * work.seq_len, flops)]),
        "With": ", ".join(saved.memory_savers) or "nothing that saves memory",
    }
    if run is not None:
        cards["Measured step"] = measured_text(step_s, run)
    assumed = f"Assumed: {'; '.join(assumptions(described.scenario))}."
    advice = [*advice_lines(found, step_s, described.scenario), *_idle_lines(described, costs.cluster)]
    page.section(
        "In short",
        definitions(cards),
        *advice,
        *reasons_of(costs, finished),
        _range_text(costs.cluster, step_s),
        assumed,
    )
    page.section("Ranks and links", _stages_table(described, costs, finished), links_table(costs.cluster))
    page.section("Memory", *_memory(page, costs, finished))
    measured = [] if run is None else _measured_step(page, described, run)
    page.section("A step", *_timelines(page, finished), *measured)
    page.section("Other plans, and why they lose", _baselines(described, costs, step_s, samples))
    add_jobs(page, found, step_s)
    page.section("What if?", *_what_if(page, described, samples))


def _idle_lines(described: DescribedPlan, cluster: Cluster) -> list[str]:
    """Return a sentence on the devices in no pipeline, which hold nothing; empty if there are none."""
    idle = tuple(sorted(set(range(cluster.num_ranks)) - set(described.plan.ranks)))
    if not idle:
        return []
    return [idle_line(idle, [0] * cluster.num_ranks, [device.name for device in cluster.devices])]


def _range_text(cluster: Cluster, step_s: float) -> str:
    """Say between which times a step is, and on how many measurements that rests."""
    error = max(device.error for device in cluster.devices)
    shortest, longest = time_text(step_s / (1 + error)), time_text(step_s * (1 + error))
    return f"In 8 of 10 cases a step takes {shortest} to {longest}; {confidence(cluster.devices)}."


def _stages_table(described: DescribedPlan, costs: StageCosts, finished: Finished) -> Markup:
    """Make the table of all stages of all pipelines."""
    rows = []
    for number, pipeline in enumerate(described.plan.pipelines):
        cut = finished.candidate.cuts[number]
        for j, stage in enumerate(pipeline.stages):
            devices = dict.fromkeys(costs.cluster.devices[rank].name for rank in stage.ranks)
            layers = "-" if stage.layers is None else f"{stage.layers[0]} to {stage.layers[1] - 1}"
            rows.append(
                (
                    f"pipeline {number}, stage {j}",
                    ", ".join(map(str, stage.ranks)),
                    f"{len(stage.ranks)} x {', '.join(devices)}",
                    stage.inner_text,
                    layers,
                    f"{pipeline.micro_batches} of {pipeline.micro_batch_size}",
                    time_text(cut.forward_s[j]),
                    time_text(cut.backward_s[j]),
                )
            )
    headings = ("stage", "ranks", "devices", "inside", "layers", "micro-batches", "a forward", "a backward")
    return html_table(headings, rows, "Pipelines and their stages")


def _memory(page: Page, costs: StageCosts, finished: Finished) -> list[Markup]:
    """Make a chart and a table of the memory that one card of each stage needs and has."""
    memory = memory_bytes(costs, finished)
    stages: list[_StageMemory] = []
    for number, *_ in finished.makeups[:MAX_PIPELINES]:
        placed = finished.candidate.placed[number]
        options = stage_options(costs, placed.blocks, placed.micro_batch_size, len(finished.candidate.placed))
        assert options is not None, "its memory is known"
        for j, (block, option) in enumerate(zip(placed.blocks, options, strict=True)):
            for part, part_option, needed_bytes in zip(block.parts, option.parts, memory[number][j], strict=True):
                device = costs.pools.kinds[part.kind].device
                is_first, is_last = j == 0, j == len(placed.blocks) - 1
                stages.append(
                    _StageMemory(
                        name=f"pipeline {number}, stage {j}" + (f", {device.name}" if block.others else ""),
                        device=device.name,
                        needed_bytes=needed_bytes,
                        usable_bytes=device.usable_bytes,
                        communicator_bytes=part_option.memory.communicator_bytes(is_first, is_last),
                    )
                )
    usable_gib = [round(stage.usable_bytes / GIB, 3) for stage in stages]
    needed_gib = [round(stage.needed_bytes / GIB, 3) for stage in stages]
    series = [
        {"name": "the card", "values": usable_gib, "behind": True, "colour": "wait"},
        {"name": "needed", "values": needed_gib, "colour": "model"},
    ]
    data = {"rows": [stage.name for stage in stages], "unit": "GiB", "series": series}
    chart = page.chart("bars", "Memory of a card of every stage, in GiB", data, 90 + 30 * len(stages))
    rows = []
    for stage in stages:
        sizes = (stage.needed_bytes, stage.usable_bytes, stage.communicator_bytes)
        rows.append((stage.name, stage.device, *map(bytes_text, sizes)))
    headings = ("stage", "device", "memory, GiB", "of", "NCCL's communicators in it")
    return [chart, html_table(headings, rows, "Memory by stage")]


class _StageMemory(NamedTuple):
    """Memory of a stage per device; a stage of several kinds of devices has one entry for each kind."""

    name: str  # name of the stage; with the device if the stage has several kinds
    device: str  # name of the device
    needed_bytes: float  # predicted peak
    usable_bytes: float  # memory that a job can use
    communicator_bytes: float  # the part of the peak for NCCL's communicators


def _timelines(page: Page, finished: Finished) -> list[Markup]:
    """Make a timeline of one pipeline of each set of equal ones, and a table of their times."""
    kinds = ("forward", "backward", "wait")
    window_s = _window_s(finished)
    names: list[str] = []
    bars: list[list[float]] = []
    rows: list[tuple[Any, ...]] = []
    for equal_pipelines in finished.makeups[:MAX_PIPELINES]:
        number = equal_pipelines[0]
        # Micro-batches that begin within the window: those that end there, and those that are in flight at its end.
        num_begun = MAX_MICRO_BATCHES + max(finished.in_flight[number])
        num_drawn = min(finished.candidate.micro_batches[number], num_begun)
        for j, stage_bars in enumerate(pipeline_bars(finished, number, num_drawn)):
            for kind, start_s, stop_s in _within(stage_bars, window_s):
                bars.append([len(names), kinds.index(kind), start_s, stop_s])
            names.append(f"pipeline {number}, stage {j}")
        count = finished.candidate.micro_batches[number]
        pipeline_text = time_text(finished.pipeline_s[number])
        rows.append((f"pipeline {number}", len(equal_pipelines), count, pipeline_text))
    is_part = window_s < finished.slowest_pipeline_s
    part = f"The first {time_text(window_s)} of a step" if is_part else "A step"
    label = f"{part} of every unlike pipeline; waiting is grey"
    data = {"rows": names, "kinds": list(kinds), "bars": bars}
    return [
        page.chart("timeline", label, data, 90 + 30 * len(names)),
        html_table(("pipeline", "pipelines like it", "micro-batches", "its time"), rows, "Time of every pipeline"),
    ]


def _within(bars: Sequence[tuple[str, float, float]], window_s: float) -> list[tuple[str, float, float]]:
    """Return the bars of a stage, cut off at ``window_s``, or filled up to it with a bar of waiting."""
    inside = [(kind, start_s, min(stop_s, window_s)) for kind, start_s, stop_s in bars if start_s < window_s]
    _, _, last_stop_s = inside[-1]
    if last_stop_s < window_s:
        inside.append(("wait", last_stop_s, window_s))
    return inside


def _measured_step(page: Page, described: DescribedPlan, run: RunFile) -> list[Markup]:
    """Make a chart and a table of a measured step by rank and part, with the peak of memory."""
    names: list[str] = []
    parts: list[list[float]] = []
    rows: list[tuple[str, ...]] = []
    for number, rank in enumerate(run.ranks[:MAX_ROWS]):
        place = described.plan.place_of(number)
        where = "idle" if place is None else f"pipeline {place[0]}, stage {place[1]}"
        names.append(f"rank {number}, {where}")
        exchange_s = rank.all_to_all_s + rank.ring_wait_s + rank.idle_s + rank.hop_s
        parts.append([rank.attention_s, rank.model_s, exchange_s, rank.bubble_s, rank.sync_s + rank.rest_s])
        rows.append((names[-1], *map(time_text, parts[-1]), time_text(rank.step_s), bytes_text(rank.memory_bytes)))
    series = [
        {"name": name, "values": [rank_parts[i] for rank_parts in parts], "stack": "step", "colour": colour}
        for i, (name, colour) in enumerate(_MEASURED.items())
    ]
    label = "A measured step by rank"
    data = {"rows": names, "unit": "s", "series": series}
    return [
        page.chart("bars", label, data, 110 + 32 * len(names)),
        html_table(("", *_MEASURED, "a step", "memory, GiB"), rows, label),
    ]


def _window_s(finished: Finished) -> float:
    """Return the seconds of a step that are drawn: at most `MAX_MICRO_BATCHES` micro-batches of any pipeline."""
    window_s = finished.slowest_pipeline_s
    for number, *_ in finished.makeups[:MAX_PIPELINES]:
        if finished.candidate.micro_batches[number] > MAX_MICRO_BATCHES:
            cut = finished.candidate.cuts[number]
            run = run_pipeline(
                cut.forward_s, cut.backward_s, cut.hop_s, 2 * MAX_MICRO_BATCHES, finished.in_flight[number]
            )
            window_s = min(window_s, run.backward_end_s[0][MAX_MICRO_BATCHES - 1])
    return window_s


def _baselines(described: DescribedPlan, costs: StageCosts, step_s: float, samples: int) -> Markup:
    """Make the table of other plans on the same cards: grids of equal stages, replicas, published planners.

    Args:
        step_s: predicted seconds of a step of this plan.
        samples: sequences of a step.
    """
    objective = costs.time_objective()
    scenario = described.scenario
    baselines: list[BaselinePlan] = [
        best_grid(costs, objective, samples, _MICRO_BATCH_SIZES)[0],
        best_sequence(costs.cluster, scenario.model, scenario.workload, samples, _MICRO_BATCH_SIZES, objective),
        *(
            best_published(planner, [costs], objective, samples, _MICRO_BATCH_SIZES)
            for planner in PLANNERS
            if planner.pipelines
        ),
    ]
    rows = [("this plan", time_text(step_s), "1.00 x", "")]
    for baseline in baselines:
        if baseline.step_s is None:
            rows.append((baseline.name, "-", "-", str(baseline.reason)))
        else:
            slower = baseline.step_s / step_s
            reason = slower_text(slower) if slower >= 1 else f"{1 - slower:.1%} faster: plan again"
            rows.append((baseline.name, time_text(baseline.step_s), f"{slower:.2f} x", reason))
    return html_table(
        ("plan", "a step", "this plan is faster by", "why it loses"), rows, "Other ways to use the same cards"
    )


def _what_if(page: Page, described: DescribedPlan, samples: int) -> list[Markup | str]:
    """Make a chart and a table of this plan's time with other sequence lengths and speeds of links."""
    work, cluster = described.scenario.workload, described.scenario.clusters[0]
    lengths = [round(work.seq_len * factor) for factor in FACTORS]
    rows, series = [], []
    for link_factor in FACTORS:
        name = f"links x {link_factor:g}"
        step_texts: list[str] = []
        rates: list[float | None] = []
        for length in lengths:
            step_s = _step_s(described, scaled_links(cluster, link_factor), length)
            step_texts.append("does not fit" if step_s is None else time_text(step_s))
            rates.append(None if step_s is None else samples * length / step_s)
        rows.append((name, *step_texts))
        series.append({"name": name, "values": rates})
    data = {"x": [f"{length:,}" for length in lengths], "xName": "tokens of a sequence", "series": series}
    return [
        page.chart("lines", "Tokens per second of this plan, by length and speed of links", data),
        html_table(("links", *(f"{length:,} tokens" for length in lengths)), rows, "A step of this plan"),
        "ds-hetero replan --lost RANK plans again without a card.",
    ]


def _step_s(described: DescribedPlan, cluster: Cluster, seq_len: int) -> float | None:
    """Return the predicted seconds of a step with another cluster and length; None if the plan does not fit."""
    try:
        return predict_pipelines(described, cluster, seq_len).finished.step_s
    except HeteroError:
        return None
