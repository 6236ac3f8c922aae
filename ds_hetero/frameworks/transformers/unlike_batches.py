"""Train with the Trainer on a different batch on every rank (``"batch": [6, 2]``): configuration and requirements.

The steps of such a training are in `unlike_steps`.
"""

from __future__ import annotations

from transformers import Trainer

from ds_hetero.engine.ds_config import sets_batch_by_rank
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ConfigError
from ds_hetero.values.section import SECTION


def takes_unlike_batches(registry: Registry, trainer: Trainer) -> bool:
    """Return True if a Trainer trains with this engine, and the "heterogeneity" section gives each rank's batch."""
    return registry.adapters.processes.asks_for_engine(trainer.accelerator) and sets_batch_by_rank(
        trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    )


def complete_configuration(trainer: Trainer) -> None:
    """Write the Trainer's batch sizes into the DeepSpeed configuration.

    The micro-batch size is written only if the configuration has none, or "auto". The gradient accumulation steps are
    always the Trainer's, because its loop counts by them.
    """
    ds_config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    if ds_config.get("train_micro_batch_size_per_gpu") in (None, "auto"):
        ds_config["train_micro_batch_size_per_gpu"] = trainer.args.per_device_train_batch_size
    ds_config["gradient_accumulation_steps"] = trainer.args.gradient_accumulation_steps


def expect_independent_samples(trainer: Trainer, *, of_sequences: bool) -> None:
    """Refuse a Trainer that divides samples among ranks itself, or relates the samples of a batch to each other.

    Args:
        of_sequences: True for a trainer of TRL whose loss compares whole sequences.

    Raises:
        ConfigError: with what to change.
    """
    if trainer.args.train_sampling_strategy == "batch_rebalance":
        raise ConfigError(
            f'train_sampling_strategy="batch_rebalance" divides samples among ranks, and so does "{SECTION}.batch". '
            'Use "random" or "group_by_length".'
        )
    if hasattr(trainer, "num_generations"):
        raise ConfigError(
            f"{type(trainer).__name__} compares the completions of one prompt, which unequal batches would separate. "
            f'Leave "{SECTION}.batch" out: equal batches, or sequence parallelism, train it.'
        )
    if of_sequences:  # KTO's loss came out twice as large with two accumulated batches
        raise ConfigError(
            f"{type(trainer).__name__} pairs and divides the samples of a batch by its own rules, and is not known to "
            f'train on unequal batches as on one process. Leave "{SECTION}.batch" out: equal batches, or sequence '
            "parallelism, train it."
        )
