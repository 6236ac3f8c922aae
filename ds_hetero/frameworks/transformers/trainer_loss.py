"""Compute the loss of the Hugging Face Trainer on shards, so that it equals the loss of one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

from ds_hetero.engine.forward_mode import sharding, wanted_results
from ds_hetero.engine.loader_by_mode import stands_for_none
from ds_hetero.engine.mean_of_tokens import note_items_of_rank
from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.trained.split_model import SplitModel
from ds_hetero.errors import BatchError, SamplingError
from ds_hetero.frameworks.transformers.evaluation import accepts_loss_kwargs
from ds_hetero.frameworks.transformers.resumed_epochs import epochs_of
from ds_hetero.frameworks.transformers.trainer_modes import split_of
from ds_hetero.frameworks.transformers.unlike_steps import DummyBatch, UnlikeSteps, unlike_steps
from ds_hetero.runtime.data.shard_info import attach, shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch
from ds_hetero.runtime.loss import cross_entropy_sum, sequence_parallel_loss
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import IDLE

_REMEDY = "Train it without sequence parallelism, on one rank per sequence, or in a loop by handle.sharded_call."


def prepare_inputs(stock: Function, trainer: Trainer, inputs: Any) -> Any:
    """Extend ``Trainer._prepare_inputs``, which copies a batch to the device: give the copy the shard's `ShardInfo`."""
    prepared = stock(trainer, inputs)
    info = shard_info(inputs.get("position_ids")) if isinstance(inputs, Mapping) else None
    if info is not None and isinstance(prepared, Mapping):
        attach(prepared["position_ids"], info)
    return prepared


def get_batch_samples(
    registry: Registry, stock: Function, trainer: Trainer, epoch_iterator: Any, num_batches: int, device: torch.device
) -> object:
    """Replace ``Trainer.get_batch_samples``: the micro-batches of a step, and the labels of the global batch.

    Returns:
        The micro-batches; and ``num_items_in_batch``, by which the sum of token losses is divided.

        With ``average_tokens_across_devices``, it is the number of labels in all replicas. Without, it is the number of
        labels in this replica times the number of replicas, so that the mean over replicas weighs them equally. If it
        is None, the loss is the mean over each micro-batch.
    """
    batches, items = _draw_batches(registry, stock, trainer, epoch_iterator, num_batches, device)
    epochs_of(trainer).count_trained(len(batches))
    return batches, items


def _draw_batches(
    registry: Registry, stock: Function, trainer: Trainer, epoch_iterator: Any, num_batches: int, device: torch.device
) -> Any:
    """Return what `get_batch_samples` returns, without counting the batches of the epoch."""
    steps = unlike_steps(registry, trainer)
    if steps is not None:
        set_whether_scaled(trainer, scaled=True)
        return steps.read_step(epoch_iterator, num_batches, device)
    split = split_of(registry, trainer)
    if registry.is_pipelined(trainer.model):  # its forward counts the labels of the global batch
        return stock(trainer, epoch_iterator, num_batches, device)[0], None
    if split is None:
        batches, items = stock(trainer, epoch_iterator, num_batches, device)
        if not trainer.args.average_tokens_across_devices:
            note_items_of_rank(items)
        return batches, items
    if wanted_results() is not None:
        batches, items = stock(trainer, epoch_iterator, num_batches, device)
        if items is None:
            return batches, None
        # Stock divides the number by sp_size, and rounds it before transformers 5.20. So it is counted again without.
        with registry.adapters.processes.one_process_per_replica():
            return batches, trainer._get_num_items_in_batch(batches, device)
    # The Trainer draws batches before it calls model.train(), and the loader gives shards to models in training only.
    with sharding(True), naming_trainer(trainer):
        batches, _ = stock(trainer, epoch_iterator, num_batches, device)
    if not batches:
        return batches, None
    for batch in batches:
        expect_labels(trainer, batch)
    if not accepts_loss_kwargs(trainer):  # one process weighs micro-batches equally, see `_labels_of_micro_batch`
        return batches, None
    num_labels = sum(batch["shift_labels"].ne(IGNORE_INDEX).sum() for batch in batches)
    items = torch.as_tensor(num_labels, device=device)
    if trainer.args.average_tokens_across_devices:
        dist.all_reduce(items)
        return batches, items
    dist.all_reduce(items, group=split.replica.sp_group)
    return batches, items * split.replica.num_replicas


