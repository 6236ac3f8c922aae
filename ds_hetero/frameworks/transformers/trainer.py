"""The Hugging Face Trainer: each sample once, and the loss of the accumulated batch as in one process.

Its checkpoints have the weights of stages, and the steps of saving end on all ranks or on none.

A trainer whose loss is of whole sequences sees what it sees as one process per replica: whole batches, the model's own
outputs put together by sharded calls, and numbers gathered once per replica. So its loss, its metrics and its
evaluation are those of one process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.trainer
from packaging.version import Version
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from ds_hetero.engine.adapters import SplitModel
from ds_hetero.engine.forward_mode import Wanted, sharded_calls, sharding, wanted_results
from ds_hetero.engine.loader_by_mode import stands_for_none
from ds_hetero.engine.patching import Function, around
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    HeteroError,
    PeerError,
    SamplingError,
    VersionError,
)
from ds_hetero.frameworks.transformers.elastic import load_from_memory, save_after, train_from_memory
from ds_hetero.frameworks.transformers.evaluation import (
    accepts_loss_kwargs,
    evaluates_shards,
    is_sharded,
    loss_from_logits,
    run_evaluation_loop,
)
from ds_hetero.frameworks.transformers.resumed_epochs import epochs_of, forget_epochs, run_epoch, save_epoch
from ds_hetero.frameworks.transformers.train_loader import CountedLoader, count_batches, making_train_loader
from ds_hetero.frameworks.transformers.unlike_batches import (
    Filler,
    complete_configuration,
    expect_plain_samples,
    takes_unlike_batches,
    unlike_steps,
)
from ds_hetero.job.checkpoints import why_not_written
from ds_hetero.job.start import ReplicaBatches
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.sampling import ReplicaSampler, ReplicaStream, micro_steps_in_epoch, reader_of
from ds_hetero.runtime.data.shard_info import attach, shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch
from ds_hetero.runtime.loss import cross_entropy_sum, sequence_parallel_loss
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import IDLE

# Before this release the Trainer rounds the number of labels that it divides such losses by.
_OLDEST = Version("5.20")


def _is_alone(registry: Registry, trainer: Trainer) -> bool:
    """Whether a Trainer that trains with this engine is in a job of one rank, which takes whole batches."""
    return registry.adapters.processes.asks_for_engine(trainer.accelerator) and dist.get_world_size() == 1


def _shared_by_ranks(registry: Registry, trainer: Trainer) -> Any:
    """The model as it is split; None in a job of one rank."""
    return None if _is_alone(registry, trainer) else registry.find_split(trainer.model)


def takes_whole_batches(registry: Registry, trainer: Trainer) -> bool:
    """Whether a Trainer that trains with this engine computes its loss from whole sequences, or from all logits."""
    return loss_from_logits(trainer) or registry.adapters.trainers.needs_whole_sequences(trainer)


@contextlib.contextmanager
def calls_sharded(registry: Registry, trainer: Trainer) -> Iterator[None]:
    """Let the models of a trainer be called by sharded calls, and its numbers be gathered once per replica.

    Raises:
        VersionError: transformers' Trainer would divide such losses by a rounded number.
    """
    if Version(version("transformers")) < _OLDEST:
        raise VersionError(
            f"{type(trainer).__name__} computes its loss from whole sequences or from all logits, which trains as on "
            f"one process from transformers {_OLDEST} on; {version('transformers')} is installed. Upgrade it, or leave "
            "out label smoothing and compute_loss_func."
        )
    if wanted_results() is not None:  # an evaluation inside of the training
        yield
        return
    before = trainer.model_accepts_loss_kwargs  # False where the Trainer counts labels for sequence parallelism
    trainer.model_accepts_loss_kwargs = accepts_loss_kwargs(trainer)
    try:
        adapters = registry.adapters
        own_outputs = Wanted(own_outputs=True, logits=True, shorter_outputs=adapters.trainers.shorter_outputs)
        with sharded_calls(own_outputs), adapters.processes.gathering_over_replicas(trainer.accelerator):
            yield
    finally:
        trainer.model_accepts_loss_kwargs = before


def _evaluate(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> object:
    """Replace ``Trainer.evaluate`` and ``Trainer.predict``."""
    is_whole = is_sharded(registry, trainer) and takes_whole_batches(registry, trainer)
    if not is_whole or evaluates_shards(registry, trainer):
        return stock(trainer, *args, **kwargs)
    with calls_sharded(registry, trainer):
        return stock(trainer, *args, **kwargs)


def _training_step(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> object:
    """Replace ``Trainer.training_step``: it computes its loss as one process per replica does, or of unlike batches."""
    unlike = unlike_steps(registry, trainer)
    if unlike is not None and unlike.computes_loss_itself:
        with unlike.scaling_own_loss():
            return stock(trainer, *args, **kwargs)
    if wanted_results() is None:
        return stock(trainer, *args, **kwargs)
    with registry.adapters.processes.one_process_per_replica():
        return stock(trainer, *args, **kwargs)


_WITHOUT = "Train it without sequence parallelism, on one rank per sequence, or in a loop by handle.sharded_call."


def expect_splittable(trainer: Trainer) -> None:
    """Refuse, before the loop, what does not train on shards as on one process. Raises `ConfigError`: what to do.

    That is arguments of a Trainer that need whole sequences on one rank, and a second call of ``train()``: the Trainer
    lets go of its engine at the end of the first one, and has nothing to call ``backward`` of in the second.
    """
    if trainer.model_wrapped is not trainer.model and not trainer.args.auto_find_batch_size:  # which tries once more
        raise ConfigError(
            f"{type(trainer).__name__}.train() was called after the model got its DeepSpeed engine, by an earlier call "
            "of train() or evaluate(). The Trainer has let go of that engine. Make a new Trainer, and give it "
            "resume_from_checkpoint to go on from where the first one ended."
        )
    if trainer.args.train_sampling_strategy == "batch_rebalance":
        raise ConfigError(
            'train_sampling_strategy="batch_rebalance" deals samples out to ranks, which share each sequence here. Use '
            '"group_by_length", or "placement": "documents" in the "heterogeneity" section, which balances ranks by '
            "what "
            "they compute."
        )


@contextlib.contextmanager
def naming_trainer(trainer: Trainer) -> Iterator[None]:
    """Say in a `BatchError` inside whose batches they are."""
    try:
        yield
    except SamplingError:  # nothing of what is in a batch
        raise
    except BatchError as error:
        raise BatchError(
            f"the batches of {type(trainer).__name__} cannot be split over the sequence: {error} {_WITHOUT}"
        ) from error


def expect_labels(trainer: Trainer, batch: Batch) -> None:
    """Refuse a batch without labels, whose loss is no mean over tokens. Raises `BatchError` on every rank."""
    if "shift_labels" not in batch:
        raise BatchError(
            f"the batches of {type(trainer).__name__} have no labels (they hold {', '.join(sorted(batch))}): its loss "
            f"is not a mean over tokens, and needs whole sequences. {_WITHOUT}"
        )


def install(registry: Registry) -> None:
    """Replace the methods that count batches, samples and tokens, the loss, and where an elastic job goes on."""
    replace = registry.patches.replace
    replace(Trainer, "__init__", around(_note_constructed, registry))
    replace(Trainer, "_inner_training_loop", around(_accumulate_micro_steps, registry))
    replace(Trainer, "_get_dataloader", around(_get_dataloader, registry))
    replace(Trainer, "_run_epoch", around(run_epoch, registry))
    replace(Trainer, "set_initial_training_values", around(_set_initial_training_values, registry))
    replace(Trainer, "get_batch_samples", around(_get_batch_samples, registry))
    replace(Trainer, "_prepare_inputs", around(_prepare_inputs))
    replace(Trainer, "_get_train_sampler", around(_get_train_sampler, registry))
    replace(Trainer, "compute_loss", around(_compute_loss, registry))
    replace(Trainer, "_track_num_input_tokens", around(_track_num_input_tokens))
    replace(transformers.trainer, "skip_first_batches", registry.adapters.processes.skip_first_batches)
    replace(Trainer, "training_step", around(_training_step, registry))
    for name in ("evaluate", "predict"):
        replace(Trainer, name, around(_evaluate, registry))
    replace(Trainer, "evaluation_loop", around(run_evaluation_loop, registry))
    replace(Trainer, "_save_rng_state", around(_save_rng_state, registry))
    replace(Trainer, "save_model", around(_save_stages, registry))
    for name in ("save_model", "_save_optimizer_and_scheduler", "_save_rng_state"):
        replace(Trainer, name, around(_fail_together, registry))
    replace(Trainer, "_save_checkpoint", around(_mark_unfinished, registry))
    replace(Trainer, "train", around(train_from_memory, registry))
    replace(Trainer, "_maybe_log_save_evaluate", around(save_after))
    replace(transformers.trainer, "deepspeed_load_checkpoint", around(load_from_memory))


def _note_constructed(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> None:
    """Right after it, a Trainer of another library may be made ready for sequence parallelism."""
    stock(trainer, *args, **kwargs)
    if is_sharded(registry, trainer):
        adapters = registry.adapters
        adapters.trainers.note_constructed(trainer, registry.patches, registry.find_split, adapters.processes)


def _accumulate_micro_steps(registry: Registry, stock: Function, *args: object, **kwargs: object) -> object:
    """Where replicas take different batches, an optimizer step is as many micro-batches as the busiest of them has.

    For the time of the loop; before and after, the arguments are what the user gave.
    """
    given = inspect.signature(stock).bind(*args, **kwargs).arguments
    trainer, arguments = given["self"], given["args"]
    is_whole = is_sharded(registry, trainer) and takes_whole_batches(registry, trainer)
    if is_sharded(registry, trainer):
        registry.adapters.trainers.expect_known(trainer)
        expect_splittable(trainer)
    elif takes_unlike_batches(registry, trainer):
        expect_plain_samples(trainer, of_sequences=registry.adapters.trainers.needs_whole_sequences(trainer))
    else:
        _say_whether_shared(registry, trainer)
    batches = _replica_batches(registry, trainer)
    with _making_loaders(registry, trainer, batches):
        return _train(registry, functools.partial(stock, *args, **kwargs), trainer, arguments, is_whole, batches)


def _say_whether_shared(registry: Registry, trainer: Trainer) -> None:
    """Say where this engine has no part in the training of several ranks."""
    if not registry.adapters.processes.asks_for_engine(trainer.accelerator):
        given = trainer.args.deepspeed
        where = "TrainingArguments have no deepspeed=" if given is None else "deepspeed= of TrainingArguments has none"
        registry.say_stock(where, is_alone=trainer.accelerator.num_processes == 1)


@contextlib.contextmanager
def _making_loaders(registry: Registry, trainer: Trainer, batches: ReplicaBatches | None) -> Iterator[None]:
    """Let the training loader be made for the replicas, also by a ``get_train_dataloader`` of the script's own."""
    is_unlike = takes_unlike_batches(registry, trainer)
    if not (is_unlike or is_sharded(registry, trainer)):
        yield
        return
    sp_size, over_replicas = trainer.get_sp_size(), registry.adapters.processes.loaders_over_replicas
    preparing = functools.partial(over_replicas, sp_size, batches)
    with making_train_loader(trainer, preparing, batches, is_of_rank=sp_size == 1):
        yield


