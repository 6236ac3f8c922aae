"""ZeRO-3 with parameters, gradients and optimizer state owned in proportion to weights.

DeepSpeed's optimizer works on the local shards of parameters, whatever their sizes, once it has them; the shards are
exchanged as soon as its parent object has made them, with `Nodes` so that every node has all. The overrides compute the
place of a shard where DeepSpeed does it by size and rank, or counts on all shards having one size: averaging gradients,
gathering and setting states, sub-groups, checkpoints. Methods with names like ``_DeepSpeedZeroOptimizer_Stage3__x`` are
its private ones.

In a checkpoint the shards are again of one size, see `stage3_checkpoint`.

Dimension key: n elements of a parameter, s elements of this rank's shard.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT, PARAM
from deepspeed.runtime.zero.config import get_zero_config
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_hetero.frameworks.deepspeed.in_memory import read_part
from ds_hetero.frameworks.deepspeed.protocols import State, ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.equal_shards import equal_shards
from ds_hetero.frameworks.deepspeed.zero.nodes import Nodes, NodeSums
from ds_hetero.frameworks.deepspeed.zero.parameter_cut import cut_of, is_weighted, owning_group
from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import Gathering, reduce_to_owners
from ds_hetero.frameworks.deepspeed.zero.weighted_shards import recut, shard_of
from ds_hetero.sharding.zero_partition import cut_as_deepspeed, is_even


def forgetting_a_run(engine: Any) -> Callable[[], None]:
    """Return what lets ZeRO-3 forget a forward, and a backward of some parameters, that the engine did not call.

    Other stages keep nothing of it. Two things that it does count on runs being steps
    of training:

    * Its engine releases what modules without an input that takes gradients left gathered
      (`DeepSpeedZeroOptimizer_Stage3.backward_epilogue`; releases before 0.19 leave it).
    * It takes the order of modules for that of every following step, and keeps by module and place in that order what
      is released there (`__params_to_release`, a cache that is not emptied when the order turns out to be another).
      After another run, parameters stay gathered behind a module that the other run called again later.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None:
        return lambda: None

    def forget() -> None:
        if hasattr(offload, "release_backward_leftovers"):
            offload.release_backward_leftovers()
        coordinator = offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()

    return forget


def gather_experts_at_once(containers: Iterable[nn.Module]) -> None:
    """Let ZeRO-3 gather the experts of a layer as one, whichever of them the tokens of a rank choose.

    Otherwise it counts every call inside, plans later gathers by that count, and ranks whose tokens choose other
    experts wait for each other in different collectives. DeepSpeed does so itself for three classes of transformers.
    """
    for container in containers:
        set_z3_leaf_module(container, True)


def make_stage3_optimizer(
    module: Any, *args: object, weights: Sequence[float], nodes: Nodes | None = None, **kwargs: object
) -> Any:
    """DeepSpeed's optimizer of stage 3 for equal weights, ours for others and for models that had others before.

    May stand in the place of DeepSpeed's class while an engine is built, since the one module that then would derive
    a class from it has been imported before.
    """
    if nodes is None and is_even(weights) and not any(map(is_weighted, module.parameters())):
        return DeepSpeedZeroOptimizer_Stage3(module, *args, **kwargs)
    return WeightedZeroOptimizer3(module, *args, weights=weights, nodes=nodes, **kwargs)


