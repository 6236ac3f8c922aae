"""List TRL's trainers that train on shards as on one process, by the names of their classes.

A trainer of ``trl.experimental`` is named with its package, such as "experimental.cpo.CPOTrainer". A trainer of the
script counts as the class of TRL from which it is derived.
"""

from __future__ import annotations

from typing import Any

from ds_hetero.engine.patching import expect_package
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.trl.names import COMPLETION_FUNCTIONS, PACKAGE, PRIVATE_NAMES, WORKS, WORKS_BY_TOKENS

TOKEN_TRAINERS = frozenset({"SFTTrainer"})  # the loss is a mean over tokens
# The loss compares log-probabilities, or rewards, of whole sequences.
_SEQUENCE_TRAINERS = frozenset(
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
# The trainer generates completions, and trains on them.
_COMPLETION_TRAINERS = frozenset({"GRPOTrainer", "RLOOTrainer"})
_KNOWN = TOKEN_TRAINERS | _SEQUENCE_TRAINERS | _COMPLETION_TRAINERS


def needs_whole_sequences(trainer: object) -> bool:
    """Return True for a trainer of TRL that computes its loss from whole sequences."""
    return class_name(trainer) in _SEQUENCE_TRAINERS | _COMPLETION_TRAINERS


def averages_router_losses(trainer: object) -> bool:
    """Return True for a trainer that takes the mean of the routers' losses over micro-batches, as SFTTrainer does."""
    return class_name(trainer) in TOKEN_TRAINERS


def generating_class(trainer: object) -> type | None:
    """Return TRL's class of a trainer that generates completions; None for all other trainers."""
    return _class_of(trainer) if class_name(trainer) in _COMPLETION_TRAINERS else None


def expect_known(trainer: object) -> None:
    """Refuse a trainer of TRL that is not known to train on shards as on one process.

    Raises:
        ConfigError: its class is not in the lists above; or its loss is a mean over tokens, and it trains AdaLoRA.
        VersionError: the installed release of TRL was not tried.
    """
    name = class_name(trainer)
    if name is None:
        return
    if name not in _KNOWN:
        known = ", ".join(sorted(_KNOWN))
        raise ConfigError(
            f"TRL's {name} is not known to train on parts of sequences as on one process; these are: {known}. Train it "
            "without sequence parallelism, or compute its log-probabilities in a loop by handle.sharded_call."
        )
    if name in TOKEN_TRAINERS:
        expect_package(PACKAGE, WORKS_BY_TOKENS, ())
        _expect_no_adalora(trainer)
        return
    expect_package(PACKAGE, WORKS, PRIVATE_NAMES)
    trainer_class = generating_class(trainer)
    if trainer_class is not None:
        module = trainer_class.__module__
        replaced = [f"{module}:{function}" for function in COMPLETION_FUNCTIONS]
        expect_package(PACKAGE, WORKS, (*replaced, f"{module}:{trainer_class.__name__}.prediction_step"))


def _expect_no_adalora(trainer: Any) -> None:
    """Refuse AdaLoRA adapters, which add a term to the model's loss. Raises `ConfigError`."""
    adapters = getattr(getattr(trainer, "model", None), "peft_config", {})
    adalora = [name for name, config in adapters.items() if config.peft_type == "ADALORA"]
    if adalora:
        raise ConfigError(
            f"PEFT adapter {adalora[0]!r} is of AdaLoRA, which adds a term to the loss of a model. On one process, "
            f"TRL's {class_name(trainer)} leaves this term out, but if ranks share tokens, the loss would include it. "
            "Train LoRA, or AdaLoRA with transformers' Trainer, or without sequence parallelism."
        )


def class_name(trainer: object) -> str | None:
    """Return the name of the class of TRL that a trainer is, or is derived from; None if there is none.

    For example, "DPOTrainer" or "experimental.cpo.CPOTrainer".
    """
    trainer_class = _class_of(trainer)
    if trainer_class is None:
        return None
    # For trl.experimental.cpo.cpo_trainer: experimental, cpo, cpo_trainer.
    folders = trainer_class.__module__.split(".")[1:]
    if folders[:1] == ["experimental"]:
        return ".".join([*folders[:2], trainer_class.__name__])
    return trainer_class.__name__


def _class_of(trainer: object) -> type | None:
    """Return the class of TRL that a trainer is, or is derived from; None if there is none."""
    return next((base for base in type(trainer).__mro__ if base.__module__.partition(".")[0] == "trl"), None)
