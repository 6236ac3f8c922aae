"""Replace methods of the Hugging Face Trainer: those that count batches and samples, compute the loss, and save."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import transformers.trainer
from transformers import Trainer

from ds_hetero.engine.forward_mode import sharding, wanted_results
from ds_hetero.engine.patching import Function, around
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.transformers.elastic import load_from_memory, save_after, train_from_memory
from ds_hetero.frameworks.transformers.evaluation import (
    accepts_loss_kwargs,
    evaluates_shards,
    is_sharded,
    offer_loss_kwargs,
    run_evaluation_loop,
)
from ds_hetero.frameworks.transformers.resumed_epochs import run_epoch
from ds_hetero.frameworks.transformers.trainer_loaders import (
    get_dataloader,
    get_train_sampler,
    making_loaders,
    replica_batches,
    set_initial_training_values,
)
from ds_hetero.frameworks.transformers.trainer_loss import (
    compute_loss,
    get_batch_samples,
    prepare_inputs,
    set_whether_scaled,
    track_num_input_tokens,
)
from ds_hetero.frameworks.transformers.trainer_modes import calls_sharded, is_alone, takes_whole_batches
from ds_hetero.frameworks.transformers.trainer_saving import fail_together, mark_unfinished, save_rng_state, save_stages
from ds_hetero.frameworks.transformers.unlike_batches import expect_independent_samples, takes_unlike_batches
from ds_hetero.frameworks.transformers.unlike_steps import unlike_steps
from ds_hetero.job.start import ReplicaBatches


def install(registry: Registry) -> None:
    """Replace methods of the Trainer: loaders and counts of batches, loss, evaluation, checkpoints, elastic restart.

    ``around(function, registry)`` calls ``function(registry, stock, trainer, ...)``. If a method is replaced twice, the
    later replacement calls the earlier one.
    """
    replace = registry.patches.replace
    replace(Trainer, "__init__", around(_prepare_trainer, registry))
    replace(Trainer, "_inner_training_loop", around(_run_training_loop, registry))
    replace(Trainer, "_get_dataloader", around(get_dataloader, registry))
    replace(Trainer, "_run_epoch", around(run_epoch, registry))
    replace(Trainer, "set_initial_training_values", around(set_initial_training_values, registry))
    replace(Trainer, "get_batch_samples", around(get_batch_samples, registry))
    replace(Trainer, "_prepare_inputs", around(prepare_inputs))
    replace(Trainer, "_get_train_sampler", around(get_train_sampler, registry))
    replace(Trainer, "compute_loss", around(compute_loss, registry))
    replace(Trainer, "_track_num_input_tokens", around(track_num_input_tokens))
    # The module imports it from accelerate by name, so accelerate's own replacement does not reach it.
    replace(transformers.trainer, "skip_first_batches", registry.adapters.processes.skip_first_batches)
    replace(Trainer, "training_step", around(_training_step, registry))
    for name in ("evaluate", "predict"):
        replace(Trainer, name, around(_evaluate, registry))
    replace(Trainer, "evaluation_loop", around(run_evaluation_loop, registry))
    replace(Trainer, "_save_rng_state", around(save_rng_state, registry))
    replace(Trainer, "save_model", around(save_stages, registry))
    # These call the replacements above, so that an error of one rank is raised on all ranks.
    for name in ("save_model", "_save_optimizer_and_scheduler", "_save_rng_state"):
        replace(Trainer, name, around(fail_together, registry))
    replace(Trainer, "_save_checkpoint", around(mark_unfinished, registry))
    replace(Trainer, "train", around(train_from_memory, registry))
    replace(Trainer, "_maybe_log_save_evaluate", around(save_after))
    replace(transformers.trainer, "deepspeed_load_checkpoint", around(load_from_memory))


def _evaluate(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> object:
    """Replace ``Trainer.evaluate`` and ``Trainer.predict``: run by sharded calls if the loss needs whole batches."""
    is_whole = is_sharded(registry, trainer) and takes_whole_batches(registry, trainer)
    if is_sharded(registry, trainer):
        accepts_loss_kwargs(trainer)
    if not is_whole or evaluates_shards(registry, trainer):
        return stock(trainer, *args, **kwargs)
    with calls_sharded(registry, trainer):
        return stock(trainer, *args, **kwargs)


def _training_step(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> object:
    """Replace ``Trainer.training_step``.

    If ranks take different batches, and the Trainer's class has its own ``compute_loss``, scale its loss. Inside
    sharded calls, count each replica as one process. Otherwise call the stock method.
    """
    steps = unlike_steps(registry, trainer)
    if steps is not None and steps.has_own_compute_loss:
        # The loop counts the micro-batches anew after it has drawn them, so this is said at each of them.
        set_whether_scaled(trainer, scaled=True)
        with steps.scaling_own_loss():
            return stock(trainer, *args, **kwargs)
    if wanted_results() is None:
        return stock(trainer, *args, **kwargs)
    with registry.adapters.processes.one_process_per_replica():
        return stock(trainer, *args, **kwargs)


def expect_splittable(trainer: Trainer) -> None:
    """Refuse, before the loop, a Trainer that would not train on shards as on one process.

    A second call of ``train()`` is refused, too. At the end of the first call, the Trainer drops its reference to the
    engine, whose ``backward`` the loop would have to call.

    Raises:
        ConfigError: this is a second call, or the sampling strategy divides samples among ranks.
    """
    # With auto_find_batch_size, the Trainer itself calls the loop again, after it has made a new engine.
    has_engine = trainer.model_wrapped is not trainer.model
    if has_engine and not trainer.args.auto_find_batch_size:
        raise ConfigError(
            f"{type(trainer).__name__}.train() was called after the model got its DeepSpeed engine, by an earlier call "
            "of train() or evaluate(). The Trainer has dropped that engine. Make a new Trainer, and call its train() "
            "with resume_from_checkpoint to go on from where the first one ended."
        )
    if trainer.args.train_sampling_strategy == "batch_rebalance":
        raise ConfigError(
            'train_sampling_strategy="batch_rebalance" divides samples among ranks, which share each sequence here. '
            'Use "group_by_length", or "placement": "documents" in the "heterogeneity" section, which balances the '
            "computation of the ranks."
        )


def _prepare_trainer(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> None:
    """Extend ``Trainer.__init__``: prepare a Trainer of another library, such as TRL's, for sequence parallelism."""
    stock(trainer, *args, **kwargs)
    if is_sharded(registry, trainer):
        offer_loss_kwargs(trainer)
        adapters = registry.adapters
        adapters.trainers.note_constructed(trainer, registry.patches, registry.find_split, adapters.processes)