def compute_loss(
    registry: Registry,
    stock: Function,
    trainer: Trainer,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> object:
    """Replace ``Trainer.compute_loss``: compute the loss of one process from this rank's shard.

    batches                           loss
    pipelined                         from the engine's forward, already scaled
    a different one on every rank     from the stock method, scaled (`UnlikeSteps.scaled_loss`)
    whole, by sharded calls           from the stock method; label smoothing weighs replicas by their labels
                                      (`_label_smoothing_loss`)
    not sharded                       from the stock method
    shards                            computed from the mean over this rank's labels (`_loss_of_shard`), which models of
                                      transformers, and fused losses such as Liger's, return
    shards, custom loss function      from the model, which calls the function with all logits

    Returns:
        The loss; with ``return_outputs``, (loss, outputs).
    """
    if registry.is_pipelined(trainer.model):
        outputs = trainer.deepspeed(**inputs)  # in evaluation, ``model`` is the model without its engine
        set_whether_scaled(trainer, scaled=True)
        return (outputs.loss, outputs) if return_outputs else outputs.loss
    compute_stock = functools.partial(stock, trainer, model)
    steps = unlike_steps(registry, trainer) if trainer.model.training else None
    if steps is not None:
        return _loss_of_unlike_batch(stock, trainer, steps, model, inputs, return_outputs, num_items_in_batch)
    split = split_of(registry, trainer)
    takes_whole = wanted_results() is not None
    if split is not None and takes_whole and _smooths_by_micro_batch(trainer, inputs, num_items_in_batch):
        return _label_smoothing_loss(compute_stock, trainer, split.replica, inputs, return_outputs)
    if split is None or not split.takes_shards or takes_whole:
        return compute_stock(inputs, return_outputs, num_items_in_batch)
    if split.model_loss.custom_function:
        loss, outputs = _custom_loss_of_shard(split, model, inputs, num_items_in_batch)
    else:
        loss, outputs = _model_loss_of_shard(registry, trainer, split, model, inputs, num_items_in_batch)
    set_whether_scaled(trainer, scaled=num_items_in_batch is not None)
    return (loss, outputs) if return_outputs else loss


def _loss_of_unlike_batch(
    stock: Function,
    trainer: Trainer,
    steps: UnlikeSteps,
    model: Any,
    inputs: Any,
    return_outputs: bool,
    num_items_in_batch: Any,
) -> object:
    """Compute the loss of a batch that only this rank has."""
    if steps.is_scaling:  # a subclass's compute_loss has called super(); its loss is scaled afterwards
        result: Any = stock(trainer, model, inputs, return_outputs, num_items_in_batch)
        if num_items_in_batch is not None:
            steps.note_multiplied(result[0] if return_outputs else result)
        return result

    # Probes of samples pass the model without its engine, whose backward would begin a step.
    def compute(given: object, batch: Batch, num_items: torch.Tensor | None) -> Any:
        return stock(trainer, given, {**batch}, True, num_items)  # a copy, because stock may pop entries

    loss, outputs = steps.scaled_loss(compute, model, inputs, num_items_in_batch, multiplies_by_ranks=True)
    set_whether_scaled(trainer, scaled=True)
    return (loss, outputs) if return_outputs else loss


def _custom_loss_of_shard(
    split: SplitModel, model: Any, inputs: Any, num_items_in_batch: Any
) -> tuple[torch.Tensor, Any]:
    """Compute the loss by the model, which calls the custom loss function with all logits; return loss and outputs."""
    if num_items_in_batch is None:
        outputs = model(**inputs)
        return outputs.loss, outputs
    outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
    # Losses that are divided by the labels of all replicas add up over these, but the engine averages them.
    return outputs.loss * split.replica.num_replicas, outputs


def _model_loss_of_shard(
    registry: Registry, trainer: Trainer, split: SplitModel, model: Any, inputs: Any, num_items_in_batch: Any
) -> tuple[torch.Tensor, Any]:
    """Compute the loss from the mean over this rank's labels that the model returns; return loss and outputs."""
    labels, num_items = inputs["shift_labels"], num_items_in_batch
    if num_items is None:
        num_items = _labels_of_micro_batch(trainer, split.replica, labels.ne(IGNORE_INDEX).sum())
    # A model calls its loss function, which takes shift_labels, only if it gets labels.
    labels_for_model = {} if split.model_loss.shifts_labels_itself else {"labels": labels}
    outputs = model(**{**labels_for_model, **inputs})
    is_of_step = num_items_in_batch is not None
    loss = _loss_of_shard(registry, trainer, split, outputs, labels, num_items, num_items_is_of_step=is_of_step)
    return loss, outputs


def _smooths_by_micro_batch(trainer: Trainer, inputs: Any, num_items: Any) -> bool:
    """Return True if, in training, label smoothing divides by the labels of a micro-batch, not of the whole step."""
    smooths = trainer.label_smoother is not None and trainer.compute_loss_func is None
    return smooths and num_items is None and "labels" in inputs and bool(trainer.model.training)


def _label_smoothing_loss(compute: Any, trainer: Trainer, replica: Replica, inputs: Any, return_outputs: bool) -> Any:
    """Return the loss of label smoothing, with each replica weighed by its number of labels.

    Example: two replicas with 3 and 1 labels. The engine averages their losses, so these are multiplied by 3 * 2 / 4
    and 1 * 2 / 4.

    Args:
        compute: the stock ``compute_loss``, as a function of a batch and ``return_outputs``.
    """
    labels = inputs["labels"]
    if labels.dim() > 1:
        counting_labels = labels[..., 1:] if getattr(trainer, "_loss_shifts_labels", True) else labels
        num_labels = counting_labels.ne(IGNORE_INDEX).sum()
    else:  # one label per sequence
        num_labels = torch.tensor(labels.numel(), device=labels.device)
    num_all = _labels_of_micro_batch(trainer, replica, num_labels)  # each rank of a replica adds the same number
    loss, outputs = compute({**inputs}, True)
    if num_all is not None:
        loss = loss * (num_labels * dist.get_world_size() / num_all.clamp(min=1))
    return (loss, outputs) if return_outputs else loss


def _labels_of_micro_batch(trainer: Trainer, replica: Replica, num_labels: torch.Tensor) -> torch.Tensor | None:
    """Return the sum of ``num_labels`` over all ranks; None if there is one replica, or replicas weigh equally.

    The loss of a micro-batch is divided by this sum if the Trainer gives no number of items: for a model that does not
    take ``num_items_in_batch`` (``accepts_loss_kwargs = False``, or a forward without ``**kwargs``). In one process
    such a model returns the mean over its micro-batch, and the Trainer takes the mean over micro-batches.

    Caller: every rank of the world.
    Collectives: one all_reduce of one number, unless the result is None.
    """
    if replica.num_replicas == 1 or not trainer.args.average_tokens_across_devices:
        return None
    num_labels = num_labels.clone()
    dist.all_reduce(num_labels)
    return num_labels


def _loss_of_shard(
    registry: Registry,
    trainer: Trainer,
    split: SplitModel,
    outputs: Any,
    labels: torch.Tensor,
    num_items: Any,
    *,
    num_items_is_of_step: bool,
) -> torch.Tensor:
    """Return the loss of the replica's sequences, from the outputs of the model on this rank's shard.

    Args:
        labels: [B, s] shifted labels of the shard.
        num_items: number of labels by which the sum of losses is divided; None for the replica's labels in this
            micro-batch.
        num_items_is_of_step: True if ``num_items`` counts the labels of the step, False if those of the micro-batch.
    """
    num_tokens = labels.ne(IGNORE_INDEX).sum()
    # A model adds the auxiliary loss of routers to the mean over tokens, so it is taken out of the sum over tokens.
    router_sum = num_tokens * split.model_loss.router_term(outputs)
    if split.model_loss.shifts_labels_itself:
        loss_sum = cross_entropy_sum(outputs["logits"], labels)
    else:
        mean = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        loss_sum = num_tokens * mean - router_sum
    with split.clock.phase(IDLE, "loss"):
        loss = sequence_parallel_loss(loss_sum, num_tokens, split.replica, num_items)
        if getattr(outputs, "aux_loss", None) is not None:
            if num_items_is_of_step and registry.adapters.trainers.averages_router_losses(trainer):
                router_sum = router_sum / trainer.current_gradient_accumulation_steps
            loss = loss + sequence_parallel_loss(router_sum, num_tokens, split.replica)
    return loss


def set_whether_scaled(trainer: Trainer, *, scaled: bool) -> None:
    """Tell the Trainer whether the loss is already divided by the number of micro-batches in a step.

    Releases without ``loss_is_scaled_for_ga`` divide every loss, unless the model takes ``num_items_in_batch``. With
    these, a divisor of 1 leaves the loss unchanged.
    """
    if hasattr(Trainer, "loss_is_scaled_for_ga"):
        trainer.loss_is_scaled_for_ga = scaled
    elif scaled:
        trainer.current_gradient_accumulation_steps = 1


def track_num_input_tokens(stock: Function, trainer: Trainer, inputs: Any) -> None:
    """Extend ``Trainer._track_num_input_tokens``: tokens of dummy batches, and of empty shards, do not count."""
    if stands_for_none(inputs) or isinstance(inputs, DummyBatch):
        without_tokens = {}
        for name, entry in inputs.items():
            without_tokens[name] = entry[:, :0] if isinstance(entry, torch.Tensor) else entry
        inputs = without_tokens
    stock(trainer, inputs)


@contextlib.contextmanager
def naming_trainer(trainer: Trainer) -> Iterator[None]:
    """Inside the context, add the name of the Trainer's class, and a remedy, to a `BatchError` that is raised."""
    try:
        yield
    except SamplingError:  # about the sampler, not about the entries of a batch
        raise
    except BatchError as error:
        raise BatchError(
            f"the batches of {type(trainer).__name__} cannot be split over the sequence: {error} {_REMEDY}"
        ) from error


def expect_labels(trainer: Trainer, batch: Batch) -> None:
    """Refuse a batch without labels: its loss is not a mean over tokens. Raises `BatchError` on every rank."""
    if "shift_labels" not in batch:
        raise BatchError(
            f"the batches of {type(trainer).__name__} have no labels (they hold {', '.join(sorted(batch))}), so its "
            f"loss is not a mean over tokens, and needs whole sequences. {_REMEDY}"
        )
