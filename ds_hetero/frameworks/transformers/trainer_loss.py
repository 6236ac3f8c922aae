"""The loss of the Hugging Face Trainer on shards: that of the accumulated global batch in one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

from ds_hetero.engine.adapters import SplitModel
from ds_hetero.engine.forward_mode import sharding, wanted_results
from ds_hetero.engine.loader_by_mode import stands_for_none
from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import (
    BatchError,
    SamplingError,
)
from ds_hetero.frameworks.transformers.evaluation import (
    accepts_loss_kwargs,
)
from ds_hetero.frameworks.transformers.resumed_epochs import epochs_of
from ds_hetero.frameworks.transformers.trainer_modes import (
    split_of,
)
from ds_hetero.frameworks.transformers.unlike_batches import (
    Filler,
    unlike_steps,
)
from ds_hetero.runtime.data.shard_info import attach, shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch
from ds_hetero.runtime.loss import cross_entropy_sum, sequence_parallel_loss
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import IDLE

_WITHOUT = "Train it without sequence parallelism, on one rank per sequence, or in a loop by handle.sharded_call."


def prepare_inputs(stock: Function, trainer: Trainer, inputs: Any) -> Any:
    """Extend ``Trainer._prepare_inputs``: a copy of a shard on another device keeps the loader's `ShardInfo`."""
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
        The micro-batches; and ``num_items_in_batch``, the number that the sum of token losses is divided by. With
        ``average_tokens_across_devices`` it is the number of labels in all replicas. Without, it is that of this
        replica times the number of replicas, so that the mean over replicas weighs them equally. None: the mean of each
        micro-batch counts.
    """
    batches, items = _draw_batches(registry, stock, trainer, epoch_iterator, num_batches, device)
    epochs_of(trainer).use(len(batches))
    return batches, items


def _draw_batches(
    registry: Registry, stock: Function, trainer: Trainer, epoch_iterator: Any, num_batches: int, device: torch.device
) -> Any:
    """Return the same as `get_batch_samples`."""
    unlike = unlike_steps(registry, trainer)
    if unlike is not None:
        _say_whether_scaled(trainer, scaled=True)
        return unlike.take(epoch_iterator, num_batches, device)
    split = split_of(registry, trainer)
    if registry.is_pipelined(trainer.model):  # its forward counts the labels of the global batch
        return stock(trainer, epoch_iterator, num_batches, device)[0], None
    if split is None:
        return stock(trainer, epoch_iterator, num_batches, device)
    if wanted_results() is not None:
        batches, items = stock(trainer, epoch_iterator, num_batches, device)
        if items is None:
            return batches, None
        # Gathered once per replica, so it is right, but ``_get_num_items_in_batch`` has divided it by the sp_size.
        return batches, items * trainer.get_sp_size()
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
    """Replace ``Trainer.compute_loss``: the loss of one process, from this rank's shard.

    batches                       loss
    pipelined                     of the engine's forward, already scaled
    unlike batches per rank       `UnlikeSteps.loss`
    whole, by sharded calls       stock's; label smoothing weighs replicas by their labels (`_smoothed`)
    not sharded                   stock's
    shards, custom loss function  the model's, of the gathered logits
    shards                        from the mean over this rank's labels (`_loss_of_shard`), which the models of
                                  transformers and fused losses such as Liger's all return
    """
    if registry.is_pipelined(trainer.model):
        outputs = trainer.deepspeed(**inputs)  # in evaluation, ``model`` is the model without its engine
        _say_whether_scaled(trainer, scaled=True)
        return (outputs.loss, outputs) if return_outputs else outputs.loss
    unlike = unlike_steps(registry, trainer) if trainer.model.training else None
    if unlike is not None and not unlike.is_scaling:

        def loss_and_outputs(called: object, batch: Batch, num_items: torch.Tensor | None) -> Any:
            return stock(trainer, called, {**batch}, True, num_items)  # a copy: stock may pop entries

        loss, outputs = unlike.loss(loss_and_outputs, model, inputs, num_items_in_batch, multiplies=True)
        _say_whether_scaled(trainer, scaled=True)
        return (loss, outputs) if return_outputs else loss
    if unlike is not None:  # called by super() of a subclass's compute_loss, whose loss is scaled afterwards
        returned: Any = stock(trainer, model, inputs, return_outputs, num_items_in_batch)
        if num_items_in_batch is not None:
            unlike.note_multiplied(returned[0] if return_outputs else returned)
        return returned
    split = split_of(registry, trainer)
    takes_whole = wanted_results() is not None
    if split is not None and takes_whole and _smooths_by_micro_batch(trainer, inputs, num_items_in_batch):
        return _smoothed(functools.partial(stock, trainer, model), trainer, split.replica, inputs, return_outputs)
    if split is None or not split.takes_shards or takes_whole:
        return stock(trainer, model, inputs, return_outputs, num_items_in_batch)
    if split.own_loss:
        is_scaled = num_items_in_batch is not None
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch) if is_scaled else model(**inputs)
        # Losses that are divided by the labels of all replicas add up over these, but the engine averages them.
        loss = outputs.loss * (split.replica.num_replicas if is_scaled else 1)
        _say_whether_scaled(trainer, scaled=is_scaled)
        return (loss, outputs) if return_outputs else loss
    labels = inputs["shift_labels"]
    is_scaled = num_items_in_batch is not None
    if not is_scaled:
        num_items_in_batch = _labels_of_micro_batch(trainer, split.replica, labels.ne(IGNORE_INDEX).sum())
    # A model calls its loss function, which takes shift_labels, only if it gets labels.
    labels_for_model = {} if split.shifts_labels_itself else {"labels": labels}
    outputs = model(**{**labels_for_model, **inputs})
    loss = _loss_of_shard(registry, trainer, split, outputs, labels, num_items_in_batch, of_step=is_scaled)
    _say_whether_scaled(trainer, scaled=is_scaled)
    return (loss, outputs) if return_outputs else loss


def _smooths_by_micro_batch(trainer: Trainer, inputs: Any, num_items: Any) -> bool:
    """Return True if label smoothing in training takes the mean over the labels of a replica's micro-batch."""
    smooths = trainer.label_smoother is not None and trainer.compute_loss_func is None
    return smooths and num_items is None and "labels" in inputs and bool(trainer.model.training)


