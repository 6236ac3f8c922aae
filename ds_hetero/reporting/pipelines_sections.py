"""A plan of pipelines on the page: its stages, the timeline of a step, memory, other plans, and lengths and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ds_hetero.cluster import Cluster
from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.common.units import GIB
from ds_hetero.cost.price import price_of
from ds_hetero.cost.stages.pipeline_time import run_pipeline
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.cost.terms.flops import training_flops
from ds_hetero.errors import HeteroError
from ds_hetero.planner.pipeline_search.block_times import stage_options
from ds_hetero.planner.pipeline_search.finish import Finished, memory_bytes
from ds_hetero.planner.pipelines.explain import reasons_of
from ds_hetero.planner.pipelines.given import judge_given
from ds_hetero.planner.pipelines.rivals import best_grid, best_published, best_sequence
from ds_hetero.planner.published.registry import PLANNERS
from ds_hetero.planner.results.pipelines import Rival, busy_ranks
from ds_hetero.planner.results.sentences import slower_text
from ds_hetero.reporting.assumptions import assumptions
from ds_hetero.reporting.described_plan import DescribedPlan
from ds_hetero.reporting.html import Markup, Page, definitions, html_table
from ds_hetero.reporting.run_file import RunFile
from ds_hetero.reporting.shared_sections import MAX_ROWS, links_table, measured_text, price_cards, scaled_links

MAX_PIPELINES = 12  # that are drawn, unlike ones
MAX_MICRO_BATCHES = 24  # drawn in a timeline
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_MICRO_BATCH_SIZES = (1, 2, 4)
_MEASURED = {
    "attention": "attention",
    "rest of the passes": "model",
    "exchanges and hops": "all-to-all",
    "waiting for other stages": "wait",
    "gradients, optimizer and the rest": "step",
}
"""Parts of a measured step, with their colours."""

Judged = tuple[StageCosts, Finished]


def judged(described: DescribedPlan, cluster: Cluster | None = None, seq_len: int | None = None) -> Judged:
    """Predict the plan, also on another cluster or with another length. Raises `PlanError`: it does not fit."""
    scenario = described.scenario
    work = replace(scenario.workload, seq_len=seq_len or scenario.workload.seq_len)
    return judge_given(described.plan, scenario.cost_model, cluster or scenario.clusters[0], scenario.model, work)


def pipeline_bars(finished: Finished, pipeline: int, micro_batches: int) -> list[list[tuple[str, float, float]]]:
    """Return forwards and backwards of the first micro-batches of a pipeline, by stage, with waiting between them."""
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


def add_pipelines(page: Page, described: DescribedPlan, run: RunFile | None = None) -> None:
    """Add a plan of pipelines to the page, and what a job that ran it measured."""
    costs, finished = judged(described)
    plan, work, step_s = described.plan, described.scenario.workload, finished.step_s
    samples = sum((p.micro_batch_size or 0) * (p.micro_batches or 0) for p in plan.pipelines)
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
    page.section("In short", definitions(cards), *reasons_of(costs, finished), assumed)
    page.section("Ranks and links", _stages_table(described, costs, finished), links_table(costs.cluster))
    page.section("Memory", *_memory(page, costs, finished))
    measured = [] if run is None else _measured_step(page, described, run)
    page.section("A step", *_timelines(page, finished), *measured)
    page.section("Other plans, and why they lose", _rivals(described, costs, step_s, samples))
    page.section("What if?", *_what_if(page, described, samples))


def _stages_table(described: DescribedPlan, costs: StageCosts, finished: Finished) -> Markup:
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
                    stage.inner,
                    layers,
                    f"{pipeline.micro_batches} of {pipeline.micro_batch_size}",
                    time_text(cut.forward_s[j]),
                    time_text(cut.backward_s[j]),
                )
            )
    headings = ("stage", "ranks", "devices", "inside", "layers", "micro-batches", "a forward", "a backward")
    return html_table(headings, rows, "Pipelines and their stages")


def _memory(page: Page, costs: StageCosts, finished: Finished) -> list[Markup]:
    memory = memory_bytes(costs, finished)
    cells: list[_StageMemory] = []
    for number, *_ in finished.makeups[:MAX_PIPELINES]:
        placed = finished.candidate.placed[number]
        options = stage_options(costs, placed.blocks, placed.micro_batch_size, len(finished.candidate.placed))
        assert options is not None, "its memory is known"
        for j, (block, option) in enumerate(zip(placed.blocks, options, strict=True)):
            for part, of_part, needed in zip(block.parts, option.parts, memory[number][j], strict=True):
                device = costs.pools.kinds[part.kind].device
                cells.append(
                    _StageMemory(
                        name=f"pipeline {number}, stage {j}" + (f", {device.name}" if block.others else ""),
                        device=device.name,
                        needed=needed,
                        usable=device.usable_bytes,
                        communicators=of_part.memory.communicator_bytes(j == 0, j == len(placed.blocks) - 1),
                    )
                )
    series = [
        {"name": "the card", "values": [round(c.usable / GIB, 3) for c in cells], "behind": True, "colour": "wait"},
        {"name": "needed", "values": [round(c.needed / GIB, 3) for c in cells], "colour": "model"},
    ]
    data = {"rows": [cell.name for cell in cells], "unit": "GiB", "series": series}
    chart = page.chart("bars", "Memory of a card of every stage, in GiB", data, 90 + 30 * len(cells))
    rows = [(cell.name, cell.device, *map(bytes_text, cell[2:])) for cell in cells]
    headings = ("stage", "device", "memory, GiB", "of", "NCCL's communicators in it")
    return [chart, html_table(headings, rows, "Memory by stage")]


class _StageMemory(NamedTuple):
    """Bytes of a device of a stage."""

    name: str  # of the stage, and of the device where it has several
    device: str
    needed: float
    usable: float
    communicators: float  # in what is needed


def _timelines(page: Page, finished: Finished) -> list[Markup]:
    kinds = ("forward", "backward", "wait")
    window_s = _window_s(finished)
    names: list[str] = []
    bars: list[list[float]] = []
    rows: list[tuple[Any, ...]] = []
    for members in finished.makeups[:MAX_PIPELINES]:
        number, alike = members[0], len(members)
        # Micro-batches that begin within the window: those that end there, and those that are in flight at its end.
        begun = MAX_MICRO_BATCHES + max(finished.in_flight[number])
        drawn = min(finished.candidate.micro_batches[number], begun)
        for j, stage in enumerate(pipeline_bars(finished, number, drawn)):
            inside = [(kind, start_s, min(stop_s, window_s)) for kind, start_s, stop_s in stage if start_s < window_s]
            if inside[-1][2] < window_s:
                inside.append(("wait", inside[-1][2], window_s))
            bars += [[len(names), kinds.index(kind), start_s, stop_s] for kind, start_s, stop_s in inside]
            names.append(f"pipeline {number}, stage {j}")
        count = finished.candidate.micro_batches[number]
        rows.append((f"pipeline {number}", alike, count, time_text(finished.pipeline_s[number])))
    is_part = window_s < finished.pipelines_s
    part = f"The first {time_text(window_s)} of a step" if is_part else "A step"
    label = f"{part} of every unlike pipeline; waiting is grey"
    data = {"rows": names, "kinds": list(kinds), "bars": bars}
    return [
        page.chart("timeline", label, data, 90 + 30 * len(names)),
        html_table(("pipeline", "pipelines like it", "micro-batches", "its time"), rows, "Time of every pipeline"),
    ]


def _measured_step(page: Page, described: DescribedPlan, run: RunFile) -> list[Markup]:
    """Where a measured step went, by rank, and the memory that was in use."""
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
        {"name": name, "values": [own[i] for own in parts], "stack": "step", "colour": colour}
        for i, (name, colour) in enumerate(_MEASURED.items())
    ]
    label = "A measured step by rank"
    data = {"rows": names, "unit": "s", "series": series}
    return [
        page.chart("bars", label, data, 110 + 32 * len(names)),
        html_table(("", *_MEASURED, "a step", "memory, GiB"), rows, label),
    ]


def _window_s(finished: Finished) -> float:
    """How much of a step is drawn: the same of every pipeline, of none more than `MAX_MICRO_BATCHES` micro-batches."""
    window_s = finished.pipelines_s
    for number, *_ in finished.makeups[:MAX_PIPELINES]:
        if finished.candidate.micro_batches[number] > MAX_MICRO_BATCHES:
            cut = finished.candidate.cuts[number]
            run = run_pipeline(
                cut.forward_s, cut.backward_s, cut.hop_s, 2 * MAX_MICRO_BATCHES, finished.in_flight[number]
            )
            window_s = min(window_s, run.backward_end_s[0][MAX_MICRO_BATCHES - 1])
    return window_s


def _rivals(described: DescribedPlan, costs: StageCosts, step_s: float, samples: int) -> Markup:
    objective = costs.time_objective()
    scenario = described.scenario
    rivals: list[Rival] = [
        best_grid(costs, objective, samples, _MICRO_BATCH_SIZES)[0],
        best_sequence(costs.cluster, scenario.model, scenario.workload, samples, _MICRO_BATCH_SIZES, objective),
        *(
            best_published(planner, [costs], objective, samples, _MICRO_BATCH_SIZES)
            for planner in PLANNERS
            if planner.pipelines
        ),
    ]
    rows = [("this plan", time_text(step_s), "1.00 x", "")]
    for rival in rivals:
        if rival.step_s is None:
            rows.append((rival.name, "-", "-", str(rival.reason)))
        else:
            slower = rival.step_s / step_s
            reason = slower_text(slower) if slower >= 1 else f"{1 - slower:.1%} faster: plan again"
            rows.append((rival.name, time_text(rival.step_s), f"{slower:.2f} x", reason))
    return html_table(
        ("plan", "a step", "this plan is faster by", "why it loses"), rows, "Other ways to use the same cards"
    )


def _what_if(page: Page, described: DescribedPlan, samples: int) -> list[Markup | str]:
    """Times of this plan with other lengths and links, in a chart and a table."""
    work, cluster = described.scenario.workload, described.scenario.clusters[0]
    lengths = [round(work.seq_len * factor) for factor in FACTORS]
    rows, series = [], []
    for link in FACTORS:
        times = [_step_s(described, scaled_links(cluster, link), length) for length in lengths]
        rows.append((f"links x {link:g}", *("does not fit" if s is None else time_text(s) for s in times)))
        rates: Sequence[float | None] = [
            None if s is None else samples * length / s for s, length in zip(times, lengths, strict=True)
        ]
        series.append({"name": f"links x {link:g}", "values": rates})
    data = {"x": [f"{length:,}" for length in lengths], "xName": "tokens of a sequence", "series": series}
    return [
        page.chart("lines", "Tokens per second of this plan, by length and speed of links", data),
        html_table(("links", *(f"{length:,} tokens" for length in lengths)), rows, "A step of this plan"),
        "ds-hetero replan --lost RANK plans again without a card.",
    ]


def _step_s(described: DescribedPlan, cluster: Cluster, seq_len: int) -> float | None:
    try:
        return judged(described, cluster, seq_len)[1].step_s
    except HeteroError:
        return None
