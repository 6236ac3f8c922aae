"""Clear gradients of earlier steps, which ZeRO-3 keeps for parameters that have no gradient in this step.

ZeRO-3 keeps this rank's shards of gradients in one buffer that it never clears: the first backward of a step writes
over the gradients of the step before, later ones add to them. A parameter that the first backward does not reach (an
expert without a token, the head of another task) still has its gradient of an earlier step there. This stale gradient
would enter the norm, and so the clipping of all others; the optimizer would step by it; and a later micro-batch would
add to it. In one process, and on ZeRO 0 to 2, this gradient is zeros or None.

So the shards of such parameters are set to zero at the end of the first backward of a step. If every parameter has a
gradient, nothing is written.

DeepSpeed has a second fault with an offloaded optimizer: it hands over only the gradients of parameters that the last
backward of a step has reached. Gradients that only an earlier micro-batch has made are handed over here. Releases
before 0.19.5 have no function for that, so with them the step is refused.

    method of DeepSpeedZeroOptimizer_Stage3    meaning for this module
    partition_grads(params, ...)               these parameters have gradients of the running step
    independent_gradient_partition_epilogue    a backward, or a phase of one, has ended: after the first one of a step,
                                               clear the gradients of all other parameters
    _pre_step, zero_grad                       the next backward belongs to another step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from ds_hetero.errors import StepError
from ds_hetero.frameworks.deepspeed.names import HAND_OVER
from ds_hetero.frameworks.deepspeed.protocols import Engine, ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.boundary import is_at_boundary

# Private names of the optimizer. Releases before 0.19.5 have neither the last two nor `HAND_OVER`.
_SHARDS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
_HANDED_IDS = "_offload_boundary_param_ids"  # ds_ids of parameters with elements on this rank
_SWAP_OUT = "_swap_out_offload_fp32_gradients"


def clear_stale_gradients(engine: Engine) -> None:
    """Set ZeRO-3's gradients to zero for parameters without a gradient in a step. Does nothing on other stages."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        names = {getattr(parameter, "ds_id", None): name for name, parameter in engine.module.named_parameters()}
        _GradientTracker(engine.optimizer, names)


