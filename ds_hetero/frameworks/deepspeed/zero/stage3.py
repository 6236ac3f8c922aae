"""ZeRO-3 with parameters, gradients and optimizer state owned in proportion to weights.

DeepSpeed's optimizer works on the local shards of parameters, of any size, once it has them. So the shards are made
unequal (`recut`) right after DeepSpeed has cut the parameters evenly; with `Nodes` every node holds all parameters.
Example: a parameter of 10 elements on ranks of weights 3, 1, 1 is cut into 6, 2, 2, where DeepSpeed cuts 4, 4, 2 and
pads the last one.

The methods below replace those that compute the place of a shard from its size and rank, or count on shards of one
size. Names like ``_DeepSpeedZeroOptimizer_Stage3__x`` are DeepSpeed's private methods.

    at the start     initialize_ds_offload, _create_fp16_sub_groups
    in a backward    _average_to_owners or _average_everywhere, then partition_grads; with nodes, _set_out
    in a step        _cross_nodes, then _get_norm_groups and DeepSpeed's own step on the local shards
    from outside     gradients and states of a parameter, read and set whole
    in checkpoints   shards of one size again, see `stage3_checkpoint`

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
from ds_hetero.frameworks.deepspeed.zero.boundary import is_at_boundary
from ds_hetero.frameworks.deepspeed.zero.equal_shards import equal_shards
from ds_hetero.frameworks.deepspeed.zero.nodes import Nodes, NodeSums
from ds_hetero.frameworks.deepspeed.zero.parameter_cut import cut_of, is_weighted, owning_group
from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import Gathering, reduce_to_owners
from ds_hetero.frameworks.deepspeed.zero.weighted_shards import recut, shard_of
from ds_hetero.sharding.zero_partition import cut_as_deepspeed, is_even


def forgetting_a_run(engine: Any) -> Callable[[], None]:
    """Return a function that lets ZeRO-3 forget a forward and a backward that ran past its engine.

    ZeRO-3 takes every run for a step of training, in two places; other stages keep nothing of a run:

    * After a backward its engine releases parameters that are still gathered, of modules whose inputs take no
      gradients (`DeepSpeedZeroOptimizer_Stage3.backward_epilogue`; releases before 0.19 do not).
    * It expects the modules in the order of the run before, and caches which parameters are released at each place
      (``__params_to_release``). The cache stays when the order changes: after another run, parameters stay gathered
      behind a module that the other run called again later.
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
    """Let ZeRO-3 gather all experts of a layer at once, whichever of them the tokens of a rank choose.

    Otherwise ZeRO-3 plans later gathers by the experts that were called, and ranks whose tokens choose different
    experts wait for each other in different collectives. DeepSpeed itself does so for three classes of transformers.
    """
    for container in containers:
        set_z3_leaf_module(container, True)


def make_stage3_optimizer(
    module: Any, *args: object, weights: Sequence[float], nodes: Nodes | None = None, **kwargs: object
) -> Any:
    """Return DeepSpeed's optimizer of stage 3 for equal weights; ours for others, and for a model that is cut already.

    While an engine is built, this function may stand in the place of DeepSpeed's class: the one module that derives
    another class from it has been imported before.
    """
    if nodes is None and is_even(weights) and not any(map(is_weighted, module.parameters())):
        return DeepSpeedZeroOptimizer_Stage3(module, *args, **kwargs)
    return WeightedZeroOptimizer3(module, *args, weights=weights, nodes=nodes, **kwargs)


