"""ZeRO-3 with parameters, gradients and optimizer state owned in proportion to weights.

DeepSpeed's optimizer works on the local shards of parameters, whatever their sizes, once it has them; the shards are
exchanged as soon as its parent object has made them. What is left to override is where it computes the place of a
shard from its size and the rank, or counts on all shards having one size: averaging gradients, gathering and setting
states, sub-groups, checkpoints. Methods with names like ``_DeepSpeedZeroOptimizer_Stage3__x`` are its private ones.

In a checkpoint the shards are again of one size, see `stage3_checkpoint`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401  see make_stage3_optimizer
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT, PARAM
from deepspeed.runtime.zero.config import get_zero_config
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.protocols import State, ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import equal_shards
from ds_hetero.frameworks.deepspeed.zero.stage3_saved import read_part
from ds_hetero.frameworks.deepspeed.zero.stage3_shards import (
    all_gather_shards,
    cut_of,
    is_weighted,
    own_shard,
    recut,
    reduce_to_owners,
)
from ds_hetero.sharding.zero_partition import cut_as_deepspeed, is_even


def check_stage3(ds_config: DsConfig) -> None:
    """Check that a configuration asks for nothing that needs shards of one size, on stage 3 alone.

    What no stage can do stands in `ds_hetero.frameworks.deepspeed.keys`.

    Raises:
        ConfigError: it does; names the setting.
    """
    if get_zero_config(ds_config).use_all_reduce_for_fetch_params:
        raise ConfigError(
            '"zero_partition" with unequal weights does not work on ZeRO stage 3 together with '
            "stage3_use_all_reduce_for_fetch_params, which needs shards of one size. Remove it, or set "
            '"zero_partition": "uniform".'
        )


def gather_experts_at_once(containers: Iterable[nn.Module]) -> None:
    """Let ZeRO-3 gather the experts of a layer as one, whichever of them the tokens of a rank choose.

    Otherwise it counts every call inside, plans later gathers by that count, and ranks whose tokens choose other
    experts wait for each other in different collectives. DeepSpeed does so itself for three classes of transformers.

    Args:
        containers: modules that hold all experts of a layer.
    """
    for container in containers:
        set_z3_leaf_module(container, True)


def make_stage3_optimizer(module: Any, *args: object, weights: Sequence[float], **kwargs: object) -> Any:
    """DeepSpeed's optimizer of stage 3 for equal weights, ours for others and for models that had others before.

    May stand in the place of DeepSpeed's class while an engine is built, since the one module that then would derive
    a class from it has been imported before.
    """
    if is_even(weights) and not any(map(is_weighted, module.parameters())):
        return DeepSpeedZeroOptimizer_Stage3(module, *args, **kwargs)
    return WeightedZeroOptimizer3(module, *args, weights=weights, **kwargs)


class _Start:
    """A rank in the one place where DeepSpeed uses it: multiplied by the size of its shard it is the shard's start."""

    def __init__(self, start: int) -> None:
        self._start = start

    def __rmul__(self, shard_size: int) -> int:
        return self._start


