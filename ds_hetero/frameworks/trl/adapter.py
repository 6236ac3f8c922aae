"""TRL as the engine sees it: `ds_hetero.engine.adapters.TrainerAdapter`, which this module is.

Trainers that generate completions and train on them: each replica is a process to them.

Their batches are lists of prompts, the same on all ranks of a replica. Every rank generates with the whole model; the
completions of a replica's first rank are taken by all of its ranks, since unlike devices draw unlike tokens. Rewards,
which every rank computes, are gathered from the first ranks of the replicas. Log-probabilities are made by sharded
calls. What else such a trainer counts by processes is counted by replicas: seeds, prompts of a generation, slices of
the advantages, metrics.

TRL's trainers that train on shards, by the names of their classes and, of experimental ones, their packages.
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
from ds_hetero.engine.patching import Function, Patches, around, expect_package
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.trl.names import (
    OF_COMPLETIONS,
    PACKAGE,
    PRIVATE_NAMES,
    SHORTER_OUTPUTS,
    WORKS,
    WORKS_BY_TOKENS,
)
from ds_hetero.runtime.collectives import on_all_ranks

_OF_TOKENS = frozenset({"SFTTrainer"})
_OF_WHOLE_SEQUENCES = frozenset(
    {
        "DPOTrainer",
        "KTOTrainer",
        "RewardTrainer",
        "experimental.cpo.CPOTrainer",
        "experimental.gkd.GKDTrainer",
        "experimental.kto.KTOTrainer",
        "experimental.orpo.ORPOTrainer",
    }
)
_OF_COMPLETIONS = frozenset({"GRPOTrainer", "RLOOTrainer"})
_KNOWN = _OF_TOKENS | _OF_WHOLE_SEQUENCES | _OF_COMPLETIONS


def needs_whole_sequences(trainer: object) -> bool:
    """Whether a trainer is TRL's, or derived from one, and computes its loss from whole sequences."""
    return _class_name(trainer) in _OF_WHOLE_SEQUENCES | _OF_COMPLETIONS


def averages_router_losses(trainer: object) -> bool:
    """Whether a trainer is TRL's, or derived from one, and has the losses of routers as its SFTTrainer has them."""
    return _class_name(trainer) in _OF_TOKENS


def generating_class(trainer: object) -> type | None:
    """TRL's class that a trainer is of or derived from, if it generates what it trains on and is known."""
    return _class_of(trainer) if _class_name(trainer) in _OF_COMPLETIONS else None


def expect_known(trainer: object) -> None:
    """Refuse a trainer of TRL that is not known to train on shards as on one process.

    Raises:
        ConfigError: it is of another class, such as those that generate, or trains AdaLoRA by tokens.
        VersionError: TRL is of a version that was not tried.
    """
    name = _class_name(trainer)
    if name is None:
        return
    if name not in _KNOWN:
        known = ", ".join(sorted(_KNOWN))
        raise ConfigError(
            f"TRL's {name} is not known to train on parts of sequences as on one process; these are: {known}. Train it "
            "without sequence parallelism, or compute its log-probabilities in a loop by handle.sharded_call."
        )
    if name in _OF_TOKENS:
        expect_package(PACKAGE, WORKS_BY_TOKENS, ())
        _expect_no_term_of_adapters(trainer)
        return
    expect_package(PACKAGE, WORKS, PRIVATE_NAMES)
    kind = generating_class(trainer)
    if kind is not None:
        module = kind.__module__
        expect_package(
            PACKAGE,
            WORKS,
            (*(f"{module}:{name}" for name in OF_COMPLETIONS), f"{module}:{kind.__name__}.prediction_step"),
        )


def _expect_no_term_of_adapters(trainer: Any) -> None:
    adapters = getattr(getattr(trainer, "model", None), "peft_config", {})
    if names := [name for name, config in adapters.items() if config.peft_type == "ADALORA"]:
        raise ConfigError(
            f"PEFT adapter {names[0]!r} is of AdaLoRA, which adds a term to the loss of a model. On one process TRL's "
            f"{_class_name(trainer)} leaves it out; where ranks share tokens it would be there. Train LoRA, or AdaLoRA "
            "with transformers' Trainer, or without sequence parallelism."
        )


def running_state(trainer: Any) -> dict[str, Any]:
    """TRL's sums for logs, which no checkpoint has. Raises `ConfigError`: the trainer has more to lose."""
    name = _class_name(trainer)
    if name is None:
        return {}
    if name not in _OF_TOKENS:
        raise ConfigError(
            f"TRL's {name} cannot be kept by an elastic job yet: what it generates, or compares with, is in no save. "
            f"Of TRL's trainers {', '.join(sorted(_OF_TOKENS))} goes on exactly; start this one without --elastic."
        )
    of_modes = {mode: {key: list(values) for key, values in of.items()} for mode, of in trainer._metrics.items()}
    return {"metrics": of_modes, "tokens": trainer._total_train_tokens}


def set_running_state(trainer: Any, state: dict[str, Any]) -> None:
    """Put back what `running_state` returned."""
    if state:
        trainer._total_train_tokens = state["tokens"]
        for mode, metrics in state["metrics"].items():
            trainer._metrics[mode].clear()
            trainer._metrics[mode].update(metrics)


