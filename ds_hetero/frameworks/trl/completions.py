"""Let TRL's trainers that generate completions, and train on them, count replicas instead of processes.

    prompts             a batch is a list of prompts, the same on all ranks of a replica
    completions         every rank generates with the whole model; all ranks of a replica take those of its first rank,
                        because unlike devices draw unlike tokens
    rewards             computed on every rank, and gathered from the first rank of every replica
    log-probabilities   computed by sharded calls

Such a trainer also counts replicas for seeds, prompts of a generation, slices of the advantages, and metrics.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_hetero.engine.adapters import FindSplit, ProcessAdapter
from ds_hetero.engine.forward_mode import sharding, wanted_results
from ds_hetero.engine.patching import Function, Patches, around
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.trl.known_trainers import expect_known, generating_class
from ds_hetero.runtime.collectives import on_all_ranks

logger = logging.getLogger(__name__)

_patched_classes: set[type] = set()  # classes of trainers whose modules count replicas


def note_constructed(trainer: Any, patches: Patches, find_split: FindSplit, processes: ProcessAdapter) -> None:
    """Let a trainer that generates completions count replicas; do nothing for other trainers.

    Called at the end of ``Trainer.__init__``: TRL's constructors set the seed, and read the counts, after that.

    Raises:
        ConfigError: see `expect_known`, `expect_tried` and `count_replicas`.
    """
    trainer_class = generating_class(trainer)
    if trainer_class is None:
        return
    expect_known(trainer)
    expect_tried(trainer)
    count_replicas(trainer.args, dist.get_world_size() // trainer.get_sp_size())
    if trainer_class in _patched_classes:
        return
    _patched_classes.add(trainer_class)
    patches.on_undo(lambda: _patched_classes.discard(trainer_class))
    # The trainer's module imported these functions by name, so they are replaced in it.
    module = sys.modules[trainer_class.__module__]
    for name in ("gather", "gather_object"):
        patches.replace(module, name, processes.gathered_from_replicas)
    patches.replace(module, "set_seed", around(_set_seed, processes))
    patches.replace(module, "unwrap_model_for_generation", around(_unwrap_model_for_generation, find_split))
    patches.replace(trainer_class, "prediction_step", around(_prediction_step, processes))


@contextlib.contextmanager
def _unwrap_model_for_generation(
    find_split: FindSplit, stock: Function, model: object, accelerator: Any, *args: object, **kwargs: object
) -> Iterator[nn.Module]:
    """Replace ``unwrap_model_for_generation``: all ranks of a replica get the completions of its first rank.

    Caller: every rank of the replica, in every generation.
    Collectives: one `on_all_ranks` over the replica for each call of ``generate``.
    """
    split = find_split(accelerator.unwrap_model(model))
    if split is None:
        with stock(model, accelerator, *args, **kwargs) as unwrapped:
            yield unwrapped
        return
    with sharding(False), stock(model, accelerator, *args, **kwargs) as unwrapped:
        generate = unwrapped.generate

        def first_of_replica(*args: object, **kwargs: object) -> torch.Tensor:
            def draw() -> tuple[torch.Tensor, torch.Tensor]:
                return generate(*args, **kwargs).cpu(), torch.get_rng_state()

            tokens, random_state = on_all_ranks(draw, split.replica.sp_group)[0]
            # Numbers that are drawn on the CPU later, such as the order of samples, must be equal on the replica.
            torch.set_rng_state(random_state)
            return tokens.to(accelerator.device)

        unwrapped.generate = first_of_replica
        try:
            yield unwrapped
        finally:
            del unwrapped.generate


def expect_tried(trainer: Any) -> None:
    """Refuse options with which trainers that generate completions were not tried. Raises `ConfigError` with all."""
    is_requested = {
        "use_vllm": trainer.use_vllm,
        "use_transformers_continuous_batching": trainer.use_transformers_continuous_batching,
        "use_liger_kernel": trainer.args.use_liger_kernel,
        "rollout_func": getattr(trainer, "rollout_func", None) is not None,
        "tools": bool(getattr(trainer, "tools", None)),
        "environment_factory": getattr(trainer, "environment_factories", None) is not None,
        "a processor of images": hasattr(trainer.processing_class, "tokenizer"),  # TRL takes it or a tokenizer
        "a loss of routers (router_aux_loss_coef=0 leaves it out)": trainer.aux_loss_enabled,
    }
    refused = [name for name, requested in is_requested.items() if requested]
    if refused:
        raise ConfigError(
            f"{type(trainer).__name__} was not tried on parts of sequences with {', '.join(refused)}. Train without "
            f"{'it' if len(refused) == 1 else 'them'}, or without sequence parallelism."
        )


def count_replicas(arguments: Any, num_replicas: int) -> None:
    """Let the arguments of a trainer that generates completions count replicas instead of ranks.

    Example: 8 ranks in 2 replicas, per_device_train_batch_size=4 and steps_per_generation=3. TRL counts 8 * 4 * 3 = 96
    completions in a generation. But the ranks of a replica have the same completions, so there are 2 * 4 * 3 = 24.

    Args:
        arguments: of the trainer. ``generation_batch_size`` is set to the number of completions in one generation.

    Raises:
        ConfigError: ``num_generations`` does not divide the completions of a generation, or those of an evaluation.
    """
    steps = arguments.steps_per_generation
    per_replica = arguments.per_device_train_batch_size
    size = per_replica * num_replicas * steps
    if size % arguments.num_generations:
        raise ConfigError(
            f"num_generations={arguments.num_generations} does not divide the {size} completions of one generation, "
            f"which are per_device_train_batch_size={per_replica} times {num_replicas} replica(s) times "
            f"steps_per_generation={steps}: ranks that share a sequence count once. Change one of these numbers."
        )
    evaluated = arguments.per_device_eval_batch_size * num_replicas
    num_generations = arguments.num_generations_eval or arguments.num_generations
    if arguments.eval_strategy != "no" and evaluated % num_generations:
        raise ConfigError(
            f"num_generations={num_generations} of an evaluation does not divide the {evaluated} completions of a "
            f"batch, which are per_device_eval_batch_size={arguments.per_device_eval_batch_size} times {num_replicas} "
            "replica(s): ranks that share a sequence count once. Change one of these numbers."
        )
    if size != arguments.generation_batch_size and steps != arguments.gradient_accumulation_steps:
        logger.warning(
            "generation_batch_size is %d, for %d replica(s), and not %d: ranks that share a sequence count once. "
            "steps_per_generation=%d is kept; set it to change generation_batch_size.",
            size,
            num_replicas,
            arguments.generation_batch_size,
            steps,
        )
    arguments.generation_batch_size = size


def _set_seed(
    processes: ProcessAdapter, stock: Function, seed: int, device_specific: bool = False, **kwargs: object
) -> None:
    """Replace ``set_seed``: with ``device_specific``, each replica instead of each process gets another seed."""
    if processes.size_of_accelerate() is None:
        stock(seed, device_specific, **kwargs)
        return
    with processes.one_process_per_replica():
        stock(seed, device_specific, **kwargs)


def _prediction_step(
    processes: ProcessAdapter, stock: Function, trainer: Any, *args: object, **kwargs: object
) -> object:
    """Replace ``prediction_step``, which generates completions and divides losses by the number of processes.

    In sharded calls it counts replicas as processes.
    """
    if wanted_results() is None:
        return stock(trainer, *args, **kwargs)
    with processes.one_process_per_replica():
        return stock(trainer, *args, **kwargs)
