"""Interface of a model that is split over the sequence; the adapter of transformers makes such models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ds_hetero.engine.trained.batch_placement import BatchPlacement
from ds_hetero.engine.trained.sequence_losses import SequenceLosses
from ds_hetero.engine.trained.shard_evaluation import ShardEvaluation
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.data.shards import Batch
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks import ComparisonPace
from ds_hetero.runtime.step_clock import StepClock
from ds_hetero.values.section import RingGradients


class BatchChecks(Protocol):
    """The self-check: compares a split model with one process on pieces of the batches that the model trains on."""

    def is_due(self, batch: Batch) -> bool:
        """Return whether a comparison on a batch of the wrapped loader could find something new."""

    def check_batches_of_ranks(self, batches: Sequence[Batch]) -> None:
        """Compare on batches of this rank. Caller: every rank of the world. Raises `ModelError`: results differ."""

    def check_same_batch(self, batch: Batch) -> None:
        """Compare on a batch that all ranks of the replica have, if `is_due`. Raises `ModelError`: results differ."""

    def check_again(self) -> None:
        """Repeat the last comparison, since the model may have changed. Raises `ModelError`: results differ."""


class ModelLoss(Protocol):
    """The loss that a split model computes itself."""

    @property
    def moves_labels(self) -> bool:
        """Whether a token predicts the label of the next token; otherwise it predicts its own label."""

    @property
    def takes_shifted_labels(self) -> bool:
        """Whether the model's forward takes ``shift_labels``."""

    @property
    def shifts_labels_itself(self) -> bool:
        """Whether the model's own loss shifts labels, which on a shard are shifted already; ours then replaces it."""

    @property
    def custom_function(self) -> str:
        """Name of the loss function that the script gave the model; empty for cross entropy of tokens."""

    @property
    def class_with_own_forward(self) -> str:
        """Name of the model's class if it is the script's, whose forward may compute another loss; else empty."""

    def router_term(self, outputs: Any) -> Tensor | float:
        """Return the auxiliary loss of the routers, which the model adds to the mean loss of its tokens."""


class SplitModel(Protocol):
    """A model that is split over the sequence, so that a forward computes this rank's shard of a batch."""

    model: nn.Module
    replica: Replica
    kernel: str | None  # attention kernel that the section requests; None for the best on the device
    clock: StepClock  # times the phases of its steps
    losses: SequenceLosses  # state and checks of its losses in a step
    placement: BatchPlacement
    evaluation: ShardEvaluation
    checks: BatchChecks
    pace: ComparisonPace  # when a piece of a batch is compared again
    keeps_attention: bool  # whether the recomputation of checkpointed layers takes the attention of their first run
    ring_gradients: RingGradients  # type in which partial dK/dV travel between the groups of a ring
    is_restored: bool  # True after `restore`

    @property
    def model_loss(self) -> ModelLoss:
        """The loss that the model computes itself."""

    @property
    def takes_shards(self) -> bool:
        """Whether a forward without a cache takes a shard at the moment."""

    @property
    def is_split(self) -> bool:
        """Whether sequences are split; otherwise every replica is one rank, which runs whole batches."""

    @property
    def trains_now(self) -> bool:
        """Whether a forward would now run in training mode and with gradients."""

    @property
    def pools(self) -> bool:
        """Whether the head pools over the sequence, so that only sharded calls can split it."""

    @property
    def cuts_inputs(self) -> bool:
        """Whether forwards take whole sequences, of which the model shards the decoder's inputs: models with towers."""

    def expect_tokenwise(self) -> None:
        """Check that the model can take shards. Raises `ModelError`: its head pools over the sequence."""

    def complete(self, batch: Any) -> Any:
        """Return a whole batch, with ``position_ids`` if the model computes them by a rule of its own."""

    def tile(self, tokens: int) -> None:
        """Compute MLPs and losses of shards in tiles of ``tokens`` tokens."""

    def record_batches(self, observers: Sequence[Callable[[BatchLayout], None]]) -> None:
        """Call ``observers`` with the layout of every batch from now on."""

    def change_replica(self, replica: Replica) -> None:
        """Use another schedule of the same ranks from now on."""

    def restore(self) -> None:
        """Undo everything that was changed in the model."""