def _class_name(trainer: object) -> str | None:
    """The name of `_class_of`, with its package if that is experimental; None if of none."""
    kind = _class_of(trainer)
    if kind is None:
        return None
    modules = kind.__module__.split(".")[1:]
    prefix = [] if modules[:1] != ["experimental"] else modules[:2]
    return ".".join([*prefix, kind.__name__])


def _class_of(trainer: object) -> type | None:
    """The most derived class of TRL that a trainer is of."""
    return next((kind for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"), None)


logger = logging.getLogger(__name__)


shorter_outputs = SHORTER_OUTPUTS
_ready: set[type] = set()  # classes of trainers whose modules count replicas


def note_constructed(trainer: Any, patches: Patches, find_split: FindSplit, processes: ProcessAdapter) -> None:
    """After ``Trainer.__init__`` a trainer that generates sets its seed and reads its counts."""
    kind = generating_class(trainer)
    if kind is None:
        return
    expect_known(trainer)
    expect_tried(trainer)
    count_replicas(trainer.args, dist.get_world_size() // trainer.get_sp_size())
    if kind in _ready:
        return
    _ready.add(kind)
    patches.on_undo(lambda: _ready.discard(kind))
    module, replace = sys.modules[kind.__module__], patches.replace
    for name in ("gather", "gather_object"):
        replace(module, name, processes.gathered_from_replicas)
    replace(module, "set_seed", around(_set_seed, processes))
    replace(module, "unwrap_model_for_generation", around(_unwrap_model_for_generation, find_split))
    replace(kind, "prediction_step", around(_prediction_step, processes))


@contextlib.contextmanager
def _unwrap_model_for_generation(
    find_split: FindSplit, stock: Function, model: object, accelerator: Any, *args: object, **kwargs: object
) -> Iterator[nn.Module]:
    """The model that generates takes whole batches, and returns what the replica's first rank generates."""
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
            torch.set_rng_state(random_state)
            return tokens.to(accelerator.device)

        unwrapped.generate = first_of_replica
        try:
            yield unwrapped
        finally:
            del unwrapped.generate


def expect_tried(trainer: Any) -> None:
    """Refuse what was not tried with a trainer that generates. Raises `ConfigError`: all such arguments."""
    asked = {
        "use_vllm": trainer.use_vllm,
        "use_transformers_continuous_batching": trainer.use_transformers_continuous_batching,
        "use_liger_kernel": trainer.args.use_liger_kernel,
        "rollout_func": getattr(trainer, "rollout_func", None) is not None,
        "tools": bool(getattr(trainer, "tools", None)),
        "environment_factory": getattr(trainer, "environment_factories", None) is not None,
        "a processor of images": trainer._is_vlm,
        "a loss of routers (router_aux_loss_coef=0 leaves it out)": trainer.aux_loss_enabled,
    }
    refused = [name for name, is_asked in asked.items() if is_asked]
    if refused:
        raise ConfigError(
            f"{type(trainer).__name__} was not tried on parts of sequences with {', '.join(refused)}. Train without "
            f"{'it' if len(refused) == 1 else 'them'}, or without sequence parallelism."
        )


def count_replicas(arguments: Any, num_replicas: int) -> None:
    """Let a generating trainer's arguments count replicas, not ranks. Raises `ConfigError`: they do not divide.

    Args:
        arguments: of the trainer; ``generation_batch_size`` is set to what all replicas take in one generation.
    """
    steps, per_replica = arguments.steps_per_generation, arguments.per_device_train_batch_size
    size = per_replica * num_replicas * steps
    if size % arguments.num_generations:
        raise ConfigError(
            f"num_generations={arguments.num_generations} does not divide the {size} completions of one generation, "
            f"which are per_device_train_batch_size={per_replica} times {num_replicas} replica(s) times "
            f"steps_per_generation={steps}: ranks that share a sequence count once. Change one of them."
        )
    evaluated = arguments.per_device_eval_batch_size * num_replicas
    num_generations = arguments.num_generations_eval or arguments.num_generations
    if arguments.eval_strategy != "no" and evaluated % num_generations:
        raise ConfigError(
            f"num_generations={num_generations} of an evaluation does not divide the {evaluated} completions of a "
            f"batch, which are per_device_eval_batch_size={arguments.per_device_eval_batch_size} times {num_replicas} "
            "replica(s): ranks that share a sequence count once. Change one of them."
        )
    if size != arguments.generation_batch_size and steps != arguments.gradient_accumulation_steps:
        logger.warning(
            "generation_batch_size is %d, of %d replica(s), and not %d: ranks that share a sequence count once. "
            "steps_per_generation=%d is kept; set that one to change it.",
            size,
            num_replicas,
            arguments.generation_batch_size,
            steps,
        )
    arguments.generation_batch_size = size


def _set_seed(
    processes: ProcessAdapter, stock: Function, seed: int, device_specific: bool = False, **kwargs: object
) -> None:
    """A seed for each process is one for each replica."""
    with (
        processes.one_process_per_replica() if processes.size_of_accelerate() is not None else contextlib.nullcontext()
    ):
        stock(seed, device_specific, **kwargs)


def _prediction_step(
    processes: ProcessAdapter, stock: Function, trainer: Any, *args: object, **kwargs: object
) -> object:
    """Replace ``prediction_step``, which generates and divides losses."""
    with processes.one_process_per_replica() if wanted_results() is not None else contextlib.nullcontext():
        return stock(trainer, *args, **kwargs)
