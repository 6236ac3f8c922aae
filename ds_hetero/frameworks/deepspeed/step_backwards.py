"""Several backwards for one optimizer step: refuse those that would drop gradients.

DeepSpeed expects one backward for each micro-batch. With more of them:

    ZeRO 0      exact
    ZeRO 1, 2   the backward that ends an accumulation writes its averaged gradients over those that the optimizer would
                step by, so that a second such backward drops the gradients of the first: refused
    ZeRO 3      DeepSpeed takes a second backward for another phase of the first one, unless a forward is between them.
                After two forwards and two backwards it would drop the gradients of the first. `BackwardsOfStep` tells
                it at each backward that a new one begins, so that the result is exact
"""

from __future__ import annotations

from typing import Any

from ds_hetero.errors import StepError
from ds_hetero.frameworks.deepspeed.protocols import Engine


class BackwardsOfStep:
    """Follows the backwards of one engine since its last step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._are_averaged = False  # whether a backward has averaged the gradients for the step

    def begin(self) -> None:
        """Check a backward before it runs. Raises `StepError`: it would drop the gradients of an earlier backward."""
        stage = self._engine.zero_optimization_stage()
        if self._are_averaged and stage in (1, 2) and not self._engine.inside_no_sync_ctxt:
            raise StepError(
                f"a second backward without engine.step() between: with gradient_accumulation_steps="
                f"{self._engine.gradient_accumulation_steps()} the first has averaged the gradients for the step, and "
                f"on ZeRO stage {stage} the second would write its own over them. Add the losses and call "
                "engine.backward once; or set gradient_accumulation_steps to the number of backwards and call "
                "engine.step() after each; or call them inside `with engine.coalesce_grad_reduction():`. To drop the "
                "gradients of the first, call engine.zero_grad()."
            )
        optimizer: Any = self._engine.optimizer
        if getattr(optimizer, "_epilogue_ran_this_backward", False):  # DeepSpeed does so at the beginning of a forward
            optimizer.clear_backward_seen_flag()

    def end(self) -> None:
        """Note, after a backward, whether it has averaged the gradients for the step."""
        is_last = self._engine.is_gradient_accumulation_boundary() and not self._engine.inside_no_sync_ctxt
        self._are_averaged = self._are_averaged or is_last

    def end_step(self) -> None:
        """Note that the optimizer has used the gradients, or that the script has dropped them."""
        self._are_averaged = False
