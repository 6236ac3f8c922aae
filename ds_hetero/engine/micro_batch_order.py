"""Order of the micro-batches of a module that runs whole: which one the next loss is of.

A loader gives one micro-batch before each forward (`MicroBatchOrder.give`); transformers' Trainer draws all of an
optimizer step first (`MicroBatchOrder.give_step`). The engine asks for the micro-batch where it weighs a loss, before
the backward.

    state      the next loss is of                 left by
    unknown    nothing that is known               give, give_step    -> awaited
    awaited    the micro-batch that was given      use                -> used
    used       that one, whose loss was weighed    end_backward       -> awaited, if others of the step follow
                                                   give, give_step    -> awaited
                                                   give(None)         -> unknown

A loop that leaves out a backward takes the next batch in the state "awaited". A loop that ends amid an optimizer step,
or takes batches ahead, weighs a loss whose micro-batch has another index than the engine's micro-step.
"""

from __future__ import annotations

from ds_hetero.errors import BatchError, StepError
from ds_hetero.runtime.data.sample_loader import MicroBatchWeights
from ds_hetero.runtime.peers.calls import REMEDY


class MicroBatchOrder:
    """The micro-batch that the next loss is of, and those that follow in its optimizer step.

    Args:
        name: of the module's class, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._batch: MicroBatchWeights | None = None  # None: unknown
        self._is_used = False
        self._following: list[MicroBatchWeights] = []
        self._steps_done = 0  # optimizer steps of the engine when backwards were counted last
        self._num_backwards = 0  # since then

    @property
    def latest(self) -> MicroBatchWeights:
        """The micro-batch that was given last; it must be known."""
        assert self._batch is not None
        return self._batch

    @property
    def only_fills_up(self) -> bool:
        """Whether the micro-batch that was given last has no sample of its own, and fills an optimizer step up."""
        return self._batch is not None and not any(self._batch.counts)

    def give(self, batch: MicroBatchWeights | None) -> None:
        """Note that the next loss will be of this micro-batch; None: of an unknown one."""
        self._batch = batch
        self._is_used = False
        self._following = []

    def give_step(self, batches: list[MicroBatchWeights]) -> None:
        """Note that the next losses will be of these micro-batches, one after another."""
        self.give(batches[0] if batches else None)
        self._following = batches[1:]

    def use(self, micro_step: int) -> MicroBatchWeights:
        """Return the micro-batch of a loss that is weighed.

        Args:
            micro_step: backwards of the optimizer step before this one, see `micro_step`.

        Raises:
            BatchError: the micro-batch is unknown.
            StepError: the micro-batch is that of another micro-step.
        """
        if self._batch is None:
            raise BatchError(
                f"{self._name} takes different batches on the ranks, and how many samples this one has "
                "is not known. Take batches from handle.dataloader(loader), or from a loader that was given to "
                "accelerator.prepare together with the model, and run one backward after another."
            )
        if self._batch.index != micro_step:
            raise StepError(
                f"this loss is of micro-batch {self._batch.index} of an optimizer step, but the engine is at "
                f"{micro_step}: a loop ended, or batches were taken ahead, amid an optimizer step. {REMEDY}"
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
        """Refuse to take another batch while the one before has had no backward. Raises `StepError`."""
        if self._batch is not None and not self._is_used:
            raise StepError(f"a batch was left out: the next one was taken before engine.backward(loss). {REMEDY}")

    def micro_step(self, steps_done: int) -> int:
        """Return the backwards since the latest optimizer step, of which the engine has done ``steps_done``."""
        if steps_done != self._steps_done:
            self._steps_done = steps_done
            self._num_backwards = 0
        return self._num_backwards