class WeightedZeroOptimizer3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """DeepSpeed's optimizer of stage 3 on weighted shards.

    Args:
        weights: positive, one per rank, as `check_weights` wants them.
        nodes: each of them owns all parameters; None where all ranks of the job own them together.
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
        """Cut the parameters evenly as DeepSpeed does, unless ``zero.Init`` has; then exchange shards by weights."""
        offload = super().initialize_ds_offload(**kwargs)
        one_by_one = get_zero_config(kwargs["ds_config"]).allgather_sequential
        recut(offload.module.parameters(), self.weights, self.nodes, one_by_one=one_by_one)
        return offload

    def _create_fp16_sub_groups(self, params_group: list[ZeroParameter]) -> list[list[Any]]:
        """Group parameters as if shards had one size: every rank then has as many groups, the same as a checkpoint."""
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
        """Average with ``reduce_scatter``, where every rank receives its own shards only: [n] each -> [s] each."""
        grads = [param.grad.to(communication_data_type) for param in params]
        ranks = dist.get_world_size(group=params[0].ds_process_group)
        shards = reduce_to_owners(grads, [cut_of(param) for param in params], owning_group(params[0]), ranks)
        return [shard.to(self.gradient_accumulation_dtype) for shard in shards]

    def _average_everywhere(self, bucket: Tensor, communication_data_type: torch.dtype) -> list[Tensor]:
        """Average without ``reduce_scatter``, where every rank receives all and keeps its shards: [s] each."""
        params = self.ipg_buckets[communication_data_type].params
        average = bucket.to(communication_data_type).div_(dist.get_world_size(group=params[0].ds_process_group))
        dist.all_reduce(average, group=owning_group(params[0]))
        grads = zip(params, torch.split(average, [param.ds_numel for param in params]), strict=True)
        return [shard_of(param, grad).to(self.gradient_accumulation_dtype) for param, grad in grads]

    _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = _average_to_owners
    _DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads = _average_everywhere

    def partition_grads(self, params: list[ZeroParameter], shards: list[Tensor]) -> object:
        """Accumulate the gradients of a micro-batch in the node; after the last one, send them to the other nodes."""
        self._take_back(params)
        buffers = super().partition_grads(params, shards)
        if is_at_boundary(self):
            self._set_out(params)
        return buffers

    def _take_back(self, params: Iterable[ZeroParameter]) -> None:
        """Let gradients that are sums over the nodes take another gradient of this node.

        The first node keeps the sums, the others begin at zero, so that the next crossing counts every gradient once.
        """
        again = [param for param in params if param.ds_id in self._crossed]
        if self.nodes is None or self._crossing is None or not again:
            return
        self._crossing.finish()
        for param in again:
            self._crossed.remove(param.ds_id)
            if self.nodes.node > 0:
                self._gradient_of(param).zero_()

    def _set_out(self, params: Sequence[ZeroParameter]) -> None:
        """Begin to add these gradients up over the nodes."""
        if self._crossing is None or not params:
            return
        shards = [self._gradient_of(param) for param in params]
        self._crossing.start(shards, [param.ds_numel for param in params])
        self._crossed.update(param.ds_id for param in params)

    def _gradient_of(self, param: ZeroParameter) -> Tensor:
        """Return this rank's shard of the accumulated gradient of a parameter."""
        gradient: Tensor = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[param.ds_id]
        return gradient

    def _cross_nodes(self) -> None:
        """Add the gradients of all parameters up over nodes, before the norm, the step or a caller reads them."""
        if self._crossing is None:
            return
        params = [param for group in self.fp16_groups for param in group if param.requires_grad]
        # On the stream that wrote the gradients: a collective waits for the stream that it is called on.
        with get_accelerator().stream(self.reduce_and_partition_stream):
            self._set_out([param for param in params if param.ds_id not in self._crossed])
            self._crossing.finish()
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()

    def _get_fp32_grad_state_partition(self, *args: object, **kwargs: object) -> object:
        self._cross_nodes()
        return super()._get_fp32_grad_state_partition(*args, **kwargs)

    def step(self, *args: object, **kwargs: object) -> None:
        """Take DeepSpeed's step on gradients that are added up over the nodes."""
        self._cross_nodes()
        super().step(*args, **kwargs)
        if self.nodes is not None:
            # DeepSpeed overwrites gradients in the next backward; of a parameter that gets none there, the sum of this
            # step would cross again.
            self.grad_partitions_flat_buffer.zero_()
            self._crossed.clear()

    def _get_norm_groups(self) -> list[Tensor]:
        """Return the norms of sub-groups, the first node's on all: each node adds its parts up in another order."""
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
        """Set a master weight of a parameter, or an optimizer state by its key, from the whole tensor: [n]."""
        self.set_local_hp_param(shard_of(param, value), param, optim_state_key)

    def set_fp32_grad_for_param(self, value: Tensor, param: ZeroParameter) -> None:
        """Set the gradient of a parameter from the whole tensor: [n]."""
        self.set_local_grad_for_param(shard_of(param, value), param)

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[Tensor, Any], Tensor], param_list: Sequence[ZeroParameter]
    ) -> None:
        """Replace every gradient by ``update_func(gradient, parameter)``, which is given whole gradients: [n]."""
        for param in param_list:
            if param.requires_grad:
                gradient = update_func(self.get_fp32_grad_for_param(param), param)
                self.set_fp32_grad_for_param(gradient, param)

    def _rigid_state_dict(self) -> State:
        """Return the state that this rank saves, in shards of one size.

        Caller: every rank of the job.
        Collectives: see `equal_shards`, once for each tensor.
        """
        state_dict: State = super()._rigid_state_dict()
        shards = []
        for flat, group in zip(state_dict[FP32_FLAT_GROUPS], self.fp16_groups, strict=True):
            shards.append(equal_shards(flat.detach(), group))
        state_dict[FP32_FLAT_GROUPS] = shards

        optimizer_dict = state_dict[OPTIMIZER_STATE_DICT]
        # torch numbers the flat tensors, of which each holds one sub-group, through all parameter groups.
        numbers = [number for group in optimizer_dict["param_groups"] for number in group["params"]]
        state_by_number = {}
        for number, group in zip(numbers, self.fp16_groups, strict=True):
            state = dict(optimizer_dict["state"].get(number, {}))
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim():  # a count of steps has no dimension, and no shards
                    state[name] = equal_shards(value, group, name)
            if state:
                state_by_number[number] = state
        state_dict[OPTIMIZER_STATE_DICT] = {**optimizer_dict, "state": state_by_number}
        return state_dict

    def load_hp_checkpoint_state(self, folder: str, key: str, param: Any = None) -> Tensor:
        """Read this rank's shard of one state of a parameter from a universal checkpoint.

        Args:
            folder: of the parameter; it has the parameter's name.
            key: name of the state.
            param: the parameter; DeepSpeed 0.18 does not give it.
        """
        if param is None:  # DeepSpeed 0.18
            param = next(param for param, name in self.param_names.items() if name == os.path.basename(folder))
        saved = torch.load(os.path.join(folder, f"{key}.pt"), weights_only=False)
        state = saved[PARAM] if isinstance(saved, Mapping) else saved
        return shard_of(param, state)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Load a universal checkpoint, and mend two things that DeepSpeed's own method does.

        It lets all sub-groups count steps in one tensor, so that each of them adds to the count of all; and it gives
        all parameter groups the options of the first.
        """
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        for flat in self.fp32_partitioned_groups_flat:
            state = self.optimizer.state[flat]
            state["step"] = copy.deepcopy(state["step"])
        saved = read_part(os.path.join(checkpoint_dir, "zero", "optimizer_state.pt"))[OPTIMIZER_STATE_DICT]
        for group, options in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})
