"""Texts on the predicted schedules or pipelines of a job, as ``ds-hetero doctor`` prints them.

`ds_hetero.decision.chosen_text` makes the shorter ones that rank 0 prints when a job starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.cluster import Cluster
from ds_hetero.common.reading import JsonObject
from ds_hetero.common.tables import framed_table
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.common.units import GIB
from ds_hetero.cost import Workload
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.decision.decide_pipelines import SearchedPipelines
from ds_hetero.decision.forecast import Forecast
from ds_hetero.planner import PlannedSchedule
from ds_hetero.planner.pipeline_search.finish import Finished
from ds_hetero.planner.pipelines.explain import reasons_of
from ds_hetero.planner.results.sentences import describe
from ds_hetero.planner.zero_stage import faster_zero_stage
from ds_hetero.values.plans import Pipeline, Plan, Stage
from ds_hetero.values.schedule import Schedule

_MAX_LISTED = 8  # pipelines of a job, and ranks of a stage, that a text lists; chosen, never measured


def forecast_text(forecasts: Sequence[Forecast]) -> str:
    """Return a table of the ranks' tokens, heads and memory, and the predicted time; equal replicas share one."""
    parts = []
    for numbers in equal_replicas(forecasts):
        title_prefix = f"replica {', '.join(map(str, numbers))}: " if len(forecasts) > 1 else ""
        forecast = forecasts[numbers[0]]
        parts.append(f"{_replica_table(forecast, title_prefix)}\n{_prediction_lines(forecast)}")
    return "\n".join(parts)


def equal_replicas(forecasts: Sequence[Forecast]) -> list[list[int]]:
    """Group replicas that have the same devices, work and shares: ``[[0, 2], [1]]`` if replica 1 differs."""
    numbers_of_kind: dict[tuple[Cluster, Workload, Schedule], list[int]] = {}
    for number, forecast in enumerate(forecasts):
        kind = forecast.cost.cluster, forecast.cost.workload, forecast.schedule.shifted(0)
        numbers_of_kind.setdefault(kind, []).append(number)
    return list(numbers_of_kind.values())


def _replica_table(forecast: Forecast, title_prefix: str) -> str:
    """Return the table of a replica: tokens, heads and memory of every rank."""
    cost, schedule, prediction = forecast.cost, forecast.schedule, forecast.prediction
    title = f"{title_prefix}{describe(schedule.shifted(0), cost.cluster)}; {schedule.layout}"
    columns = ("ring", "rank", "device", "tokens", "share", "heads", "memory GiB", "of")
    seq_len, first_rank = cost.workload.seq_len, schedule.ranks[0]
    tokens = schedule.tokens(seq_len)
    rows = []
    for position, group in enumerate(schedule.ring_groups):
        for rank, heads in sorted(zip(group.ranks, group.heads, strict=True)):
            index = rank - first_rank  # in the replica's cluster, whose ranks begin at 0
            rows.append(
                (
                    str(position),
                    str(rank),
                    cost.cluster.devices[index].name,
                    f"{tokens[rank]:,}",
                    f"{tokens[rank] / seq_len:.1%}",
                    str(heads),
                    f"{prediction.memory_bytes[index] / GIB:.2f}",
                    f"{cost.capacity_bytes_D[index] / GIB:.2f}",
                )
            )
    return framed_table(columns, rows, title, numbers=True, width=80)


def _prediction_lines(forecast: Forecast) -> str:
    """Return the lines on a replica's prediction: time, bottleneck, bound, memory, advice, and the search."""
    cost, prediction, planned = forecast.cost, forecast.prediction, forecast.planned
    terms = prediction.terms
    seconds_of_term = {
        "non-attention": terms.non_attention_s,
        "all-to-all": terms.all_to_all_s,
        "ring steps": terms.ring_steps_s,
    }
    shares = ", ".join(f"{name} {seconds / prediction.block_s:.0%}" for name, seconds in seconds_of_term.items())
    lines = [
        f"for {cost.model.name}, {_work_text(cost.workload)}",
        f"predicted:  {time_text(prediction.iteration_s)} per step, {prediction.tokens_per_s:,.0f} tokens/s; "
        f"{time_text(prediction.block_s)} per block ({shares})",
        f"bottleneck: {prediction.bottleneck.text}",
        f"bound:      {prediction.bound_s / prediction.block_s:.1%} of the speed at perfect balance with free links",
    ]
    lines += remark_lines(forecast)
    if planned is not None:
        lines.append(f"searched:   {time_text(planned.search_s)}; {against_baselines(planned)}")
    return "\n".join(lines)


def _work_text(work: Workload) -> str:
    """Return the tokens of an optimizer step and the settings of memory: ``1 micro-batch of 1 x 8,192 tokens ...``."""
    batches = f"{work.micro_batches} micro-batch{'es' if work.micro_batches > 1 else ''}"
    checkpointing = ", activation checkpointing" if work.activation_checkpointing else ""
    if work.keeps_attention:
        checkpointing += " that keeps attention"
    return f"{batches} of {work.micro_batch} x {work.seq_len:,} tokens per step, ZeRO-{work.zero_stage}{checkpointing}"