def _train(
    registry: Registry,
    train: Callable[[], object],
    trainer: Trainer,
    arguments: Any,
    is_whole: bool,
    batches: ReplicaBatches | None,
) -> object:
    """Train with as many micro-batches per step as the busiest replica has."""
    if is_whole and batches is not None:
        raise ConfigError(
            f"{type(trainer).__name__} computes its loss from whole sequences, by which replicas weigh alike, but "
            "these take different batches. Give all replicas of the schedule the same micro_batch_size and "
            "micro_batches."
        )
    if batches is None:
        alone = sharding(False) if _is_alone(registry, trainer) else contextlib.nullcontext()
        with calls_sharded(registry, trainer) if is_whole else alone:
            return train()
    if not arguments.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices=False weighs replicas alike, but these take different batches "
            f"({batches.split}); leave it out."
        )
    steps = arguments.gradient_accumulation_steps
    arguments.gradient_accumulation_steps = batches.split.micro_steps
    try:
        return train()
    finally:
        arguments.gradient_accumulation_steps = steps


def _get_dataloader(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> object:
    is_pipelined = registry.is_pipelined(trainer.model)
    if is_pipelined:
        if trainer.compute_metrics is not None:
            raise ConfigError(
                "compute_metrics needs logits, which stay on the last stages of pipelines. Leave it out and use "
                "eval_loss."
            )
        trainer.gather_function = lambda values, *args, **kwargs: values  # all ranks evaluate the same batch
    is_unlike = takes_unlike_batches(registry, trainer)
    is_whole = not is_unlike and takes_whole_batches(registry, trainer)
    loaders_over_replicas = registry.adapters.processes.loaders_over_replicas
    if not kwargs.get("is_training") and evaluates_shards(registry, trainer):
        with loaders_over_replicas(trainer.get_sp_size(), None, evaluates=True):
            return stock(trainer, *args, **kwargs)
    over_replicas = kwargs.get("is_training") or is_pipelined or is_whole
    if not over_replicas or not (is_unlike or is_sharded(registry, trainer)):
        return stock(trainer, *args, **kwargs)
    with loaders_over_replicas(trainer.get_sp_size(), _replica_batches(registry, trainer)):
        loader = stock(trainer, *args, **kwargs)
    _seed_workers_by_replica(trainer, loader)
    return loader


def _seed_workers_by_replica(trainer: Trainer, loader: Any) -> None:
    """Let workers of all ranks of a replica draw alike: of the masks of a collator, say.

    The Trainer seeds workers by rank (`Trainer._get_dataloader`, ``seed_worker``).
    """
    loader = getattr(loader, "base_dataloader", loader)
    seed = loader.worker_init_fn
    if isinstance(seed, functools.partial) and "rank" in seed.keywords:
        replica = seed.keywords["rank"] // trainer.get_sp_size()
        loader.worker_init_fn = functools.partial(seed.func, *seed.args, **{**seed.keywords, "rank": replica})


def _get_train_sampler(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> Any:
    """``group_by_length`` sorts as many batches as one process has in a step, of all replicas."""
    sampler = stock(trainer, *args, **kwargs)
    if isinstance(sampler, LengthGroupedSampler):
        batches = _replica_batches(registry, trainer)
        if batches is not None:
            sampler.batch_size = batches.split.samples
        elif is_sharded(registry, trainer) and not registry.is_pipelined(trainer.model):
            sampler.batch_size *= dist.get_world_size() // trainer.get_sp_size()
    return sampler


def _prepare_inputs(stock: Function, trainer: Trainer, inputs: Any) -> Any:
    """Where the Trainer copies a shard, to another device or type, the copy of its positions is marked as they are."""
    prepared = stock(trainer, inputs)
    info = shard_info(inputs.get("position_ids")) if isinstance(inputs, Mapping) else None
    if info is not None and isinstance(prepared, Mapping):
        attach(prepared["position_ids"], info)
    return prepared


def _set_initial_training_values(
    registry: Registry, stock: Function, trainer: Trainer, args: Any, dataloader: Any
) -> object:
    """Stock expects its loader adapter to yield every batch once per rank; ours yields it once."""
    in_turn_of, counted = 1, dataloader
    if is_sharded(registry, trainer) and not registry.is_pipelined(trainer.model) and reader_of(dataloader) is None:
        length = count_batches(trainer, dataloader)
        in_turn_of, counted = length.in_turn_of, CountedLoader(dataloader.dataset, length.batches)
    if registry.adapters.processes.asks_for_engine(trainer.accelerator):
        forget_epochs(trainer)
        epochs_of(trainer).watch(dataloader, in_turn_of=in_turn_of)
    if not (is_sharded(registry, trainer) or takes_unlike_batches(registry, trainer)):
        return stock(trainer, args, dataloader)
    samples, reader = trainer.get_total_train_batch_size(args), reader_of(dataloader)
    if reader is not None:
        samples, counted = reader.split.samples, CountedLoader(dataloader.dataset, _micro_steps_in_epoch(reader))
    trainer.get_sp_size = lambda: 1
    trainer.get_total_train_batch_size = lambda args: samples
    try:
        return stock(trainer, args, counted)
    finally:
        del trainer.get_sp_size, trainer.get_total_train_batch_size


def _micro_steps_in_epoch(reader: ReplicaSampler | ReplicaStream) -> int | None:
    """Of the loader that the model will be given; None where the samples are not counted."""
    try:
        return micro_steps_in_epoch(reader)
    except TypeError:
        return None


def _get_batch_samples(
    registry: Registry, stock: Function, trainer: Trainer, epoch_iterator: Any, num_batches: int, device: torch.device
) -> object:
    """Valid labels of the whole accumulated batch, over all ranks; times the replicas where each is to weigh alike.

    Batches are drawn before the Trainer sets the model to training, and must be shards nevertheless.
    """
    batches, items = _draw_batches(registry, stock, trainer, epoch_iterator, num_batches, device)
    epochs_of(trainer).use(len(batches))
    return batches, items


def _draw_batches(
    registry: Registry, stock: Function, trainer: Trainer, epoch_iterator: Any, num_batches: int, device: torch.device
) -> Any:
    if (unlike := unlike_steps(registry, trainer)) is not None:
        _say_whether_scaled(trainer, scaled=True)
        return unlike.take(epoch_iterator, num_batches, device)
    split = _shared_by_ranks(registry, trainer)
    if registry.is_pipelined(trainer.model):  # its forward counts the labels of the global batch
        return stock(trainer, epoch_iterator, num_batches, device)[0], None
    if split is None:
        return stock(trainer, epoch_iterator, num_batches, device)
    if wanted_results() is not None:
        batches, items = stock(trainer, epoch_iterator, num_batches, device)
        return batches, None if items is None else items * trainer.get_sp_size()  # gathered once per replica
    with sharding(True), naming_trainer(trainer):
        batches, _ = stock(trainer, epoch_iterator, num_batches, device)
    if not batches:
        return batches, None
    for batch in batches:
        expect_labels(trainer, batch)
    if not accepts_loss_kwargs(trainer):  # one process weighs micro-batches alike: see `_labels_of_micro_batch`
        return batches, None
    items = torch.as_tensor(sum(batch["shift_labels"].ne(IGNORE_INDEX).sum() for batch in batches), device=device)
    if trainer.args.average_tokens_across_devices:
        dist.all_reduce(items)
        return batches, items
    dist.all_reduce(items, group=split.replica.sp_group)
    return batches, items * split.replica.num_replicas


def _compute_loss(
    registry: Registry,
    stock: Function,
    trainer: Trainer,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> object:
    """From the mean over this rank's labels, which models and fused losses agree on."""
    if registry.is_pipelined(trainer.model):
        outputs = trainer.deepspeed(**inputs)  # in evaluation the Trainer gives the model without the engine
        _say_whether_scaled(trainer, scaled=True)
        return (outputs.loss, outputs) if return_outputs else outputs.loss
    unlike = unlike_steps(registry, trainer) if trainer.model.training else None
    if unlike is not None and not unlike.is_scaling:

        def loss_and_outputs(called: object, batch: Batch, num_items: torch.Tensor | None) -> Any:
            return stock(trainer, called, {**batch}, True, num_items)  # which may take entries out of it

        loss, outputs = unlike.loss(loss_and_outputs, model, inputs, num_items_in_batch, multiplies=True)
        _say_whether_scaled(trainer, scaled=True)
        return (loss, outputs) if return_outputs else loss
    if unlike is not None:  # called by a ``compute_loss`` of the Trainer's class
        returned: Any = stock(trainer, model, inputs, return_outputs, num_items_in_batch)
        if num_items_in_batch is not None:
            unlike.note_multiplied(returned[0] if return_outputs else returned)
        return returned
    split = _shared_by_ranks(registry, trainer)
    if split is not None and wanted_results() is not None and _smooths_alike(trainer, inputs, num_items_in_batch):
        return _smoothed(functools.partial(stock, trainer, model), trainer, split.replica, inputs, return_outputs)
    if split is None or not split.takes_shards or wanted_results() is not None:
        return stock(trainer, model, inputs, return_outputs, num_items_in_batch)
    if split.own_loss:
        given = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs, **given)
        # Divided by the labels of the step, losses of replicas add up; the engine averages.
        loss = outputs.loss * (1 if num_items_in_batch is None else split.replica.num_replicas)
        _say_whether_scaled(trainer, scaled=num_items_in_batch is not None)
        return (loss, outputs) if return_outputs else loss
    labels = inputs["shift_labels"]
    is_scaled = num_items_in_batch is not None
    if not is_scaled:
        num_items_in_batch = _labels_of_micro_batch(trainer, split.replica, labels.ne(IGNORE_INDEX).sum())
    for_model = {} if split.shifts_labels_itself else {"labels": labels}
    outputs = model(**{**for_model, **inputs})
    loss = _loss_of_shard(registry, trainer, split, outputs, labels, num_items_in_batch, of_step=is_scaled)
    _say_whether_scaled(trainer, scaled=is_scaled)
    return (loss, outputs) if return_outputs else loss


def _smooths_alike(trainer: Trainer, inputs: Any, num_items: Any) -> bool:
    """Whether a loss of label smoothing is a mean over the labels of a replica's micro-batch, in training."""
    smooths = trainer.label_smoother is not None and trainer.compute_loss_func is None
    return smooths and num_items is None and "labels" in inputs and bool(trainer.model.training)


def _smoothed(compute: Any, trainer: Trainer, replica: Replica, inputs: Any, return_outputs: bool) -> Any:
    """The loss of label smoothing, whose replicas are weighed by their labels."""
    labels = inputs["labels"]
    own = labels[..., 1:] if getattr(trainer, "_loss_shifts_labels", True) else labels
    num_labels = own.ne(IGNORE_INDEX).sum() if labels.dim() > 1 else torch.tensor(labels.numel(), device=labels.device)
    of_all = _labels_of_micro_batch(trainer, replica, num_labels)
    loss, outputs = compute({**inputs}, True)
    if of_all is not None:
        loss = loss * (num_labels * dist.get_world_size() / of_all.clamp(min=1))
    return (loss, outputs) if return_outputs else loss


def _labels_of_micro_batch(trainer: Trainer, replica: Replica, num_labels: torch.Tensor) -> torch.Tensor | None:
    """Labels of a micro-batch over all replicas, which share it; None where each is to weigh alike, or there is one.

    A model that does not take ``num_items_in_batch`` (``accepts_loss_kwargs = False``, or a forward without
    ``**kwargs``) returns the mean of its micro-batch, and the Trainer takes the mean of these.

    Caller: every rank of the world. Collectives: one all_reduce of a number, where there are several replicas.
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
    """The loss of the sequences that this rank has a shard of; ``num_items`` of the step, or of the micro-batch."""
    num_tokens = labels.ne(IGNORE_INDEX).sum()
    of_routers = num_tokens * split.router_term(outputs)  # no part of a mean over the tokens of a step
    if split.shifts_labels_itself:
        loss_sum = cross_entropy_sum(outputs["logits"], labels)
    else:
        loss_sum = num_tokens * (outputs["loss"] if isinstance(outputs, dict) else outputs[0]) - of_routers
    with split.clock.phase(IDLE, "loss"):
        loss = sequence_parallel_loss(loss_sum, num_tokens, split.replica, num_items)
        if getattr(outputs, "aux_loss", None) is not None:
            is_mean = of_step and registry.adapters.trainers.averages_router_losses(trainer)
            of_routers = of_routers / (trainer.current_gradient_accumulation_steps if is_mean else 1)
            loss = loss + sequence_parallel_loss(of_routers, num_tokens, split.replica)
    return loss


def _say_whether_scaled(trainer: Trainer, *, scaled: bool) -> None:
    """Say whether the loss is divided by the micro-batches of a step already, or is still to be.

    Trainers of older releases cannot be told: they divide all losses but those of models that take the number of items.
    """
    if hasattr(Trainer, "loss_is_scaled_for_ga"):
        trainer.loss_is_scaled_for_ga = scaled
    elif scaled:
        trainer.current_gradient_accumulation_steps = 1


def _track_num_input_tokens(stock: Function, trainer: Trainer, inputs: Any) -> None:
    """Placeholders are no tokens."""
    if stands_for_none(inputs) or isinstance(inputs, Filler):
        inputs = {name: entry[:, :0] if isinstance(entry, torch.Tensor) else entry for name, entry in inputs.items()}
    stock(trainer, inputs)


def _replica_batches(registry: Registry, trainer: Trainer) -> ReplicaBatches | None:
    """This rank's batches, if the replicas of this training take different ones; call it on every rank."""
    is_unlike = takes_unlike_batches(registry, trainer)
    if not (is_unlike or is_sharded(registry, trainer)) or registry.is_pipelined(trainer.model):
        return None
    if is_unlike:
        complete_configuration(trainer)
    if (prepared := registry.find(trainer.model)) is not None:
        replica = prepared.model.replica
        return None if replica.batch_split is None else ReplicaBatches(replica.batch_split, replica.replica_id)
    return registry.request_of(trainer.accelerator.state.deepspeed_plugin.deepspeed_config).batches_of(dist.get_rank())


def _save_stages(
    registry: Registry, stock: Function, trainer: Trainer, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """The weights of a model that is cut into stages are written by the stages, in the folder's usual format."""
    pipelined = registry.find_pipelined(trainer.model)
    if pipelined is None:
        stock(trainer, output_dir, _internal_call)
        return
    folder = output_dir if output_dir is not None else trainer.args.output_dir
    pipelined.save_pretrained(folder)
    if trainer.args.should_save:
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)
        torch.save(trainer.args, Path(folder, "training_args.bin"))


def _save_rng_state(registry: Registry, stock: Function, trainer: Trainer, output_dir: str) -> None:
    """With the random states, those with which the epoch began: it is to be begun again."""
    stock(trainer, output_dir)
    if registry.adapters.processes.asks_for_engine(trainer.accelerator):
        save_epoch(trainer, Path(output_dir))


def _fail_together(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> None:
    """A step of saving a checkpoint that ends on all ranks if it fails on one; they wait for each other in the next."""
    by_user = stock.__name__ == "save_model" and not kwargs.get("_internal_call")  # maybe on one rank
    if by_user or not registry.adapters.processes.asks_for_engine(trainer.accelerator):
        stock(trainer, *args, **kwargs)
        return

    def save_own_part() -> None:
        try:
            stock(trainer, *args, **kwargs)
        except (HeteroError, PeerError):
            raise
        except Exception as error:  # torch and safetensors raise almost anything here
            reason = why_not_written(Path(trainer.args.output_dir), error)
            raise CheckpointError(f"{stock.__name__} of the Trainer cannot write the checkpoint: {reason}.") from error

    on_all_ranks(save_own_part)


def _mark_unfinished(registry: Registry, stock: Function, trainer: Trainer, model: object, trial: object) -> None:
    """A checkpoint that cannot be saved gets a name that the Trainer does not resume from."""
    try:
        _fail_together(registry, stock, trainer, model, trial)
    except CheckpointError as error:
        folder = Path(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        if trainer.args.should_save and folder.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            with contextlib.suppress(OSError):  # what refuses a file may refuse this as well
                folder.rename(unfinished)
        raise CheckpointError(
            f"{error} What the Trainer has written is in {folder} or {unfinished.name}; delete it, and resume from "
            "the checkpoint before."
        ) from error
