"""Evaluation of a model that is split over the sequence: over shards, or on whole sequences."""

from __future__ import annotations

from collections.abc import Callable

from ds_hetero.engine.forward_mode import sharding_is_set
from ds_hetero.errors import ConfigError
from ds_hetero.values.section import SECTION


class ShardEvaluation:
    """How one model is evaluated.

    Args:
        read_whole_reason: returns why an evaluation cannot shard whole batches at the model, and what to do; empty if
            it can.
        is_in_evaluation: returns whether ``eval()`` was called on the model, and no ``train()`` since.
    """

    def __init__(self, read_whole_reason: Callable[[], str], is_in_evaluation: Callable[[], bool]) -> None:
        self._read_whole_reason, self._is_in_evaluation = read_whole_reason, is_in_evaluation
        self._declared: str | None = None  # ``"evaluation"`` of the section

    def declare(self, kind: str | None) -> None:
        """Set how the model is evaluated. Raises `ConfigError` on every rank: it cannot be evaluated over shards.

        Args:
            kind: ``"evaluation"`` of the section.
        """
        if kind == "sharded" and (reason := self.whole_reason):
            raise ConfigError(f'"{SECTION}.evaluation": "sharded": {reason}')
        self._declared = kind

    @property
    def kind(self) -> str:
        """How loops of frameworks evaluate the model: ``"sharded"`` or ``"whole"``."""
        return self._declared or ("whole" if self.whole_reason else "sharded")

    @property
    def whole_reason(self) -> str:
        """Reason why an evaluation runs on whole sequences, and what to do; empty if it can run over shards."""
        return self._read_whole_reason()

    @property
    def takes_forwards(self) -> bool:
        """True after ``eval()`` if the section evaluates "sharded"; not inside handle.sharded() or unsharded()."""
        return self._declared == "sharded" and sharding_is_set() is None and self._is_in_evaluation()