def remark_lines(forecast: Forecast) -> list[str]:
    """Return lines on what the prediction leaves out, on memory that is short, and on a faster ZeRO stage."""
    cost, prediction, work = forecast.cost, forecast.prediction, forecast.cost.workload
    lines = []
    if offloaded := _offloaded(work):
        lines.append(f"not in it:  copies to and from the host and what it computes there, for the {offloaded}")
    if prediction.reason:
        lines.append(f"memory:     {prediction.reason}")
    # Only ZeRO-3 within nodes is advised: the section sets it. Any other stage is a choice of ds_config.json.
    faster_stage = None
    if work.zero_stage == 3:
        faster_stage = faster_zero_stage(cost, forecast.schedule.shifted(0), prediction.iteration_s)
    if faster_stage is not None and faster_stage.within:
        step_text = time_text(faster_stage.iteration_s)
        lines.append(f"ZeRO:       stage {faster_stage.name} would take {step_text} per step, and fits")
    return lines


def _offloaded(work: Workload) -> str:
    """Return the offloaded states in words: ``optimizer state and the parameters``; empty without offloads."""
    offloads = {"optimizer state": work.offload_optimizer, "parameters": work.offload_parameters}
    return " and the ".join(name for name, is_offloaded in offloads.items() if is_offloaded)


def against_baselines(planned: PlannedSchedule) -> str:
    """Return how many times as fast as each baseline the plan is: ``1.31 x usp 2x8, ring not possible``."""
    parts = []
    for kind, prediction in planned.baselines.items():
        if prediction is None:
            parts.append(f"{kind} not possible")
        else:
            gain = planned.prediction.tokens_per_s / prediction.tokens_per_s
            parts.append(f"{gain:.2f} x {planned.baseline_names[kind]}")
    return ", ".join(parts)


def pipelines_text(plan: Plan) -> str:
    """Return totals and every pipeline in a line: ``3 x 1 samples: ranks 0, 1 (tensor) layers 0-3, rank 2 layer 4``."""
    count = len(plan.pipelines)
    lines = [f"{len(plan.ranks)} ranks in {count} pipeline{'s' if count > 1 else ''}"]
    lines += [f"  {_pipeline_text(pipeline)}" for pipeline in plan.pipelines[:_MAX_LISTED]]
    if count > _MAX_LISTED:
        lines.append(f"  and {count - _MAX_LISTED} more")
    return "\n".join(lines)


def searched_text(searched: SearchedPipelines) -> str:
    """Return the prediction of a plan from `search_pipelines`, its reasons, and its gain over the baselines."""
    planned, predicted = searched.planned, searched.plan.predicted or {}
    recomputed = "with" if searched.plan.activation_checkpointing else "without"
    lines = [
        f"predicted:  {time_text(planned.step_s)} per step of {planned.global_batch} sequences of "
        f"{planned.costs.seq_len:,} tokens, {planned.tokens_per_s:,.0f} tokens/s, {recomputed} recomputation",
        f"memory:     {_memory_text(predicted)}",
    ]
    if planned.idle_ranks:
        lines.append(f"idle:       rank {', '.join(map(str, planned.idle_ranks))}: the step would not be shorter")
    lines += [f"{'why:' if i == 0 else '':12}{reason}" for i, reason in enumerate(planned.reasons)]
    gains = [
        f"{baseline.value / planned.value:.2f} x {baseline.name}"
        if baseline.value is not None
        else f"{baseline.name} not possible"
        for baseline in planned.baselines.values()
    ]
    lines += [f"not {inner + ':':8}{reason}" for inner, reason in searched.facts.impossible_stage_kinds.items()]
    lines.append(f"searched:   {time_text(planned.search_s)}; {', '.join(gains)}")
    return "\n".join(lines)


def judged_text(costs: StageCosts, finished: Finished) -> str:
    """Return the prediction of a plan from `judge_given`, and its reasons."""
    lines = [f"predicted:  {time_text(finished.step_s)} per step"]
    lines += [f"{'why:' if i == 0 else '':12}{reason}" for i, reason in enumerate(reasons_of(costs, finished))]
    return "\n".join(lines)


def _pipeline_text(pipeline: Pipeline) -> str:
    """Return the line of a pipeline, see `pipelines_text`."""
    stages = ", ".join(map(_stage_text, pipeline.stages))
    return f"{pipeline.micro_batches} x {pipeline.micro_batch_size} samples: {stages}"


def _stage_text(stage: Stage) -> str:
    """Return the text of a stage: ``ranks 0, 1 (tensor) layers 0-3``."""
    ranks_text = ", ".join(map(str, stage.ranks[:_MAX_LISTED])) + (", ..." if len(stage.ranks) > _MAX_LISTED else "")
    start, stop = stage.layers or (0, 0)
    ranks = f"rank {ranks_text}" if len(stage.ranks) == 1 else f"ranks {ranks_text} ({stage.inner_text})"
    layers = f"layers {start}-{stop - 1}" if stop - start > 1 else f"layer {start}"
    return f"{ranks} {layers}"


def _memory_text(predicted: JsonObject) -> str:
    """Return the largest peak memory of a rank: ``at most 31.2 GiB on a rank (rank 3)``."""
    need_by_rank = {int(rank): need for rank, need in predicted.get("memory_bytes", {}).items()}
    fullest = max(need_by_rank, key=lambda rank: need_by_rank[rank])
    return f"at most {bytes_text(need_by_rank[fullest])} GiB on a rank (rank {fullest})"