def _smoothed(compute: Any, trainer: Trainer, replica: Replica, inputs: Any, return_outputs: bool) -> Any:
    """Return the loss of label smoothing, with replicas weighed by their labels.

    Example, two replicas with 3 and 1 labels: the engine averages their losses, so these are multiplied by 3 * 2 / 4
    and 1 * 2 / 4.
    """
    labels = inputs["labels"]
    if labels.dim() > 1:
        counted = labels[..., 1:] if getattr(trainer, "_loss_shifts_labels", True) else labels
        num_labels = counted.ne(IGNORE_INDEX).sum()
    else:  # one label per sequence
        num_labels = torch.tensor(labels.numel(), device=labels.device)
    num_all = _labels_of_micro_batch(trainer, replica, num_labels)  # over all ranks, each of a replica counted
    loss, outputs = compute({**inputs}, True)
    if num_all is not None:
        loss = loss * (num_labels * dist.get_world_size() / num_all.clamp(min=1))
    return (loss, outputs) if return_outputs else loss


def _labels_of_micro_batch(trainer: Trainer, replica: Replica, num_labels: torch.Tensor) -> torch.Tensor | None:
    """Return the labels of a micro-batch over all ranks; None if there is one replica, or replicas weigh equally.

    A model that does not take ``num_items_in_batch`` (``accepts_loss_kwargs = False``, or a forward without
    ``**kwargs``) returns the mean of its micro-batch, and the Trainer takes the mean of these.

    Caller: every rank of the world.
    Collectives: one all_reduce of one number, if it does not return None.
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
    of_step: bool,
) -> torch.Tensor:
    """Return the loss of the sequences of which this rank has a shard.

    Args:
        labels: [B, s] shifted labels of the shard.
        num_items: labels that the sum is divided by, of the step or of the micro-batch; None for this micro-batch's.
        of_step: whether ``num_items`` are those of the step.
    """
    num_tokens = labels.ne(IGNORE_INDEX).sum()
    # The auxiliary loss of routers is part of the model's loss, but not of the mean over the tokens of a step.
    router_sum = num_tokens * split.router_term(outputs)
    if split.shifts_labels_itself:
        loss_sum = cross_entropy_sum(outputs["logits"], labels)
    else:
        mean = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        loss_sum = num_tokens * mean - router_sum
    with split.clock.phase(IDLE, "loss"):
        loss = sequence_parallel_loss(loss_sum, num_tokens, split.replica, num_items)
        if getattr(outputs, "aux_loss", None) is not None:
            if of_step and registry.adapters.trainers.averages_router_losses(trainer):
                router_sum = router_sum / trainer.current_gradient_accumulation_steps
            loss = loss + sequence_parallel_loss(router_sum, num_tokens, split.replica)
    return loss


def _say_whether_scaled(trainer: Trainer, *, scaled: bool) -> None:
    """Tell the Trainer whether the loss is already divided by the micro-batches of a step.

    Releases without ``loss_is_scaled_for_ga`` divide every loss, unless the model takes ``num_items_in_batch``. There a
    divisor of 1 leaves the loss as it is.
    """
    if hasattr(Trainer, "loss_is_scaled_for_ga"):
        trainer.loss_is_scaled_for_ga = scaled
    elif scaled:
        trainer.current_gradient_accumulation_steps = 1


def track_num_input_tokens(stock: Function, trainer: Trainer, inputs: Any) -> None:
    """Extend ``Trainer._track_num_input_tokens``: the placeholder tokens of an empty shard do not count."""
    if stands_for_none(inputs) or isinstance(inputs, Filler):
        counted = {}
        for name, entry in inputs.items():
            counted[name] = entry[:, :0] if isinstance(entry, torch.Tensor) else entry
        inputs = counted
    stock(trainer, inputs)


@contextlib.contextmanager
def naming_trainer(trainer: Trainer) -> Iterator[None]:
    """Add the Trainer's class to a `BatchError` that is raised inside."""
    try:
        yield
    except SamplingError:  # about the sampler, not about the entries of a batch
        raise
    except BatchError as error:
        raise BatchError(
            f"the batches of {type(trainer).__name__} cannot be split over the sequence: {error} {_WITHOUT}"
        ) from error


def expect_labels(trainer: Trainer, batch: Batch) -> None:
    """Refuse a batch without labels, whose loss is not a mean over tokens. Raises `BatchError` on every rank."""
    if "shift_labels" not in batch:
        raise BatchError(
            f"the batches of {type(trainer).__name__} have no labels (they hold {', '.join(sorted(batch))}): its loss "
            f"is not a mean over tokens, and needs whole sequences. {_WITHOUT}"
        )
