"""A module that is not split over the sequence: every replica is one rank, which runs it on its own batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ds_hetero.errors import BatchError, ConfigError, ModelError, StepError
from ds_hetero.runtime.data.loading.sample_loader import MicroBatchWeights
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.calls import REMEDY
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.placement import Placer
from ds_hetero.values.section import SECTION, HeterogeneitySection


class WholeModel:
    """A module that is not split, for an engine's hooks; the counterpart of `ShardedModel`.

    Args:
        model: any module.
        replica: this rank's replica, of one rank.

    Attributes:
        clock: times the phases of this model's steps.
        loss_convention: ``"sample_mean"`` where replicas take different batches; None where a loss needs no scale.
        latest_positions: None, since no batch is cut.
    """

    kernel: str | None = None
    latest_positions: None = None
    places_documents = takes_shards = waits_in_forward = False

    def __init__(self, model: nn.Module, replica: Replica) -> None:
        assert replica.sp_size == 1, replica
        self.model, self.replica = model, replica
        self.loss_convention: str | None = None
        self._batch: MicroBatchWeights | None = None  # that the next loss is of
        self._has_loss = self._has_run = False  # of that batch; in the engine's present step
        self._is_checked = False
        self.clock = StepClock(default_device())
        self._record: object = None
        self._hook = model.register_forward_pre_hook(self._before)

    @property
    def times_forward(self) -> bool:
        """Whether a forward is one of training."""
        return self.model.training

    def keep_alive(self, record: object) -> None:
        """Keep ``record`` alive as long as the model, whose hook holds this object."""
        self._record = record

    def restore(self) -> None:
        """Take the hook away."""
        self._hook.remove()

    def record_batches(self, record: Callable[..., None]) -> None:
        """Batches are not known here."""

    def verify(self, when: str) -> None:
        """Nothing is split, so there is nothing to compare."""

    def declare_loss(self, convention: str | None) -> None:
        """Set `loss_convention`.

        Raises:
            ConfigError: ``convention`` counts tokens; or replicas take different batches and it does not say that the
                loss is a mean over samples, or the other way round; on every rank.
        """
        name, split = type(self.model).__name__, self.replica.batch_split
        if convention not in (None, "replica_mean", "sample_mean"):
            raise ConfigError(
                f'"{SECTION}.loss" is "{convention}", which counts the tokens of a batch, but '
                f"{name} is not split: its loss is that of the batch already. Leave the key out."
            )
        if split is not None and convention != "sample_mean":
            raise ConfigError(
                f"the replicas take different batches ({split}), but ds_hetero does not know what the loss of {name} "
                f'is the mean over. If it is the mean over the samples of the micro-batch, say "{SECTION}": '
                '{"loss": "sample_mean"}; or give all replicas of the schedule the same batches.'
            )
        if split is None and convention == "sample_mean":
            raise ConfigError(
                f'"{SECTION}.loss": "sample_mean" weighs the losses of replicas that take different batches, but the '
                "schedule says no micro_batch_size and micro_batches. Leave the key out."
            )
        self.loss_convention = "sample_mean" if convention == "sample_mean" else None

    def expect_section(self, section: HeterogeneitySection) -> None:
        """Refuse what changes or computes parts of sequences.

        Raises:
            ConfigError: ``section`` asks for tiles, or for changes of the schedule; on every rank.
        """
        name = type(self.model).__name__
        if section.tile_tokens is not None:
            raise ConfigError(
                f'"tile_tokens": {section.tile_tokens} tiles models of transformers that are split over a sequence, '
                f"and {name} is not. Leave the key out."
            )
        if section.replan.enabled:
            raise ConfigError(
                f'"replan": {{"enabled": true}} moves tokens between the ranks of a replica, but {name} runs whole on '
                'every rank. "replan": {"report_only": true} names slow ranks; give each as many samples as it is fast '
                'by "micro_batch_size" in the schedule.'
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

    @property
    def training(self) -> bool:
        """Whether batches are trained on; see `ds_hetero.runtime.data.loading.sample_loader.Trainee`."""
        return self.model.training

    def give(self, batch: MicroBatchWeights | None) -> None:
        """The next loss will be of this micro-batch; None: of one that is not known."""
        self._batch, self._has_loss = batch, False

    def expect_used(self) -> None:
        """Refuse to go on while the micro-batch that was given last had no loss.

        Raises:
            StepError: it had none.
        """
        if self._batch is not None and not self._has_loss:
            raise StepError(f"a batch was left out: the next one was taken before engine.backward(loss). {REMEDY}")

    def batch_at(self, micro_step: int) -> MicroBatchWeights:
        """Return the micro-batch that a loss is of.

        Args:
            micro_step: of the engine's, since its last optimizer step.

        Raises:
            BatchError: it is not known, or belongs to another micro-step.
        """
        if self._batch is None:
            raise BatchError(
                f"{type(self.model).__name__} takes different batches on the ranks, and how many samples this one has "
                "is not known. Take batches from handle.dataloader(loader), and run one backward after another."
            )
        if self._batch.index != micro_step:
            raise StepError(
                f"this loss is of micro-batch {self._batch.index} of an optimizer step, but the engine is at "
                f"{micro_step}: a loop ended, or batches were taken ahead, amid an optimizer step. {REMEDY}"
            )
        self._has_loss = True
        return self._batch

    def note_scaled_loss(self) -> None:
        """A loss of the scale that the engine's average needs went into a backward."""
        self._has_run = False

    def end_step(self) -> bool:
        """Return whether the module ran with gradients and no loss came by; forget it."""
        has_run, self._has_run = self._has_run, False
        return has_run

    def change_replica(self, replica: Replica) -> None:
        """Go on under another schedule of the same rank."""
        self.replica = replica

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeModel:
        """Hooks of a copied model go on working; the replica is the same."""
        return self

    def _before(self, model: nn.Module, args: Any) -> None:
        """The hook that holds this object; the module is run as it is."""
        if self.loss_convention is None or not model.training or not torch.is_grad_enabled():
            return
        self._has_run = True
        if not self._is_checked:
            _expect_no_statistics(model)
            self._is_checked = True


def _expect_no_statistics(model: nn.Module) -> None:
    """Refuse layers whose result for a sample depends on the others of its micro-batch.

    Raises:
        ModelError: the module has batch normalization in training.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if names:
        raise ModelError(
            f"{names[0]} of {type(model).__name__} is {type(model.get_submodule(names[0])).__name__}: it normalizes by "
            "the micro-batch of its rank, and the ranks take different ones. Use nn.GroupNorm, freeze it by eval(), or "
            "give all replicas the same batches."
        )
