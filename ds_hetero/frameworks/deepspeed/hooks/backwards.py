"""Several backwards for one optimizer step: exact by ZeRO 0 and 3, refused where ZeRO 1 and 2 would drop gradients.

ZeRO 1 and 2 put the gradients of the backward that ends an accumulation in the place of those that the optimizer is to
step on, so that a second such backward drops the first one's. ZeRO 3 tells a new backward from another phase of the one
before by a forward between them: of two backwards after two forwards it drops the first one's gradients, also while it
accumulates.
"""

from __future__ import annotations

from typing import Any

from ds_hetero.errors import StepError
from ds_hetero.frameworks.deepspeed.protocols import Engine


class BackwardsOfStep:
    """The backwards of one engine since its last step.

    Args:
        engine: DeepSpeed's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._are_averaged = False  # the gradients, for the step

    def begin(self) -> None:
        """A backward begins.

        Raises:
            StepError: it would drop the gradients of the one before.
        """
        stage = self._engine.zero_optimization_stage()
        if self._are_averaged and stage in (1, 2) and not self._engine.inside_no_sync_ctxt:
            raise StepError(
                f"a second backward without engine.step() between: with gradient_accumulation_steps="
                f"{self._engine.gradient_accumulation_steps()} the first has averaged the gradients for the step, and "
                f"on ZeRO stage {stage} the second would put its own in their place. Add the losses and call "
                "engine.backward once; or set gradient_accumulation_steps to the number of backwards and call "
                "engine.step() after each; or call them inside `with engine.coalesce_grad_reduction():`. To drop the "
                "gradients of the first, call engine.zero_grad()."
            )
        optimizer: Any = self._engine.optimizer
        if getattr(optimizer, "_epilogue_ran_this_backward", False):  # as DeepSpeed does when a forward begins
            optimizer.clear_backward_seen_flag()

    def end(self) -> None:
        """A backward has ended."""
        is_last = self._engine.is_gradient_accumulation_boundary() and not self._engine.inside_no_sync_ctxt
        self._are_averaged = self._are_averaged or is_last

    def forget(self) -> None:
        """The gradients have been used or dropped."""
        self._are_averaged = False
