"""Find the micro-batch that a loss was computed from, for a module that runs whole on every rank.

The weight of a loss depends on the samples of its micro-batch, but a loss does not name its micro-batch. So loaders
announce micro-batches: one before each forward (`MicroBatchOrder.give`), or, in transformers' Trainer, all of an
optimizer step before the first (`MicroBatchOrder.give_step`). The engine calls `MicroBatchOrder.use` when it weighs a
loss, before the backward.

    state      the next loss belongs to             transitions
    unknown    an unknown micro-batch               give, give_step    -> awaited
    awaited    the announced micro-batch            use                -> used
    used       it has been weighed                  end_backward       -> awaited, if others of the step follow
                                                    give, give_step    -> awaited
                                                    give(None)         -> unknown

Two mistakes of loops are found. A loop that leaves out a backward requests the next batch in the state "awaited". A
loop that ends in the middle of an optimizer step, or requests batches ahead, uses a micro-batch whose index in the step
is not the number of backwards so far.
"""

from __future__ import annotations

from ds_hetero.errors import BatchError, StepError
from ds_hetero.runtime.data.sample_loader import MicroBatchCounts
from ds_hetero.runtime.peers.calls import REMEDY


class MicroBatchOrder:
    """The micro-batch that the next loss belongs to, and those that follow in its optimizer step.

    Args:
        name: name of the module's class, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._batch: MicroBatchCounts | None = None  # None: unknown
        self._is_used = False  # whether its loss has been weighed
        self._following: list[MicroBatchCounts] = []
        self._steps_done = 0  # optimizer steps of the engine at the latest call of `micro_step`
        self._num_backwards = 0  # backwards since the latest optimizer step

    @property
    def latest(self) -> MicroBatchCounts:
        """The micro-batch that was announced last; it must be known."""
        assert self._batch is not None
        return self._batch

    @property
    def only_fills_up(self) -> bool:
        """Whether the latest micro-batch is a copy that only fills up an optimizer step, and counts no samples."""
        return self._batch is not None and not any(self._batch.counts)

    def give(self, batch: MicroBatchCounts | None) -> None:
        """Announce the micro-batch of the next loss; None if it is unknown."""
        self._batch = batch
        self._is_used = False
        self._following = []

    def give_step(self, batches: list[MicroBatchCounts]) -> None:
        """Announce the micro-batches of the next losses, one after another."""
        self.give(batches[0] if batches else None)
        self._following = batches[1:]

    def use(self, micro_step: int) -> MicroBatchCounts:
        """Return the micro-batch of a loss that is being weighed.

        Args:
            micro_step: number of earlier backwards in the optimizer step, see `micro_step`.

        Raises:
            BatchError: the micro-batch is unknown.
            StepError: its index in the step is not ``micro_step``.
        """
        if self._batch is None:
            raise BatchError(
                f"{self._name} takes different batches on the ranks, and how many samples this one has "
                "is not known. Take batches from handle.dataloader(loader), or from a loader that was given to "
                "accelerator.prepare together with the model, and run one backward for each batch."
            )
        if self._batch.index != micro_step:
            raise StepError(
                f"this loss is of micro-batch {self._batch.index} of an optimizer step, but the engine is at "
                f"{micro_step}: a loop ended in the middle of an optimizer step, or requested batches ahead. {REMEDY}"
            )
        self._is_used = True
        return self._batch

    def end_backward(self) -> None:
        """Go on to the next micro-batch of the optimizer step, after the backward of a loss."""
        self._num_backwards += 1
        if self._following:
            self._batch = self._following.pop(0)
            self._is_used = False

    def expect_used(self) -> None:
        """Check that the loss of the announced batch was weighed. Raises `StepError`: its backward was left out."""
        if self._batch is not None and not self._is_used:
            raise StepError(f"a batch was left out: the next one was taken before engine.backward(loss). {REMEDY}")

    def micro_step(self, steps_done: int) -> int:
        """Return the number of backwards since the latest optimizer step.

        Args:
            steps_done: optimizer steps that the engine has done.
        """
        if steps_done != self._steps_done:
            self._steps_done = steps_done
            self._num_backwards = 0
        return self._num_backwards