def _run_training_loop(registry: Registry, stock: Function, *args: object, **kwargs: object) -> object:
    """Replace ``Trainer._inner_training_loop``: check the Trainer, then train with loaders for replicas."""
    bound = inspect.signature(stock).bind(*args, **kwargs).arguments
    trainer, arguments = bound["self"], bound["args"]
    is_whole = is_sharded(registry, trainer) and takes_whole_batches(registry, trainer)
    if is_sharded(registry, trainer):
        accepts_loss_kwargs(trainer)
        registry.adapters.trainers.expect_known(trainer)
        expect_splittable(trainer)
    elif takes_unlike_batches(registry, trainer):
        expect_independent_samples(trainer, of_sequences=registry.adapters.trainers.needs_whole_sequences(trainer))
    else:
        _log_stock_training(registry, trainer)
    batches = replica_batches(registry, trainer)
    with making_loaders(registry, trainer, batches):
        return _train(registry, functools.partial(stock, *args, **kwargs), trainer, arguments, is_whole, batches)


def _log_stock_training(registry: Registry, trainer: Trainer) -> None:
    """Log that several ranks train with stock DeepSpeed, and why."""
    if not registry.adapters.processes.asks_for_engine(trainer.accelerator):
        has_config = trainer.args.deepspeed is not None
        where = "deepspeed= of TrainingArguments has none" if has_config else "TrainingArguments have no deepspeed="
        registry.say_stock(where, is_alone=trainer.accelerator.num_processes == 1)


def _train(
    registry: Registry,
    train: Callable[[], object],
    trainer: Trainer,
    arguments: Any,
    is_whole: bool,
    batches: ReplicaBatches | None,
) -> object:
    """Run the training loop.

    If replicas take different batches, every replica runs as many micro-batches in a step as the busiest one. The
    loop takes this number from ``gradient_accumulation_steps``, which has the user's value again afterwards.

    Args:
        is_whole: True if the loss is computed from whole sequences, by sharded calls.
        batches: how the replicas share samples if they take different batches; else None.

    Raises:
        ConfigError: the Trainer weighs replicas equally, but these take different batches.
    """
    if is_whole and batches is not None:
        raise ConfigError(
            f"{type(trainer).__name__} computes its loss from whole sequences and weighs replicas equally, but these "
            "take different batches. Give all replicas of the schedule the same micro_batch_size and "
            "micro_batches."
        )
    if batches is None:
        alone = sharding(False) if is_alone(registry, trainer) else contextlib.nullcontext()
        with calls_sharded(registry, trainer) if is_whole else alone:
            return train()
    # A Trainer that gives the model no number of labels does not read the argument; Axolotl's is one of them.
    takes_items = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    reads_argument = takes_items or is_sharded(registry, trainer)
    if reads_argument and not arguments.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices=False weighs replicas equally, but these take different batches "
            f"({batches.split}). Leave average_tokens_across_devices out."
        )
    user_steps = arguments.gradient_accumulation_steps
    arguments.gradient_accumulation_steps = batches.split.micro_steps
    try:
        return train()
    finally:
        arguments.gradient_accumulation_steps = user_steps
