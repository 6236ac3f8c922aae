"""Trainers whose loss is of whole sequences: their batches stay whole, and their models are called by sharded calls.

Such a trainer sees what it sees as one process per replica: whole batches, the model's own outputs put together, and
numbers gathered once per replica. So its loss, its metrics and its evaluation are those of one process.
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
from ds_hetero.engine.process.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ConfigError, VersionError
from ds_hetero.frameworks.transformers.checks.model_checks import pretrained_of
from ds_hetero.frameworks.transformers.trainer.unlike_batches import unlike_steps

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
    """Replace ``Trainer.evaluate`` and ``Trainer.predict``.

    Args:
        registry: of this process.
        stock: the method.
    """

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
