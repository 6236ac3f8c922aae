"""Times of the job in one observation: of its ranks, of its pipelines, and of the job as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from ds_hetero.job.pipeline_times import MeasuredPipeline, Steps, measure_pipeline, phases_of_rank
from ds_hetero.job.rank_times import PHASES, SHARES, RankTimes, sums_of
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.replan.policy import Observation
from ds_hetero.values.plans import Pipeline, Plan


class JobTimes(NamedTuple):
    """Times of all ranks and pipelines over the steps since the last observation."""

    ranks: Sequence[RankTimes]  # by rank
    pipelines: Sequence[MeasuredPipeline] = ()  # empty for a job of replicas

    @property
    def step_s(self) -> float:
        """Mean seconds of a step on the slowest rank."""
        return max(rank.step_s / rank.steps for rank in self.ranks)

    @property
    def imbalance(self) -> float:
        """Computing time of the busiest rank over the mean; 1 is balanced."""
        compute_s = [rank.compute_s for rank in self.ranks]
        return max(compute_s) * len(compute_s) / sum(compute_s) if any(compute_s) else 1.0

    @property
    def parts_of_step(self) -> tuple[str, ...]:
        """Names of the parts of a step that ranks report."""
        return PHASES if self.pipelines else SHARES

    def tokens_per_s(self, plan: Plan) -> float:
        """Tokens per second of the job, counted at the first stage of every pipeline."""
        counted_ranks: list[int] = []
        for pipeline in plan.pipelines:
            counted_ranks += [holders[0] for holders in pipeline.stages[0].token_holders]
        return sum(self.ranks[rank].tokens_per_s for rank in counted_ranks)


def observation_of(ranks: Sequence[RankTimes]) -> Observation:
    """Return what the planner needs of a replica's measured times: cost of work on each of its ranks, and its step."""
    return Observation(
        attention_flops=tuple(rank.attention_flops / rank.steps for rank in ranks),
        tokens=tuple(rank.tokens / rank.steps for rank in ranks),
        attention_s_per_flop=tuple(rank.attention_s_per_flop or None for rank in ranks),
        model_s_per_token=tuple(rank.model_s_per_token or None for rank in ranks),
        error=tuple(rank.error for rank in ranks),
        growth=tuple(rank.growth for rank in ranks),
        step_s=max(rank.step_s / rank.steps for rank in ranks),
        length=round(median(rank.length for rank in ranks)),
    )


def planned_step_s(plan: Plan) -> float | None:
    """Return the predicted seconds of a step in the plan file; None if the file has none."""
    step_s: Any = (plan.predicted or {}).get("step_s")
    return float(step_s) if isinstance(step_s, int | float) and step_s > 0 else None


def times_of_passes(plan: Plan, ranks: Sequence[RankTimes], steps: Sequence[Steps]) -> JobTimes:
    """Return the times of a job with pipelines, by rank and by pipeline.

    Args:
        ranks: what every rank reports, over the steps that it has finished.
        steps: the steps that all ranks have finished; the result is of these alone.
    """
    phases = [dict.fromkeys(("forward_s", "backward_s", "hop_s", "bubble_s"), 0.0) for _ in ranks]
    for step in steps:
        for rank, step_times in step.items():
            if plan.place_of(rank) is None:  # a rank without a stage waits for the others
                phases[rank]["bubble_s"] += step_times.joined_s
        for pipeline, stage_index, rank in _ranks_of_stages(plan):
            for name, seconds in phases_of_rank(pipeline, stage_index, rank, step).items():
                phases[rank][name] += seconds
    rank_times = []
    for rank, times in enumerate(ranks):
        sums = sums_of([step[rank] for step in steps])
        rank_times.append(replace(times, steps=len(steps), **sums, **phases[rank]))
    return JobTimes(rank_times, [measure_pipeline(pipeline, steps) for pipeline in plan.pipelines])


def _ranks_of_stages(plan: Plan) -> Iterator[tuple[Pipeline, int, int]]:
    """Yield every rank that has a stage, as (pipeline, number of the stage, rank)."""
    for pipeline in plan.pipelines:
        for stage_index, stage in enumerate(pipeline.stages):
            for rank in stage.ranks:
                yield pipeline, stage_index, rank


def utilizations(job_times: JobTimes, model: ModelSpec | None, peaks: Sequence[float]) -> list[float | None]:
    """Return the MFU of every rank, see `RankTimes.model_flops_utilization`; None for ranks of pipelines.

    A rank of a pipeline has only some layers, and the FLOPs of these are not counted.

    Args:
        model: the trained model; None if no cost model describes it.
        peaks: peak FLOP/s of the devices, 0 if unknown.
    """
    counted_model = None if job_times.pipelines else model
    return [
        rank.model_flops_utilization(counted_model, peak) for rank, peak in zip(job_times.ranks, peaks, strict=True)
    ]
