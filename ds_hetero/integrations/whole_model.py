"""A module that is not split over the sequence: every replica is one rank, which runs it on its own batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ds_hetero.config import SECTION
from ds_hetero.errors import ConfigError
from ds_hetero.placement import Placer
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import StepClock

__all__ = ["WholeModel"]


class WholeModel:
    """What an engine's hooks need of a module that is not split; the counterpart of `ShardedModel`.

    Args:
        model: any module.
        replica: this rank's replica, of one rank.

    Attributes:
        clock: times the phases of this model's steps.
        loss_convention: None, since the loss of one rank is that of its replica.
        latest_positions: None, since no batch is cut.

    Raises:
        ConfigError: replicas take different batches, by whose tokens their losses would have to be weighed.
    """

    kernel: str | None = None
    loss_convention: str | None = None
    latest_positions: None = None
    places_documents = takes_shards = waits_in_forward = needs_check = False

    def __init__(self, model: nn.Module, replica: Replica) -> None:
        assert replica.sp_size == 1, replica
        if replica.batch_split is not None:
            raise ConfigError(
                f"replicas that take different batches ({replica.batch_split}) weigh their losses by tokens, which "
                f"ds_hetero does not know of {type(model).__name__}. Give all replicas of the schedule the same "
                "micro_batch_size and micro_batches."
            )
        self.model, self.replica = model, replica
        self.clock = StepClock(default_device())
        self._record: object = None
        self._hook = model.register_forward_pre_hook(self._before)

    @property
    def times_forward(self) -> bool:
        """Whether a forward is one of training."""
        return self.model.training

    def keep_alive(self, record: object) -> None:
        """Have ``record`` live as long as the model, whose hook holds this object."""
        self._record = record

    def restore(self) -> None:
        """Take the hook away."""
        self._hook.remove()

    def record_batches(self, record: Callable[..., None]) -> None:
        """Batches are not known here."""

    def verify(self, when: str) -> None:
        """Nothing is split, so there is nothing to compare."""

    def declare_loss(self, convention: str | None) -> None:
        """Refuse a convention that counts tokens.

        Raises:
            ConfigError: ``convention`` is another one than ``"replica_mean"``; on every rank.
        """
        if convention not in (None, "replica_mean"):
            raise ConfigError(
                f'"{SECTION}.loss" is "{convention}", which counts the tokens of a batch, but '
                f"{type(self.model).__name__} is not split: its loss is that of the batch already. Leave the key out."
            )

    def place_documents(self, placer: Placer | None) -> None:
        """Refuse documents, which only a split batch has placed.

        Raises:
            ConfigError: there is a placer; on every rank.
        """
        if placer is not None:
            raise ConfigError(
                f'"{SECTION}.placement": "documents" places the tokens of split batches, but '
                f"{type(self.model).__name__} runs whole on every rank. Leave the key out."
            )

    def note_scaled_loss(self) -> None:
        """Losses need no scale."""

    def end_step(self) -> bool:
        """No batch of a step can have been left without its scale."""
        return False

    def change_replica(self, replica: Replica) -> None:
        """Go on under another schedule of the same rank."""
        self.replica = replica

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeModel:
        """Hooks of a copied model go on working; the replica is the same."""
        return self

    def _before(self, model: nn.Module, args: Any) -> None:
        """The hook that holds this object; the module is run as it is."""
