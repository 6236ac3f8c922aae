"""Requirements of a Trainer on shards, and of its batches, checked before its loop begins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import Trainer

from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.runtime.data.shards import Batch

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
