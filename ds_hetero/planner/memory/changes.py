"""Changes of a training that save memory: what they cost, and how they are made.

Offloading of the optimizer is not in the cost models: its time is added here, as transfers over the card's PCIe that
nothing hides, and Adam's step in the host's memory at `HOST_BYTES_PER_S` a rank, an assumption.

Dimension key: D ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ds_hetero.cost.terms.host_time import host_bytes_per_s_D
from ds_hetero.cost.terms.layer_memory import MLP_TILE_TOKENS
from ds_hetero.cost.workload import Workload
from ds_hetero.planner.memory.best import Fitted, best_schedule, with_workload
from ds_hetero.planner.memory.owner_weights import weights_by_memory
from ds_hetero.values.schedule import Schedule

HOST_BYTES_PER_S = 20e9  # of one rank's share of the host's memory, read and written by Adam
PLANNED = "planned tokens and heads"  # a change of the schedule's source
SMALL_BUCKET = 50_000_000  # elements; a tenth of DeepSpeed's, and still long enough for a link


@dataclass(frozen=True, slots=True)
class Changed:
    """A training after changes.

    Args:
        fitted: its schedule and prediction.
        added_s: time of a step that the cost model does not know, for offloading.
    """

    fitted: Fitted
    added_s: float = 0.0

    @property
    def iteration_s(self) -> float:
        """Predicted time of an optimizer step."""
        return self.fitted.prediction.iteration_s + self.added_s


@dataclass(frozen=True, slots=True)
class Change:
    """One way to need less memory.

    Args:
        name: for people and for JSON.
        how: what to write where.
        applies: whether it would change a workload that is planned by a source.
        workload: the workload after it; the same where it changes something else.
    """

    name: str
    how: str
    applies: Callable[[Workload, str | Schedule], bool]
    workload: Callable[[Workload], Workload]


def _stage(stage: int) -> Change:
    return Change(
        f"ZeRO stage {stage}",
        f'"zero_optimization": {{"stage": {stage}}} in ds_config.json',
        lambda work, _: work.zero_stage < stage,
        lambda work: replace(work, zero_stage=max(stage, work.zero_stage)),
    )


CHANGES = (
    Change(
        "tiled loss",
        "deepspeed's sequence_tiled_compute around the function that makes logits and loss, in a loop of your own",
        lambda work, _: not work.tiled_logits,
        lambda work: replace(work, tiled_logits=True),
    ),
    Change(
        "tiled MLP and loss",
        f'"tile_tokens": {MLP_TILE_TOKENS} in the section, and loss = engine(**batch).loss in a loop of your own',
        lambda work, _: not work.tiled_mlp,
        lambda work: replace(work, tiled_logits=True, tiled_mlp=True),
    ),
    Change(
        "smaller gradient buckets",
        f'"zero_optimization": {{"reduce_bucket_size": {SMALL_BUCKET:.0e}}} in ds_config.json',
        lambda work, _: work.zero_stage > 0 and work.buffers.reduce_bucket > SMALL_BUCKET,
        lambda work: replace(work, buffers=replace(work.buffers, reduce_bucket=SMALL_BUCKET)),
    ),
    Change(
        "activation checkpointing",
        "model.activation_checkpointing_enable(), or activation_checkpointing=True of the HF Trainer (gradient_... "
        "before transformers 5.23)",
        lambda work, _: not work.activation_checkpointing,
        lambda work: replace(work, activation_checkpointing=True),
    ),
    Change(
        PLANNED,
        '"schedule": "plan" in the section: small cards get fewer tokens and heads',
        lambda _, source: source != "plan",
        lambda work: work,
    ),
    Change(
        "weights by memory",
        '"zero_partition": "memory" in the section: large cards own more of the model states',
        lambda work, _: work.zero_stage > 0 and work.zero_weights is None,
        lambda work: work,
    ),
    _stage(1),
    _stage(2),
    _stage(3),
    Change(
        "optimizer offload",
        '"zero_optimization": {"offload_optimizer": {"device": "cpu"}} in ds_config.json',
        lambda work, _: work.zero_stage > 0 and not work.offload_optimizer,
        lambda work: replace(work, offload_optimizer=work.zero_stage > 0),
    ),
    Change(
        "one sequence per micro-batch",
        '"train_micro_batch_size_per_gpu": 1, with as many more "gradient_accumulation_steps"',
        lambda work, _: work.micro_batch > 1,
        lambda work: replace(work, micro_batch=1, micro_batches=work.micro_batches * work.micro_batch),
    ),
    Change(
        "activation offload",
        "model.activation_checkpointing_enable(offload=True) of transformers, or activation_checkpointing_kwargs="
        '{"offload": True} of the HF Trainer',
        lambda work, _: not work.offload_activations,
        lambda work: replace(work, activation_checkpointing=True, offload_activations=True),
    ),
)


def apply(fitted: Fitted, source: str | Schedule, changes: tuple[Change, ...]) -> Changed:
    """Plan the training with these changes.

    Args:
        fitted: before them.
        source: a schedule, or the name of the strategy that makes one.
        changes: of `CHANGES`, each at most once.

    Raises:
        PlanError: the strategy has no schedule for it, or the changes are not enough by far.
    """
    names = {change.name for change in changes}
    work = fitted.cost.workload
    for change in sorted(changes, key=CHANGES.index):
        work = change.workload(work)
    if PLANNED in names:
        source = "plan"
    after = best_schedule(with_workload(fitted.cost, work), source)
    if "weights by memory" in names and not after.fits:
        weights = weights_by_memory([(after.cost, after.schedule)])
        after = best_schedule(with_workload(fitted.cost, replace(work, zero_weights=weights)), after.schedule)
    return Changed(
        after, _offload_s(after) if work.offload_optimizer and not fitted.cost.workload.offload_optimizer else 0.0
    )


def _offload_s(fitted: Fitted) -> float:
    """Gradients to the host, Adam there, parameters back; the slowest rank decides."""
    work, model = fitted.cost.workload, fitted.cost.model
    num_ranks = fitted.cost.cluster.num_ranks
    weights_D = np.ones(num_ranks) if work.zero_weights is None else np.array(work.zero_weights)
    own_D = model.num_parameters * weights_D / weights_D.sum() / work.data_parallel
    moved_D = own_D * (work.gradient_bytes + work.element_bytes)
    stepped_D = own_D * (2 * work.optimizer_bytes + work.gradient_bytes + work.element_bytes)
    return float((moved_D / host_bytes_per_s_D(fitted.cost.cluster.devices) + stepped_D / HOST_BYTES_PER_S).max())