class _GradientTracker:
    """Tracks which parameters have gradients of the running step (fresh), and which of an earlier one (stale).

    Args:
        optimizer: DeepSpeed's optimizer of stage 3, four methods of which are replaced.
        names: names of parameters, by ds_id.
    """

    def __init__(self, optimizer: Any, names: Mapping[int | None, str]) -> None:
        self._optimizer, self._names = optimizer, names
        self._fresh: dict[int, ZeroParameter] = {}  # by ds_id
        self._stale: dict[int, ZeroParameter] = {}  # by ds_id
        self._reached: set[int] = set()  # ds_ids of parameters that the running backward has reached
        # ds_ids of parameters that a backward of the last micro-batch has reached; a script may run several of these.
        self._handed_over: set[int] = set()
        self._can_hand_over = optimizer.offload_optimizer and hasattr(optimizer, HAND_OVER)
        self._stock_partition_grads = optimizer.partition_grads
        self._stock_epilogue = optimizer.independent_gradient_partition_epilogue
        self._stock_pre_step = optimizer._pre_step
        self._stock_zero_grad = optimizer.zero_grad
        optimizer.partition_grads = self._partition_grads
        optimizer.independent_gradient_partition_epilogue = self._end_backward
        optimizer._pre_step = self._pre_step
        optimizer.zero_grad = self._zero_grad

    def _partition_grads(self, params: Sequence[ZeroParameter], shards: Sequence[Tensor]) -> object:
        """Replace ``partition_grads``: record that these parameters have gradients of the running step."""
        for param in params:
            self._fresh[param.ds_id] = param
            self._reached.add(param.ds_id)
            self._stale.pop(param.ds_id, None)
        if self._optimizer.offload_optimizer and is_at_boundary(self._optimizer):
            self._handed_over.update(param.ds_id for param in params)
        return self._stock_partition_grads(params, shards)

    def _end_backward(self) -> None:
        """Replace ``independent_gradient_partition_epilogue``: clear stale gradients, and hand missed ones over.

        Raises:
            StepError: DeepSpeed would drop gradients of this step; on every rank, since all reach the same parameters.
        """
        self._stock_epilogue()
        optimizer = self._optimizer
        stale = list(self._stale.values())
        missed: list[ZeroParameter] = []  # with fresh gradients that DeepSpeed has not handed to an offloaded optimizer
        if optimizer.offload_optimizer and is_at_boundary(optimizer):
            missed = [param for ds_id, param in self._fresh.items() if ds_id not in self._reached]
        self._stale, self._reached = {}, set()
        if not self._can_hand_over:
            dropped = [param for param in missed if param.ds_id not in self._handed_over]
            if dropped:
                raise StepError(self._dropped_text(dropped))
            missed = []
        if not stale and not missed:
            return
        with get_accelerator().stream(optimizer.reduce_and_partition_stream), torch.no_grad():
            for param in stale:
                self._clear_gradient(param)
            self._hand_over(missed)
        if not get_accelerator().resolves_data_dependency():
            optimizer.reduce_and_partition_stream.synchronize()

    def _dropped_text(self, params: Sequence[ZeroParameter]) -> str:
        """Return the error message for a step of which DeepSpeed would drop gradients."""
        names = sorted(self._names.get(param.ds_id, str(param.ds_id)) for param in params)
        return (
            f"{len(names)} parameters, such as {names[0]}, have gradients of an earlier micro-batch of this step and "
            f"none of its last one. ZeRO-3 of DeepSpeed {deepspeed.__version__} with offload_optimizer drops them. "
            "Install deepspeed>=0.19.5, leave offload_optimizer out, or set gradient_accumulation_steps to 1."
        )

    def _hand_over(self, params: Sequence[ZeroParameter]) -> None:
        """Hand gradients to the offloaded optimizer, as ``partition_grads`` does after the last backward."""
        optimizer = self._optimizer
        if not params:
            return
        gradients: dict[int, list[Tensor]] = {}
        offsets: dict[int, list[int]] = {}
        for param in params:
            if param.ds_id in getattr(optimizer, _HANDED_IDS):
                shard = self._gradient_shard(param).to(get_accelerator().current_device_name())
                getattr(optimizer, HAND_OVER)(param, shard, gradients, offsets)
        getattr(optimizer, _SWAP_OUT)(gradients, offsets)

    def _gradient_shard(self, param: ZeroParameter) -> Tensor:
        """Return this rank's shard of the accumulated gradient of a parameter."""
        shard: Tensor = getattr(self._optimizer, _SHARDS)[param.ds_id]
        return shard

    def _clear_gradient(self, param: ZeroParameter) -> None:
        """Set this rank's shard of a gradient to zero, and the copy of it that an offloaded optimizer steps by."""
        optimizer = self._optimizer
        self._gradient_shard(param).zero_()
        group, start, count = optimizer.grad_position[optimizer.get_param_id(param)]
        if optimizer.offload_optimizer and not optimizer._swappable_optimizer_subgroup(group):
            flat = optimizer.fp32_partitioned_groups_flat[group]
            if flat.grad is not None:
                flat.grad.narrow(0, start, count).zero_()

    def _pre_step(self) -> None:
        """Replace ``_pre_step``: the next backward belongs to another step."""
        self._stock_pre_step()
        self._end_step()

    def _zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Replace ``zero_grad``: the next backward belongs to another step."""
        self._stock_zero_grad(*args, **kwargs)
        self._end_step()

    def _end_step(self) -> None:
        """Count all gradients as stale: the next backward belongs to another step."""
        self._stale |= self._fresh
        self._fresh, self._handed_over = {}, set()
