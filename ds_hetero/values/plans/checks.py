"""Rules that a plan must fulfil: every layer once per pipeline, every rank in one place at most, heads that fit.

Effect of every key of the "heterogeneity" section in a stage of pipelines, by how its ranks share the work.

One list: the refusal at the start of a job, the search and the table in docs/pipelines.md read it, and a test holds
the cost model of stages to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ds_hetero.common.reading import (
    MAX_BATCH,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_SEQ_LEN,
    is_weight,
    is_whole,
    shortened,
    whole_rule,
)
from ds_hetero.errors import PlanError

if TYPE_CHECKING:
    from ds_hetero.values.plans.plan import Pipeline, Plan, PlannedModel, Stage, ZeroOwners

INNER = ("one", "tensor", "sequence")
"""How the ranks of a stage share its work: a single rank; tensor parallelism; a schedule of sequence parallelism."""


def check_plan(plan: Plan) -> None:
    """Refuse a plan that is not consistent.

    Raises:
        PlanError: the message names the field, its values and the rule.
    """
    if not plan.pipelines:
        raise PlanError("pipelines is empty; a plan has at least one pipeline.")
    if plan.model is not None:
        _check_model(plan.model)
    if plan.seq_len is not None:
        _expect_whole("seq_len", plan.seq_len, MAX_SEQ_LEN)
    for i, pipeline in enumerate(plan.pipelines):
        _check_pipeline(f"pipelines[{i}]", pipeline, plan.model)
    ranks = plan.ranks
    if len(set(ranks)) < len(ranks):
        twice = sorted({rank for rank, following in pairwise(ranks) if rank == following})
        raise PlanError(f"ranks {twice} are in more than one stage; a rank has one place at most.")
    given = [
        getattr(pipeline, key) is not None
        for pipeline in plan.pipelines
        for key in ("micro_batch_size", "micro_batches")
    ]
    if any(given) and not all(given):
        raise PlanError("micro_batch_size and micro_batches must be given for every pipeline, or for none.")
    if plan.zero is not None:
        _check_zero(plan.zero, set(ranks), any(len(pipeline.stages) > 1 for pipeline in plan.pipelines))


def _check_model(model: PlannedModel) -> None:
    for name, most in (("num_layers", MAX_LAYERS), ("num_heads", MAX_HEADS), ("num_kv_heads", MAX_HEADS)):
        _expect_whole(f"model.{name}", getattr(model, name), most)
    if model.num_heads % model.num_kv_heads:
        raise PlanError(f"model.num_heads={model.num_heads} is not a multiple of num_kv_heads={model.num_kv_heads}.")


def _check_pipeline(where: str, pipeline: Pipeline, model: PlannedModel | None) -> None:
    if not pipeline.stages:
        raise PlanError(f"{where}.stages is empty; a pipeline has at least one stage.")
    for key in ("micro_batch_size", "micro_batches"):
        if getattr(pipeline, key) is not None:
            _expect_whole(f"{where}.{key}", getattr(pipeline, key), MAX_BATCH)
    for j, stage in enumerate(pipeline.stages):
        _check_stage(f"{where}.stages[{j}]", stage, model)
    _check_layers(where, pipeline, model)


def _check_stage(where: str, stage: Stage, model: PlannedModel | None) -> None:
    if not stage.ranks or len(set(stage.ranks)) < len(stage.ranks):
        raise PlanError(f"{where}.ranks must name at least one rank, each once, got {shortened(list(stage.ranks))}.")
    if not all(is_whole(rank, 0, MAX_RANKS) for rank in stage.ranks):
        raise PlanError(f"{where}.ranks must be whole numbers >= 0, got {shortened(list(stage.ranks))}.")
    if stage.inner not in INNER:
        raise PlanError(f"{where}.inner {shortened(stage.inner)} is unknown; it is one of {', '.join(INNER)}.")
    if stage.inner == "one" and len(stage.ranks) > 1:
        raise PlanError(
            f'{where} has {len(stage.ranks)} ranks {shortened(list(stage.ranks))}, but "inner" is "one". Say how they '
            'share the work: "tensor", or "sequence" with a schedule.'
        )
    if (stage.inner == "sequence") != (stage.schedule is not None):
        raise PlanError(f'{where}: a "sequence" stage has a schedule, and no other stage has one.')
    if stage.schedule is not None and sorted(stage.ranks) != list(stage.schedule.ranks):
        of_schedule, of_stage = shortened(list(stage.schedule.ranks)), shortened(list(stage.ranks))
        raise PlanError(f"{where}.schedule is of ranks {of_schedule}, the stage of {of_stage}.")
    if stage.in_flight is not None:
        _expect_whole(f"{where}.in_flight", stage.in_flight, MAX_BATCH)
    if model is not None:
        _check_heads(where, stage, model)


def _check_heads(where: str, stage: Stage, model: PlannedModel) -> None:
    if stage.inner == "tensor" and model.num_heads % len(stage.ranks):
        raise PlanError(
            f"{where} cuts {model.num_heads} heads over {len(stage.ranks)} ranks; a tensor-parallel degree divides the "
            "heads."
        )
    schedule = stage.schedule
    if schedule is None:
        return
    if (schedule.num_heads, schedule.num_kv_heads) != (model.num_heads, model.num_kv_heads):
        raise PlanError(
            f"{where}.schedule is for {schedule.num_heads} heads and {schedule.num_kv_heads} KV heads, the model of "
            f"the plan has {model.num_heads} and {model.num_kv_heads}."
        )


def _check_layers(where: str, pipeline: Pipeline, model: PlannedModel | None) -> None:
    layers = [stage.layers for stage in pipeline.stages]
    if layers == [None]:
        return
    if model is None:
        raise PlanError(f"{where} says which layers its stages hold, so the plan must have model.num_layers.")
    cuts = [0, *(interval[1] for interval in layers if interval is not None)]
    consecutive = [(start, stop) for start, stop in pairwise(cuts)]
    if layers != consecutive or cuts[-1] != model.num_layers or any(start >= stop for start, stop in consecutive):
        shown = [None if interval is None else list(interval) for interval in layers]
        raise PlanError(
            f"{where}: the stages hold layers {shortened(shown)}; they must be consecutive, of at least one layer "
            f"each, and cover [0, {model.num_layers}) once."
        )


def _check_zero(zero: ZeroOwners, ranks: set[int], has_stages: bool) -> None:
    if not is_whole(zero.stage, 0, 3):
        raise PlanError(f"zero.stage must be 0, 1, 2 or 3, got {shortened(zero.stage)}.")
    if zero.stage == 3 and has_stages:
        raise PlanError(
            "zero.stage 3 does not work with pipelines of several stages, whose ranks hold their layers whole. "
            "Use 1 or 2."
        )
    for rank, weight in zero.owner_weights:
        if rank not in ranks or not is_weight(weight):
            raise PlanError(
                f"zero.owner_weights gives rank {rank} the weight {shortened(weight)}; it takes finite weights >= 0 of "
                "ranks that have a place in the plan."
            )
    if zero.owner_weights and not any(weight for _, weight in zero.owner_weights):
        raise PlanError("zero.owner_weights are all zero; somebody must own the optimizer state.")


def _expect_whole(where: str, value: Any, most: int) -> None:
    if not is_whole(value, 1, most):
        raise PlanError(f"{where} must be {whole_rule(value, 1, most)}, got {shortened(value)}.")


@dataclass(frozen=True, slots=True)
class SectionKey:
    """Effect of one key.

    Args:
        refused: why, by the kinds of stages with which it is refused.
        idle: why, by the kinds of stages in which it has nothing to say; rank 0 says so.
        off: values with which it asks for nothing.
    """

    refused: Mapping[str, str] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)
    off: tuple[Any, ...] = ()


def _refused(why: str, *off: Any) -> SectionKey:
    return SectionKey(refused=dict.fromkeys(INNER, why), off=off)


_FOLLOWED = SectionKey()

SECTION_KEYS: Mapping[str, SectionKey] = {
    "enabled": _FOLLOWED,
    "cluster": _FOLLOWED,
    "schedule": _FOLLOWED,
    "planner": _FOLLOWED,
    "parallel": _FOLLOWED,
    "seq_len": _FOLLOWED,
    "tile_tokens": _FOLLOWED,
    "attention": SectionKey(
        idle=dict.fromkeys(("one", "tensor"), "such stages compute the attention that the model was built with"),
        off=(None,),
    ),
    "replan.enabled": SectionKey(
        refused={"tensor": "it moves layers, and shards of tensor parallelism stay where they are"}, off=(False,)
    ),
    "replan.report_only": _FOLLOWED,
    "layout": _refused("the schedules of the plan's stages have theirs", None),
    "batch": _refused("the batches of pipelines are those of the plan", None),
    "elastic": _refused("stages cannot go on from memory with other ranks yet", None),
    "placement.mode": _refused("batches are cut by their length", "stream"),
    "loss": _refused("pipelines compute the loss of the model themselves", None),
    "zero_partition": _refused('optimizer state follows "zero.owner_weights" of the plan', "uniform"),
    "verify": _refused("no rank holds the whole model that the stages would be compared with", "off"),
    "report": _FOLLOWED,
}
