"""Gradients of earlier steps that ZeRO-3 keeps for parameters without a gradient in this one: they are zeros.

ZeRO-3 keeps this rank's shards of gradients in one buffer that is never cleared: the first backward of a step copies
its gradients over those of the step before, the others add theirs. A parameter that the first backward does not reach
(an expert without a token, the head of another task) still has the gradient of an earlier step there. That one enters
the norm, and with it the clipping of all others; it is stepped by; and a later micro-batch adds its own to it. On one
process, and on ZeRO 0 to 2, it is zeros or None.

Here the parts of such parameters are cleared as the first backward of a step ends. Where every parameter has a gradient
nothing is written.

Where the optimizer is offloaded, DeepSpeed gives it the gradients that the last backward of a step has reached. Those
that an earlier micro-batch alone has reached are given to it here, and refused on releases before 0.19, which have no
function for it.

    DeepSpeedZeroOptimizer_Stage3              here
    partition_grads(params, ...)               these have gradients of the step that runs
    independent_gradient_partition_epilogue    a backward, or a phase of one, has ended: clear the others, if it is the
                                               first of the step
    _pre_step, zero_grad                       what comes next is another step
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
from ds_hetero.frameworks.deepspeed.protocols import Engine, ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.boundary import is_at_boundary

# Private names of the optimizer; the last three are looked for, since releases before 0.19 do not have them.
_SHARDS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
_GIVE, _GIVEN = "_offload_grad_partition_at_boundary", "_offload_boundary_param_ids"
_SWAP_OUT = "_swap_out_offload_fp32_gradients"


def clear_stale_gradients(engine: Engine) -> None:
    """Let ZeRO-3 have zeros for what the first backward of a step does not reach; other stages are left alone."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        _Freshness(engine.optimizer, {getattr(p, "ds_id", None): name for name, p in engine.module.named_parameters()})


class _Freshness:
    """Which parameters of an optimizer have gradients of the step that runs, and which have older ones.

    Args:
        names: of parameters, by ds_id.
    """

    def __init__(self, optimizer: Any, names: Mapping[int | None, str]) -> None:
        self._optimizer, self._names = optimizer, names
        self._fresh: dict[int, ZeroParameter] = {}  # with a gradient of the step that runs, by ds_id
        self._stale: dict[int, ZeroParameter] = {}  # with one of a step before
        self._reached: set[int] = set()  # by the backward that runs
        self._given: set[int] = set()  # by a backward of the last micro-batch, of which a script may run several
        # Whether the release has the function that gives an offloaded optimizer a gradient.
        self._can_give = optimizer.offload_optimizer and hasattr(optimizer, _GIVE)
        self._partition = optimizer.partition_grads
        self._end_backward = optimizer.independent_gradient_partition_epilogue
        self._begin_step, self._forget = optimizer._pre_step, optimizer.zero_grad
        optimizer.partition_grads = self._note
        optimizer.independent_gradient_partition_epilogue = self._clear
        optimizer._pre_step = self._begin_next
        optimizer.zero_grad = self._drop

    def _note(self, params: Sequence[ZeroParameter], shards: Sequence[Tensor]) -> object:
        for param in params:
            self._fresh[param.ds_id] = param
            self._reached.add(param.ds_id)
            self._stale.pop(param.ds_id, None)
        if self._optimizer.offload_optimizer and is_at_boundary(self._optimizer):
            self._given.update(param.ds_id for param in params)
        return self._partition(params, shards)

    def _clear(self) -> None:
        """End a backward: the gradients of a step before go, where this one has none.

        Raises:
            StepError: gradients of this step would not be stepped by; on every rank, which reach the same parameters.
        """
        self._end_backward()
        optimizer, stale = self._optimizer, list(self._stale.values())
        missed = [param for ds_id, param in self._fresh.items() if ds_id not in self._reached]
        self._stale, self._reached = {}, set()
        missed = missed if optimizer.offload_optimizer and is_at_boundary(optimizer) else []
        if not self._can_give:
            if left_out := [param for param in missed if param.ds_id not in self._given]:
                raise StepError(self._not_given(left_out))
            missed = []
        if not stale and not missed:
            return
        with get_accelerator().stream(optimizer.reduce_and_partition_stream), torch.no_grad():
            for param in stale:
                self._clear_parts_of(param)
            self._give_to_optimizer(missed)
        if not get_accelerator().resolves_data_dependency():
            optimizer.reduce_and_partition_stream.synchronize()

    def _not_given(self, params: Sequence[ZeroParameter]) -> str:
        names = sorted(self._names.get(param.ds_id, str(param.ds_id)) for param in params)
        return (
            f"{len(names)} parameters, such as {names[0]}, have gradients of an earlier micro-batch of this step and "
            f"none of its last one. ZeRO-3 of DeepSpeed {deepspeed.__version__} with offload_optimizer drops them. "
            "Install deepspeed>=0.19.8,<0.20, leave offload_optimizer out, or set gradient_accumulation_steps to 1."
        )

    def _give_to_optimizer(self, params: Sequence[ZeroParameter]) -> None:
        """As ``partition_grads`` does with what the last backward reaches."""
        optimizer = self._optimizer
        if not params:
            return
        gradients: dict[int, list[Tensor]] = {}
        offsets: dict[int, list[int]] = {}
        for param in params:
            if param.ds_id in getattr(optimizer, _GIVEN):  # of which this rank has elements
                shard = self._shard_of(param).to(get_accelerator().current_device_name())
                getattr(optimizer, _GIVE)(param, shard, gradients, offsets)
        getattr(optimizer, _SWAP_OUT)(gradients, offsets)

    def _shard_of(self, param: ZeroParameter) -> Tensor:
        """Of the accumulated gradient."""
        shard: Tensor = getattr(self._optimizer, _SHARDS)[param.ds_id]
        return shard

    def _clear_parts_of(self, param: ZeroParameter) -> None:
        optimizer = self._optimizer
        self._shard_of(param).zero_()
        group, start, count = optimizer.grad_position[optimizer.get_param_id(param)]
        if optimizer.offload_optimizer and not optimizer._swappable_optimizer_subgroup(group):
            flat = optimizer.fp32_partitioned_groups_flat[group]
            if flat.grad is not None:  # another copy of the gradients, that the step is made of
                flat.grad.narrow(0, start, count).zero_()

    def _begin_next(self) -> None:
        self._begin_step()
        self._age()

    def _drop(self, *args: Any, **kwargs: Any) -> None:
        self._forget(*args, **kwargs)
        self._age()

    def _age(self) -> None:
        """What has been fresh is of a step before from here on."""
        self._stale |= self._fresh
        self._fresh, self._given = {}, set()
