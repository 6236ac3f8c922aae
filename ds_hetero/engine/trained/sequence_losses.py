"""Losses of a model that is split over the sequence: their convention, their state in a step, and the checks of them.

    state       begins with                                       ends with
    run         a forward with gradients (`latest_positions`)     `end_step`
    scaled      `note_scaled`, after a run                        `end_step`

A step that ends in the state "run" has used a loss that was not scaled for the engine's average of gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from ds_hetero.errors import ConfigError
from ds_hetero.runtime.data.loss_units import UnitCounts
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks import ClassLoss, GraphChanges, LocalWeights, TokenFactors, TokenWeights
from ds_hetero.values.section import SECTION


class _ModelOnReplica(Protocol):
    """A split model, as far as `SequenceLosses` uses it."""

    replica: Replica  # under the present schedule


class SequenceLosses:
    """State of the losses of one model.

    Args:
        model: the split model; its ``replica`` may change between steps.
        name: name of the model's class, for messages.

    Attributes:
        convention: how losses that the training script computes itself are scaled, see `ds_hetero.runtime.loss`; None
            if the section does not name a convention.
        latest_positions: the ``position_ids`` of the latest batch that a backward may follow; None right after a step.
        token_weights: checks how the loss of every step weighs its tokens; None without checks.
        token_factors: checks the factors in losses that the script computes; None without checks.
        local_weights: checks the numbers by which such losses multiply tokens; None without checks.
        class_loss: checks the loss that the model's class computes itself; None for transformers' classes, and without
            checks.
        graphs: notices if losses are computed by other operations than before; None without checks.
    """

    def __init__(self, model: _ModelOnReplica, name: str) -> None:
        self._model, self._name = model, name
        self.convention: str | None = None
        self.latest_positions: Tensor | None = None
        self.token_weights: TokenWeights | None = None
        self.token_factors: TokenFactors | None = None
        self.local_weights: LocalWeights | None = None
        self.class_loss: ClassLoss | None = None
        self.graphs: GraphChanges | None = None
        self._is_scaled = False  # whether a loss was scaled since the engine's last step

    @property
    def replica(self) -> Replica:
        """The model's replica, under the present schedule."""
        return self._model.replica

    def declare(self, convention: str | None) -> None:
        """Set `convention`. Raises `ConfigError` on every rank: split models do not have this convention."""
        if convention in UnitCounts._fields:
            raise ConfigError(
                f'"{SECTION}.loss": "{convention}" is for modules that are not split; the loss of '
                f"{self._name} is a mean over tokens. Leave the key out."
            )
        self.convention = convention

    def note_scaled(self) -> None:
        """Note that the loss of the latest batch was scaled for the engine's average of gradients."""
        self._is_scaled = True

    def end_step(self) -> bool:
        """Clear the state of a step; return True if batches were run but no loss was scaled."""
        is_unscaled = self.latest_positions is not None and not self._is_scaled
        self.latest_positions, self._is_scaled = None, False
        return is_unscaled

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Inside the context, let forwards keep `latest_positions`, and hide their losses from the checks."""
        former = self.latest_positions, self.token_weights, self.token_factors, self.class_loss
        self.token_weights = self.token_factors = self.class_loss = None
        try:
            with contextlib.nullcontext() if self.graphs is None else self.graphs.leaving_out():
                yield
        finally:
            self.latest_positions, self.token_weights, self.token_factors, self.class_loss = former
