"""TRL's trainers whose losses are of whole sequences, by the names of their classes."""

from __future__ import annotations

from typing import Any

__all__ = ["WORKS", "needs_whole_sequences"]

WORKS = ">=1.16,<2"
_OF_WHOLE_SEQUENCES = {
    "DPOTrainer",
    "RewardTrainer",
    "GKDTrainer",
}


def needs_whole_sequences(trainer: Any) -> bool:
    """Whether a trainer is TRL's, or derived from one, and computes its loss from whole sequences."""
    return any(
        kind.__name__ in _OF_WHOLE_SEQUENCES and kind.__module__.partition(".")[0] == "trl"
        for kind in type(trainer).__mro__
    )
