"""Save and restore the state of TRL's trainers that is in no checkpoint, for jobs that go on after a lost node."""

from __future__ import annotations

from typing import Any

from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.trl.known_trainers import TOKEN_TRAINERS, class_name


def running_state(trainer: Any) -> dict[str, Any]:
    """Return the sums that TRL logs and writes into no checkpoint; an empty dict for a trainer that is not TRL's.

    Raises:
        ConfigError: the trainer has more state than these sums, such as generated completions.
    """
    name = class_name(trainer)
    if name is None:
        return {}
    if name not in TOKEN_TRAINERS:
        raise ConfigError(
            f"TRL's {name} cannot be kept by an elastic job yet, because a save contains neither the completions that "
            "it generates nor the model that it compares with. Of TRL's trainers, "
            f"{', '.join(sorted(TOKEN_TRAINERS))} resumes exactly. Start this one without --elastic."
        )
    metrics = {}  # by "train" and "eval": the values since the latest log, by their names
    for mode, values_by_name in trainer._metrics.items():
        metrics[mode] = {name: list(values) for name, values in values_by_name.items()}
    return {"metrics": metrics, "tokens": trainer._total_train_tokens}


def set_running_state(trainer: Any, state: dict[str, Any]) -> None:
    """Restore the state that `running_state` returned."""
    if not state:
        return
    trainer._total_train_tokens = state["tokens"]
    for mode, values_by_name in state["metrics"].items():
        # Keep TRL's dictionaries, which are defaultdicts: they begin a list for every new name.
        trainer._metrics[mode].clear()
        trainer._metrics[mode].update(values_by_name)
