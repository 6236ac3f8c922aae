"""Checks of a plan: its stages hold every layer once, a rank is in one stage, and heads can be split as it says.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from ds_hetero.common.reading import (
    MAX_BATCH,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_SEQ_LEN,
    expect_whole_number,
    is_weight,
    is_whole,
    shortened,
)
from ds_hetero.errors import PlanError
from ds_hetero.values.plans.stages import BATCH_KEYS, INNER, Pipeline, PlannedModel, Stage, ZeroOwners, batches_of


def check_parts(
    pipelines: Sequence[Pipeline], model: PlannedModel | None, seq_len: int | None, zero: ZeroOwners | None
) -> None:
    """Check the fields of a `ds_hetero.values.plans.Plan`, also against one another.

    Raises:
        PlanError: a field is wrong; the message names it, its values and the rule.
    """
    if not pipelines:
        raise PlanError("pipelines is empty; a plan has at least one pipeline.")
    if model is not None:
        _check_model(model)
    if seq_len is not None:
        expect_whole_number("seq_len", seq_len, 1, MAX_SEQ_LEN, PlanError)
    for i, pipeline in enumerate(pipelines):
        _check_pipeline(f"pipelines[{i}]", pipeline, model)
    ranks = sorted(chain.from_iterable(pipeline.ranks for pipeline in pipelines))
    if len(set(ranks)) < len(ranks):
        repeated_ranks = sorted({rank for rank, following in pairwise(ranks) if rank == following})
        raise PlanError(f"ranks {repeated_ranks} are in more than one stage. Give every rank to one stage at most.")
    batch_keys = [set(batches_of(pipeline)) for pipeline in pipelines]
    if any(batch_keys) and any(keys != set(BATCH_KEYS) for keys in batch_keys):
        raise PlanError("micro_batch_size and micro_batches must be given for every pipeline, or for none.")
    if zero is not None:
        _check_zero(zero, set(ranks), any(len(pipeline.stages) > 1 for pipeline in pipelines))


def _check_model(model: PlannedModel) -> None:
    """Check the numbers of the model."""
    for name, maximum in (("num_layers", MAX_LAYERS), ("num_heads", MAX_HEADS), ("num_kv_heads", MAX_HEADS)):
        expect_whole_number(f"model.{name}", getattr(model, name), 1, maximum, PlanError)
    if model.num_heads % model.num_kv_heads:
        raise PlanError(f"model.num_heads={model.num_heads} is not a multiple of num_kv_heads={model.num_kv_heads}.")


def _check_pipeline(where: str, pipeline: Pipeline, model: PlannedModel | None) -> None:
    """Check a pipeline's batches, stages and layers; ``where`` is its place in the file."""
    if not pipeline.stages:
        raise PlanError(f"{where}.stages is empty; a pipeline has at least one stage.")
    for key in BATCH_KEYS:
        if getattr(pipeline, key) is not None:
            expect_whole_number(f"{where}.{key}", getattr(pipeline, key), 1, MAX_BATCH, PlanError)
    for j, stage in enumerate(pipeline.stages):
        _check_stage(f"{where}.stages[{j}]", stage, model)
    _check_layers(where, pipeline, model)


def _check_stage(where: str, stage: Stage, model: PlannedModel | None) -> None:
    """Check a stage's ranks, how they share its work, and its schedule."""
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
    _check_tensor_groups(where, stage)
    if stage.schedule is not None and sorted(stage.ranks) != sorted(chain.from_iterable(stage.token_holders)):
        schedule_ranks, stage_ranks = shortened(list(stage.schedule.ranks)), shortened(list(stage.ranks))
        raise PlanError(
            f"{where}.schedule has ranks {schedule_ranks}, and the stage has ranks {stage_ranks}. Give both the same."
        )
    if stage.in_flight is not None:
        expect_whole_number(f"{where}.in_flight", stage.in_flight, 1, MAX_BATCH, PlanError)
    if model is not None:
        _check_heads(where, stage, model)


def _check_tensor_groups(where: str, stage: Stage) -> None:
    """Check that the tensor groups of a stage can share the heads of its schedule."""
    size, schedule = stage.tensor_size, stage.schedule
    expect_whole_number(f"{where}.tensor_size", size, 1, MAX_HEADS, PlanError)
    if schedule is None:
        if size > 1:
            raise PlanError(
                f'{where}.tensor_size is {size}, but tensor groups share sequences: they need "inner": "sequence" and '
                'a schedule. If all ranks of the stage are one group, use "inner": "tensor" and no tensor_size.'
            )
        return
    if size > 1 and schedule.rank_step != size:
        raise PlanError(
            f"{where}.schedule has ranks {schedule.rank_step} apart, tensor_size is {size}. They must be equal: a "
            "schedule names the first rank of every tensor group."
        )
    if size > 1 and len(schedule.ranks) == 1:
        raise PlanError(
            f'{where} is one tensor group, which shares no sequence. Use "inner": "tensor" without a schedule.'
        )
    numbers = {
        "heads": schedule.num_heads,
        "KV heads": schedule.num_kv_heads,
        **{f"heads of rank {r}": h for group in schedule.groups for r, h in zip(group.ranks, group.heads, strict=True)},
    }
    for name, number in numbers.items():
        if number % size:
            raise PlanError(
                f"{where}: {number} {name} cannot be shared by the {size} ranks of a tensor group. Give a tensor_size "
                "that divides the heads and KV heads of the model, and the heads of every rank in the schedule."
            )


def _check_heads(where: str, stage: Stage, model: PlannedModel) -> None:
    """Check that a stage can split the model's heads."""
    if stage.inner == "tensor" and model.num_heads % len(stage.ranks):
        raise PlanError(
            f"{where} splits {model.num_heads} heads over {len(stage.ranks)} ranks of tensor parallelism. Give it a "
            "number of ranks that divides the heads."
        )
    schedule = stage.schedule
    if schedule is None:
        return
    if (schedule.num_heads, schedule.num_kv_heads) != (model.num_heads, model.num_kv_heads):
        raise PlanError(
            f"{where}.schedule is for {schedule.num_heads} heads and {schedule.num_kv_heads} KV heads, the model of "
            f"the plan has {model.num_heads} and {model.num_kv_heads}. Plan again for this model."
        )


def _check_layers(where: str, pipeline: Pipeline, model: PlannedModel | None) -> None:
    """Check that the stages of a pipeline hold every layer once, in order."""
    layers = [stage.layers for stage in pipeline.stages]
    if layers == [None]:
        return
    if model is None:
        raise PlanError(f"{where} says which layers its stages hold, so the plan must have model.num_layers.")
    cuts = [0, *(interval[1] for interval in layers if interval is not None)]
    consecutive = list(pairwise(cuts))
    has_empty = any(start >= stop for start, stop in consecutive)
    if layers != consecutive or cuts[-1] != model.num_layers or has_empty:
        layer_lists = [None if interval is None else list(interval) for interval in layers]
        raise PlanError(
            f"{where}: the stages hold layers {shortened(layer_lists)}; they must be consecutive, of at least one "
            f"layer each, and cover [0, {model.num_layers}) once."
        )


def _check_zero(zero: ZeroOwners, ranks: set[int], has_stages: bool) -> None:
    """Check the ZeRO stage and the owners of optimizer state.

    Args:
        ranks: all ranks of the plan.
        has_stages: whether a pipeline has several stages.
    """
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
        raise PlanError("zero.owner_weights are all zero; at least one rank must own optimizer state.")
