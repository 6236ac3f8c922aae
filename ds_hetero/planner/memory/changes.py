"""Changes of a training that save memory: what users have to write for each, and the training after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ds_hetero.cost.terms.layer_memory import MLP_TILE_TOKENS
from ds_hetero.cost.workload import Workload
from ds_hetero.models.trained_weights import USUAL_RANK
from ds_hetero.planner.memory.best import Fitted, best_schedule, with_workload
from ds_hetero.planner.memory.zero_weights import weights_by_memory
from ds_hetero.values.schedule import Schedule

PLANNED = "planned tokens and heads"  # name of the change that replaces the schedule, and not the workload
SMALL_BUCKET = 50_000_000  # elements: a tenth of DeepSpeed's default, large enough for full bandwidth; never measured


@dataclass(frozen=True, slots=True)
class Change:
    """One way to need less memory.

    Args:
        applies: whether the change makes a difference for a workload and a source of its schedule.
    """

    name: str  # for people and for JSON
    how: str  # what the user has to write
    applies: Callable[[Workload, str | Schedule], bool]
    workload: Callable[[Workload], Workload]  # the workload after the change; the same if it changes something else
    trains_less: bool = False  # whether fewer weights are trained, which changes the result
    offloads: bool = False  # whether it moves bytes to host memory; useless on a device that shares it


def _stage(stage: int) -> Change:
    """Make the change to a higher ZeRO stage."""
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
        "attention computed again",
        '"keep_attention": false in the section',
        lambda work, _: work.keeps_attention,
        lambda work: replace(work, keep_attention=False),
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
        offloads=True,
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
        offloads=True,
    ),
    Change(
        "LoRA",
        f"get_peft_model(model, LoraConfig(r={USUAL_RANK}, target_modules='all-linear')) of peft: fewer weights learn",
        lambda work, _: not work.adapter_rank,
        lambda work: replace(work, adapter_rank=work.adapter_rank or USUAL_RANK),
        trains_less=True,
    ),
    Change(
        "QLoRA",
        "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True), and LoRA",
        lambda work, _: work.quantization is None,
        lambda work: replace(work, adapter_rank=work.adapter_rank or USUAL_RANK, quantization="nf4"),
        trains_less=True,
    ),
)


def apply(fitted: Fitted, source: str | Schedule, changes: tuple[Change, ...]) -> Fitted:
    """Plan the training with these changes, and return its schedule and prediction.

    Args:
        fitted: the training without changes.
        source: a schedule, or the name of a strategy, see `best_schedule`.
        changes: members of `CHANGES`, each at most once.

    Raises:
        PlanError: the strategy has no schedule for the changed training, or it is far from fitting.
    """
    names = {change.name for change in changes}
    work = fitted.cost.workload
    for change in sorted(changes, key=CHANGES.index):
        work = change.workload(work)
    if PLANNED in names:
        source = "plan"
    changed = best_schedule(with_workload(fitted.cost, work), source)
    if "weights by memory" in names and not changed.fits:
        weights = weights_by_memory([(changed.cost, changed.schedule)])
        changed = best_schedule(with_workload(fitted.cost, replace(work, zero_weights=weights)), changed.schedule)
    return changed
