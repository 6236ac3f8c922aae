"""Trainers whose loss is of whole sequences: their batches stay whole, and their models are called by sharded calls.

Such a trainer sees what it sees as one process per replica: whole batches, the model's own outputs put together, and
numbers gathered once per replica. So its loss, its metrics and its evaluation are those of one process.

Requirements of a Trainer on shards, and of its batches, checked before its loop begins.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from importlib.metadata import version

from packaging.version import Version
from transformers import Trainer

from ds_hetero.engine.forward_mode import Wanted, sharded_calls, wanted_results
from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import BatchError, ConfigError, VersionError
from ds_hetero.frameworks.transformers.model.model_checks import pretrained_of
from ds_hetero.frameworks.transformers.unlike_batches import unlike_steps
from ds_hetero.runtime.data.shards import Batch

# Before this release the Trainer rounds the number of labels that it divides such losses by.
_OLDEST = Version("5.20")


def is_sharded(registry: Registry, trainer: Trainer) -> bool:
    """Whether a Trainer trains with sequence parallelism by this engine."""
    return registry.adapters.processes.asks_for_engine(trainer.accelerator) and trainer.get_sp_size() > 1


def takes_whole_batches(registry: Registry, trainer: Trainer) -> bool:
    """Whether a Trainer that trains with this engine computes its loss from whole sequences, or from all logits."""
    from_logits = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    return from_logits or registry.adapters.trainers.needs_whole_sequences(trainer)


def expect_equal_replicas(trainer: Trainer) -> None:
    """Refuse a loss of whole sequences where replicas take different batches.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{type(trainer).__name__} computes its loss from whole sequences, by which replicas weigh alike, but "
        "these take different batches. Give all replicas of the schedule the same micro_batch_size and micro_batches."
    )


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
    trainer.model_accepts_loss_kwargs = _accepts_loss_kwargs(trainer)
    try:
        adapters = registry.adapters
        own_outputs = Wanted(own_outputs=True, logits=True, shorter_outputs=adapters.trainers.shorter_outputs)
        with sharded_calls(own_outputs), adapters.processes.gathering_over_replicas(trainer.accelerator):
            yield
    finally:
        trainer.model_accepts_loss_kwargs = before


def _accepts_loss_kwargs(trainer: Trainer) -> bool:
    """Whether the Trainer counts the labels of a step on one process, by its own rule."""
    model = pretrained_of(trainer.model)
    accepts: bool | None = getattr(model, "accepts_loss_kwargs", None)
    if accepts is not None:
        return accepts
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def evaluating(registry: Registry, stock: Function) -> Function:
    """Replace ``Trainer.evaluate`` and ``Trainer.predict``."""

    @functools.wraps(stock)
    def evaluate(trainer: Trainer, *args: object, **kwargs: object) -> object:
        if not (is_sharded(registry, trainer) and takes_whole_batches(registry, trainer)):
            return stock(trainer, *args, **kwargs)
        with calls_sharded(registry, trainer):
            return stock(trainer, *args, **kwargs)

    return evaluate


def training_step(registry: Registry, stock: Function) -> Function:
    """Replace ``Trainer.training_step``: it computes its loss as one process per replica does, or of unlike batches."""

    @functools.wraps(stock)
    def step(trainer: Trainer, *args: object, **kwargs: object) -> object:
        unlike = unlike_steps(registry, trainer)
        if unlike is not None and unlike.computes_loss_itself:
            with unlike.scaling_own_loss():
                return stock(trainer, *args, **kwargs)
        if wanted_results() is None:
            return stock(trainer, *args, **kwargs)
        with registry.adapters.processes.one_process_per_replica():
            return stock(trainer, *args, **kwargs)

    return step


_WITHOUT = "Train it without sequence parallelism, on one rank per sequence, or in a loop by handle.sharded_call."


def expect_splittable(trainer: Trainer) -> None:
    """Refuse what does not train on shards as on one process, before the loop begins.

    That is arguments of a Trainer that need whole sequences on one rank, and a second call of ``train()``: the Trainer
    lets go of its engine at the end of the first one, and has nothing to call ``backward`` of in the second.

    Raises:
        ConfigError: with the argument or the call, and what to do.
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
    except BatchError as error:
        raise BatchError(
            f"the batches of {type(trainer).__name__} cannot be split over the sequence: {error} {_WITHOUT}"
        ) from error


def expect_labels(trainer: Trainer, batch: Batch) -> None:
    """Refuse a batch without labels, whose loss is another's than the mean over tokens.

    Raises:
        BatchError: on every rank, since all have the same entries.
    """
    if "shift_labels" not in batch:
        raise BatchError(
            f"the batches of {type(trainer).__name__} have no labels (they hold {', '.join(sorted(batch))}): its loss "
            f"is not a mean over tokens, and needs whole sequences. {_WITHOUT}"
        )
