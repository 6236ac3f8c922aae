"""TRL's trainers that train on shards, by the names of their classes and, of experimental ones, their packages."""

from __future__ import annotations

from ds_hetero.engine.process.patching import expect_package
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.trl.names import OF_COMPLETIONS, PACKAGE, PRIVATE_NAMES, WORKS, WORKS_BY_TOKENS

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


def generating_class(trainer: object) -> type | None:
    """TRL's class that a trainer is of or derived from, if it generates what it trains on and is known."""
    return _class_of(trainer) if _class_name(trainer) in _OF_COMPLETIONS else None


def expect_known(trainer: object) -> None:
    """Refuse a trainer of TRL that is not known to train on shards as on one process.

    Raises:
        ConfigError: it is of another class, such as those that generate.
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
