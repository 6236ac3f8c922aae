"""What a job of pipelines says of its plan, on rank 0. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.job.decide_pipelines import SearchedPipelines
from ds_hetero.planner.outer.explain import reasons_of
from ds_hetero.planner.outer.finish import Finished
from ds_hetero.plans import Pipeline, Plan, Stage

__all__ = ["judged_text", "pipelines_text", "searched_text"]

_SHOWN = 8  # pipelines, and ranks of a stage, that are named


def pipelines_text(plan: Plan) -> str:
    """A line that counts, and a line per pipeline: ``3 x 1 samples: ranks 0, 1 (tensor) layers 0-3, rank 2 layer 3``.

    Args:
        plan: of pipelines with layers.
    """
    count = len(plan.pipelines)
    lines = [f"{len(plan.ranks)} ranks in {count} pipeline{'s' if count > 1 else ''}"]
    lines += [f"  {_pipeline_text(pipeline)}" for pipeline in plan.pipelines[:_SHOWN]]
    if count > _SHOWN:
        lines.append(f"  and {count - _SHOWN} more")
    return "\n".join(lines)


def searched_text(searched: SearchedPipelines) -> str:
    """The prediction of the plan, the reasons for it, and the rivals that it has beaten.

    Args:
        searched: from `ds_hetero.job.decide_pipelines.search_pipelines`.
    """
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
    against = [
        f"{rival.value / planned.value:.2f} x {rival.name}" if rival.value is not None else f"no {rival.name}"
        for rival in planned.rivals.values()
    ]
    lines += [f"not {inner + ':':8}{reason}" for inner, reason in searched.facts.left_out.items()]
    lines.append(f"searched:   {time_text(planned.search_s)}; {', '.join(against)}")
    return "\n".join(lines)


def judged_text(costs: StageCosts, finished: Finished) -> str:
    """The prediction of a given plan, and what decides it.

    Args:
        costs: the cost model.
        finished: from `ds_hetero.planner.outer.given.judge_plan`.
    """
    lines = [f"predicted:  {time_text(finished.step_s)} per step"]
    lines += [f"{'why:' if i == 0 else '':12}{reason}" for i, reason in enumerate(reasons_of(costs, finished))]
    return "\n".join(lines)


def _pipeline_text(pipeline: Pipeline) -> str:
    stages = ", ".join(map(_stage_text, pipeline.stages))
    return f"{pipeline.micro_batches} x {pipeline.micro_batch_size} samples: {stages}"


def _stage_text(stage: Stage) -> str:
    shown = ", ".join(map(str, stage.ranks[:_SHOWN])) + (", ..." if len(stage.ranks) > _SHOWN else "")
    start, stop = stage.layers or (0, 0)
    ranks = f"rank {shown}" if len(stage.ranks) == 1 else f"ranks {shown} ({stage.inner})"
    return f"{ranks} layer{f's {start}-{stop - 1}' if stop - start > 1 else f' {start}'}"


def _memory_text(predicted: Mapping[str, Any]) -> str:
    by_rank = {int(rank): need for rank, need in predicted.get("memory_bytes", {}).items()}
    most = max(by_rank, key=lambda rank: by_rank[rank])
    return f"at most {bytes_text(by_rank[most])} GiB on a rank (rank {most})"
