"""TRL's trainers that train on shards as on one process, by the names of their classes.

Trainers of ``trl.experimental`` are named with their package. A script's trainer counts as the class of TRL that it is
derived from.
"""

from __future__ import annotations

from typing import Any

from ds_hetero.engine.patching import expect_package
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.trl.names import OF_COMPLETIONS, PACKAGE, PRIVATE_NAMES, WORKS, WORKS_BY_TOKENS

OF_TOKENS = frozenset({"SFTTrainer"})  # the loss is a mean over tokens
# The loss compares log-probabilities, or rewards, of whole sequences.
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
# They generate completions and train on them.
_OF_COMPLETIONS = frozenset({"GRPOTrainer", "RLOOTrainer"})
_KNOWN = OF_TOKENS | _OF_WHOLE_SEQUENCES | _OF_COMPLETIONS


def needs_whole_sequences(trainer: object) -> bool:
    """Whether a trainer is one of TRL's that compute their loss from whole sequences."""
    return class_name(trainer) in _OF_WHOLE_SEQUENCES | _OF_COMPLETIONS


def averages_router_losses(trainer: object) -> bool:
    """Whether a trainer takes the mean of the routers' losses over micro-batches, as TRL's SFTTrainer does."""
    return class_name(trainer) in OF_TOKENS


def generating_class(trainer: object) -> type | None:
    """Return TRL's class of a trainer that trains on the completions it generates; None for all other trainers."""
    return _class_of(trainer) if class_name(trainer) in _OF_COMPLETIONS else None


def expect_known(trainer: object) -> None:
    """Refuse a trainer of TRL that is not known to train on shards as on one process.

    Raises:
        ConfigError: its class is not in the lists above, or it trains AdaLoRA with a mean over tokens.
        VersionError: this release of TRL was not tried.
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
    if name in OF_TOKENS:
        expect_package(PACKAGE, WORKS_BY_TOKENS, ())
        _expect_no_term_of_adapters(trainer)
        return
    expect_package(PACKAGE, WORKS, PRIVATE_NAMES)
    kind = generating_class(trainer)
    if kind is not None:
        module = kind.__module__
        replaced = [f"{module}:{function}" for function in OF_COMPLETIONS]
        expect_package(PACKAGE, WORKS, (*replaced, f"{module}:{kind.__name__}.prediction_step"))


def _expect_no_term_of_adapters(trainer: Any) -> None:
    """Refuse AdaLoRA, which adds a term to a model's loss. Raises `ConfigError`: an adapter is of this kind."""
    adapters = getattr(getattr(trainer, "model", None), "peft_config", {})
    adalora = [name for name, config in adapters.items() if config.peft_type == "ADALORA"]
    if adalora:
        raise ConfigError(
            f"PEFT adapter {adalora[0]!r} is of AdaLoRA, which adds a term to the loss of a model. On one process "
            f"TRL's {class_name(trainer)} leaves it out; where ranks share tokens it would be there. Train LoRA, or "
            "AdaLoRA with transformers' Trainer, or without sequence parallelism."
        )


def class_name(trainer: object) -> str | None:
    """Return the name of TRL's class of a trainer: ``"DPOTrainer"``, ``"experimental.cpo.CPOTrainer"``; else None."""
    kind = _class_of(trainer)
    if kind is None:
        return None
    folders = kind.__module__.split(".")[1:]  # trl.experimental.cpo.cpo_trainer: experimental, cpo, cpo_trainer
    if folders[:1] == ["experimental"]:
        return ".".join([*folders[:2], kind.__name__])
    return kind.__name__


def _class_of(trainer: object) -> type | None:
    """Return the most derived class of TRL among a trainer's classes; None for a trainer that is not TRL's."""
    return next((kind for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"), None)