class WeightedZeroOptimizer3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """DeepSpeed's optimizer of stage 3 on weighted shards.

    Args:
        weights: positive, one per rank, as `check_weights` wants them.
        args: of `DeepSpeedZeroOptimizer_Stage3`.
        kwargs: of the same.
    """

    def __init__(
        self, module: Any, init_optimizer: Any, *args: object, weights: Sequence[float], **kwargs: object
    ) -> None:
        self.weights = tuple(weights)
        super().__init__(module, init_optimizer, *args, **kwargs)

    def initialize_ds_offload(self, **kwargs: object) -> Any:
        """DeepSpeed makes the parameters ZeRO-3's here, or finds them made; then their shards are exchanged."""
        offload = super().initialize_ds_offload(**kwargs)
        one_by_one = get_zero_config(kwargs["ds_config"]).allgather_sequential
        recut(offload.module.parameters(), self.weights, one_by_one=one_by_one)
        return offload

    # --- places that follow from sizes -----------------------------------------------------------------

    def _create_fp16_sub_groups(self, params_group: list[ZeroParameter]) -> list[list[Any]]:
        """The sub-groups of shards of one size: as many on every rank, and those of a checkpoint."""
        groups: list[list[Any]] = [[]]
        elements = 0
        for param in params_group:
            if self.sub_group_size is not None and elements >= self.sub_group_size:
                groups.append([])
                elements = 0
            groups[-1].append(param)
            elements += cut_as_deepspeed(param.ds_numel, self.partition_count).sizes[0]
        return groups

    def _get_param_partition_rank(self, param: ZeroParameter) -> _Start:
        return _Start(cut_of(param).cuts[dist.get_rank(group=param.ds_process_group)])

    # --- gradients -------------------------------------------------------------------------------------

    def _average_to_owners(self, params: list[ZeroParameter], communication_data_type: torch.dtype) -> list[Tensor]:
        """With ``reduce_scatter``: every rank is sent its shards alone."""
        grads = [param.grad.to(communication_data_type) for param in params]
        shards = reduce_to_owners(grads, [cut_of(param) for param in params], params[0].ds_process_group)
        return [shard.to(self.gradient_accumulation_dtype) for shard in shards]

    def _average_everywhere(self, bucket: Tensor, communication_data_type: torch.dtype) -> list[Tensor]:
        """Without ``reduce_scatter``: every rank is sent everything and keeps its shards."""
        params = self.ipg_buckets[communication_data_type].params
        group = params[0].ds_process_group
        average = bucket.to(communication_data_type).div_(dist.get_world_size(group=group))
        dist.all_reduce(average, group=group)
        grads = torch.split(average, [param.ds_numel for param in params])
        return [
            own_shard(grad, cut_of(param), group).to(self.gradient_accumulation_dtype)
            for grad, param in zip(grads, params, strict=True)
        ]

    _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = _average_to_owners
    _DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads = _average_everywhere

    # --- whole gradients and states --------------------------------------------------------------------

    def _fp32_state_allgather(self, param: ZeroParameter, fp32_state_partition: Tensor) -> Tensor:
        shard = fp32_state_partition.to(self.master_weights_and_grads_dtype)
        (flat,) = all_gather_shards([shard], [cut_of(param)], param.ds_process_group).wait()
        return flat[: param.ds_numel].view(param.ds_shape)

    def set_full_hp_param(self, value: Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """Set a master weight or, by key, an optimizer state of a parameter: [n]."""
        self.set_local_hp_param(own_shard(value, cut_of(param), param.ds_process_group), param, optim_state_key)

    def set_fp32_grad_for_param(self, value: Tensor, param: ZeroParameter) -> None:
        """Set the gradient of a parameter: [n]."""
        self.set_local_grad_for_param(own_shard(value, cut_of(param), param.ds_process_group), param)

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[Tensor, Any], Tensor], param_list: Sequence[ZeroParameter]
    ) -> None:
        """Replace every gradient by ``update_func(gradient, parameter)``, which sees it whole."""
        for param in param_list:
            if param.requires_grad:
                self.set_fp32_grad_for_param(update_func(self.get_fp32_grad_for_param(param), param), param)

    # --- checkpoints -----------------------------------------------------------------------------------

    def _rigid_state_dict(self) -> State:
        """State that this rank saves: shards of one size. All ranks call it together."""
        state_dict: State = super()._rigid_state_dict()
        flat_groups = state_dict[FP32_FLAT_GROUPS]
        state_dict[FP32_FLAT_GROUPS] = [
            equal_shards(flat.detach(), group) for flat, group in zip(flat_groups, self.fp16_groups, strict=True)
        ]
        of_optimizer = state_dict[OPTIMIZER_STATE_DICT]
        order = [index for group in of_optimizer["param_groups"] for index in group["params"]]
        state = {}
        for index, group in zip(order, self.fp16_groups, strict=True):
            state[index] = {
                name: equal_shards(value, group, name) if torch.is_tensor(value) and value.dim() else value
                for name, value in of_optimizer["state"].get(index, {}).items()
            }
        state_dict[OPTIMIZER_STATE_DICT] = {**of_optimizer, "state": {i: s for i, s in state.items() if s}}
        return state_dict

    def load_hp_checkpoint_state(self, folder: str, key: str, param: Any = None) -> Tensor:
        """This rank's shard of one state of one parameter in a universal checkpoint."""
        saved = torch.load(os.path.join(folder, f"{key}.pt"), weights_only=False)
        state = saved[PARAM] if isinstance(saved, Mapping) else saved
        return own_shard(state, cut_of(param), param.ds_process_group)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """As DeepSpeed, which has all sub-groups count steps in one tensor, and all groups take the first's options."""
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        for flat in self.fp32_partitioned_groups_flat:
            state = self.optimizer.state[flat]
            state["step"] = copy.deepcopy(state["step"])
        saved = read_part(os.path.join(checkpoint_dir, "zero", "optimizer_state.pt"))[OPTIMIZER_STATE_DICT]
        for group, options in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})