class WeightedZeroOptimizer3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """DeepSpeed's optimizer of stage 3 on weighted shards.

    Args:
        weights: positive, one per rank, as `check_weights` wants them.
        nodes: each of which owns all parameters; None where the job owns them once.
    """

    def __init__(
        self,
        module: Any,
        init_optimizer: Any,
        *args: object,
        weights: Sequence[float],
        nodes: Nodes | None,
        **kwargs: object,
    ) -> None:
        self.weights, self.nodes = tuple(weights), nodes
        self._crossing = None if nodes is None else NodeSums(nodes)
        self._crossed: set[int] = set()  # ids of parameters whose gradients are sums over the nodes, or on their way
        super().__init__(module, init_optimizer, *args, **kwargs)

    def initialize_ds_offload(self, **kwargs: object) -> Any:
        """DeepSpeed makes the parameters ZeRO-3's here, or finds them made; then their shards are exchanged."""
        offload = super().initialize_ds_offload(**kwargs)
        one_by_one = get_zero_config(kwargs["ds_config"]).allgather_sequential
        recut(offload.module.parameters(), self.weights, self.nodes, one_by_one=one_by_one)
        return offload

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

    def _get_param_partition_group(self, param: ZeroParameter) -> ProcessGroup:
        return owning_group(param)

    def _average_to_owners(self, params: list[ZeroParameter], communication_data_type: torch.dtype) -> list[Tensor]:
        """With ``reduce_scatter``: every rank is sent its shards alone."""
        grads = [param.grad.to(communication_data_type) for param in params]
        ranks = dist.get_world_size(group=params[0].ds_process_group)
        shards = reduce_to_owners(grads, [cut_of(param) for param in params], owning_group(params[0]), ranks)
        return [shard.to(self.gradient_accumulation_dtype) for shard in shards]

    def _average_everywhere(self, bucket: Tensor, communication_data_type: torch.dtype) -> list[Tensor]:
        """Without ``reduce_scatter``: every rank is sent everything and keeps its shards."""
        params = self.ipg_buckets[communication_data_type].params
        average = bucket.to(communication_data_type).div_(dist.get_world_size(group=params[0].ds_process_group))
        dist.all_reduce(average, group=owning_group(params[0]))
        grads = zip(params, torch.split(average, [param.ds_numel for param in params]), strict=True)
        return [shard_of(param, grad).to(self.gradient_accumulation_dtype) for param, grad in grads]

    _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = _average_to_owners
    _DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads = _average_everywhere

    def partition_grads(self, params: list[ZeroParameter], shards: list[Tensor]) -> object:
        """Accumulate gradients of a micro-batch, which stay in the node; those of the last one set out for others."""
        self._take_back(params)
        buffers = super().partition_grads(params, shards)
        if self._is_at_boundary:
            self._set_out(params)
        return buffers

    @property
    def _is_at_boundary(self) -> bool:
        """Whether the step is to use the gradients of this backward; an attribute before DeepSpeed 0.19."""
        at_boundary: Any = self.is_gradient_accumulation_boundary
        return bool(at_boundary() if callable(at_boundary) else at_boundary)

    def _take_back(self, params: Iterable[ZeroParameter]) -> None:
        """Let gradients that have crossed take more of this node: the first node keeps the sums, others begin anew."""
        again = [param for param in params if param.ds_id in self._crossed]
        if self.nodes is None or self._crossing is None or not again:
            return
        self._crossing.finish()
        for param in again:
            self._crossed.remove(param.ds_id)
            if self.nodes.node > 0:
                self._gradient_of(param).zero_()

    def _set_out(self, params: Sequence[ZeroParameter]) -> None:
        if self._crossing is not None and params:
            self._crossing.start([self._gradient_of(param) for param in params], [param.ds_numel for param in params])
            self._crossed.update(param.ds_id for param in params)

    def _gradient_of(self, param: ZeroParameter) -> Tensor:
        """This rank's shard of the accumulated gradient of a parameter."""
        gradient: Tensor = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[param.ds_id]
        return gradient

    def _cross_nodes(self) -> None:
        """Add the gradients of all parameters up over nodes, before anybody looks at them."""
        if self._crossing is None:
            return
        params = [param for group in self.fp16_groups for param in group if param.requires_grad]
        with get_accelerator().stream(self.reduce_and_partition_stream):
            self._set_out([param for param in params if param.ds_id not in self._crossed])
            self._crossing.finish()
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()

    def _get_fp32_grad_state_partition(self, *args: object, **kwargs: object) -> object:
        self._cross_nodes()
        return super()._get_fp32_grad_state_partition(*args, **kwargs)

    def step(self, *args: object, **kwargs: object) -> None:
        """Train as DeepSpeed does, which does not clear gradients: a parameter without one would cross again."""
        self._cross_nodes()
        super().step(*args, **kwargs)
        if self.nodes is not None:
            self.grad_partitions_flat_buffer.zero_()
            self._crossed.clear()

    def _get_norm_groups(self) -> list[Tensor]:
        """The norms of sub-groups; nodes add their parts up in other orders, and all take those of the first."""
        norms: list[Tensor] = super()._get_norm_groups()
        if self.nodes is None:
            return norms
        stacked = torch.stack(norms)
        dist.broadcast(stacked, 0, group=self.dp_process_group)
        return list(stacked)

    def _fp32_state_allgather(self, param: ZeroParameter, fp32_state_partition: Tensor) -> Tensor:
        shard = fp32_state_partition.to(self.master_weights_and_grads_dtype)
        (flat,) = Gathering([shard], [cut_of(param)], owning_group(param)).wait()
        return flat[: param.ds_numel].view(param.ds_shape)

    def set_full_hp_param(self, value: Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """Set a master weight or, by key, an optimizer state of a parameter: [n]."""
        self.set_local_hp_param(shard_of(param, value), param, optim_state_key)

    def set_fp32_grad_for_param(self, value: Tensor, param: ZeroParameter) -> None:
        """Set the gradient of a parameter: [n]."""
        self.set_local_grad_for_param(shard_of(param, value), param)

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[Tensor, Any], Tensor], param_list: Sequence[ZeroParameter]
    ) -> None:
        """Replace every gradient by ``update_func(gradient, parameter)``, which sees it whole."""
        for param in param_list:
            if param.requires_grad:
                self.set_fp32_grad_for_param(update_func(self.get_fp32_grad_for_param(param), param), param)

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
        """This rank's shard of one state of a parameter in a universal checkpoint, whose folder has its name."""
        if param is None:  # DeepSpeed 0.18
            param = next(param for param, name in self.param_names.items() if name == os.path.basename(folder))
        saved = torch.load(os.path.join(folder, f"{key}.pt"), weights_only=False)
        state = saved[PARAM] if isinstance(saved, Mapping) else saved
        return shard_of(param, state)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """As DeepSpeed, which has all sub-groups count steps in one tensor, and all groups take the first's options."""
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        for flat in self.fp32_partitioned_groups_flat:
            state = self.optimizer.state[flat]
            state["step"] = copy.deepcopy(state["step"])
        saved = read_part(os.path.join(checkpoint_dir, "zero", "optimizer_state.pt"))[OPTIMIZER_STATE_DICT]
        for group, options in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})
