"""DeepSpeed's optimizer of ZeRO stage 3 with shards in proportion to weights.

DeepSpeed cuts every parameter evenly, and its optimizer works on the local shards, whatever their size. So `recut`
exchanges the even shards for weighted ones as soon as DeepSpeed has cut the parameters. With ``"zero_within"``, see
`Nodes`, every node has all parameters, cut between its own ranks; gradients are added up over the nodes once a step.

Example: a parameter of 10 elements on ranks of weights 3, 1, 1 is cut into 6, 2, 2, where DeepSpeed cuts 4, 4, 2 and
pads the last one.

`WeightedZeroOptimizer3` replaces the methods that compute where a shard begins from its size and rank, or that need
shards of equal size. Names like ``_DeepSpeedZeroOptimizer_Stage3__x`` are DeepSpeed's private methods.

    at the start     initialize_ds_offload, _create_fp16_sub_groups
    in a backward    _average_to_owners or _average_everywhere, then partition_grads; with nodes, _start_node_sums
    in a step        _finish_node_sums, then _get_norm_groups and DeepSpeed's own step on the local shards
    from the script  the functions that get or set a whole gradient or state of a parameter
    in checkpoints   _rigid_state_dict, which saves equal shards, see `stage3_checkpoint`

Dimension key: n elements of a parameter, s elements of this rank's shard.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT, PARAM
from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
from deepspeed.runtime.zero.config import get_zero_config
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_hetero.engine.patching import Function, Patches, around
from ds_hetero.frameworks.deepspeed.in_memory import read_part
from ds_hetero.frameworks.deepspeed.protocols import State, ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.boundary import is_at_boundary
from ds_hetero.frameworks.deepspeed.zero.equal_shards import equal_shards
from ds_hetero.frameworks.deepspeed.zero.nodes import Nodes, NodeSums
from ds_hetero.frameworks.deepspeed.zero.parameter_cut import cut_of, is_weighted, owning_group
from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import Gathering, reduce_to_owners
from ds_hetero.frameworks.deepspeed.zero.weighted_shards import recut, shard_of
from ds_hetero.runtime.experts.parts import WHOLE_SHAPE
from ds_hetero.sharding.zero_partition import cut_as_deepspeed, is_even


def make_run_eraser(engine: Any) -> Callable[[], None]:
    """Return a function that clears ZeRO-3's records of a forward and backward that ran outside the engine.

    Such a run (a probe of the model, for example) is not a step of training, but ZeRO-3 would treat it as a step in two
    places. Other ZeRO stages record nothing, and the function does nothing for them.

    * Parameters of modules whose inputs take no gradients are still gathered after a backward. The engine releases
      them (``DeepSpeedZeroOptimizer_Stage3.backward_epilogue``, since 0.19), but only after its own backward.
    * ZeRO-3 expects modules in the order of the run before, and caches which parameters to release after each of them
      (``__params_to_release``). The cache stays when the order changes. After a run with another order, a parameter
      would stay gathered after a module that the other run called once more later.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None:
        return lambda: None

    def erase_run() -> None:
        if hasattr(offload, "release_backward_leftovers"):
            offload.release_backward_leftovers()
        coordinator = offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()

    return erase_run


def add_squares_elsewhere(optimizer: Any, squares: Callable[[], float]) -> None:
    """Let an optimizer of stage 3 count gradients that another optimizer steps on in its norm, and so in its clipping.

    Args:
        squares: returns the sum of their squares, the same on every rank.
    """
    norms_of_partitions = optimizer._get_norm_groups

    def norms() -> list[Tensor]:
        norms: list[Tensor] = norms_of_partitions()
        return [*norms, norms[0].new_tensor(squares() ** 0.5 * float(optimizer.loss_scale))]

    optimizer._get_norm_groups = norms


def gather_only_partitioned(patches: Patches) -> None:
    """Let ZeRO-3 gather and release only parameters that it has partitioned, not experts that are divided among ranks.

    ``iter_params`` lists the parameters of a module for that, and expects that all are partitioned.
    """
    for module in (partitioned_param_coordinator, parameter_offload):
        patches.replace(module, "iter_params", around(_without_parts))


def _without_parts(stock: Function, *args: object, **kwargs: object) -> Iterator[Any]:
    """Replace ``iter_params``: leave out parameters of which every rank has another part."""
    return (parameter for parameter in stock(*args, **kwargs) if not hasattr(parameter, WHOLE_SHAPE))


def gather_experts_at_once(containers: Iterable[nn.Module]) -> None:
    """Let ZeRO-3 gather all experts of a layer together, whichever of them a rank's tokens choose.

    Otherwise ZeRO-3 gathers the experts that are called, and ranks whose tokens choose different experts wait for each
    other in different collectives. DeepSpeed itself does the same for three classes of transformers.

    Args:
        containers: modules that have the experts of a layer.
    """
    for container in containers:
        set_z3_leaf_module(container, True)


def make_stage3_optimizer(
    module: Any, *args: object, weights: Sequence[float], nodes: Nodes | None = None, **kwargs: object
) -> Any:
    """Make the optimizer of stage 3: ours for unequal weights or a model with weighted shards, else DeepSpeed's.

    While an engine is built, this function replaces DeepSpeed's class in its module. That is safe since the one module
    that derives another class from it is imported before.
    """
    if nodes is None and is_even(weights) and not any(map(is_weighted, module.parameters())):
        return DeepSpeedZeroOptimizer_Stage3(module, *args, **kwargs)
    return WeightedZeroOptimizer3(module, *args, weights=weights, nodes=nodes, **kwargs)


class WeightedZeroOptimizer3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """DeepSpeed's optimizer of stage 3 on weighted shards.

    Args:
        weights: positive numbers, one per rank; see `check_weights`.
        nodes: nodes that each own all parameters; None if all ranks of the job own them together.
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
        self._node_sums = None if nodes is None else NodeSums(nodes)
        # ds_ids of parameters whose gradients are sums over the nodes already, or are being added up.
        self._summed_ids: set[int] = set()
        super().__init__(module, init_optimizer, *args, **kwargs)

    def initialize_ds_offload(self, **kwargs: object) -> Any:
        """Let DeepSpeed cut the parameters evenly, unless ``zero.Init`` has done so; then exchange the shards."""
        offload = super().initialize_ds_offload(**kwargs)
        one_by_one = getattr(get_zero_config(kwargs["ds_config"]), "allgather_sequential", False)  # not in 0.18.4
        recut(offload.module.parameters(), self.weights, self.nodes, one_by_one=one_by_one)
        return offload

    def _create_fp16_sub_groups(self, params_group: list[ZeroParameter]) -> list[list[Any]]:
        """Split parameters into sub-groups of at most ``sub_group_size`` elements plus one parameter.

        The elements are those of equal shards, so that all ranks, and jobs with other weights, make the same groups.
        """
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
        """Average gradients by a reduce-scatter, if ``reduce_scatter`` is set: [n] each -> this rank's shards, [s]."""
        grads = [param.grad.to(communication_data_type) for param in params]
        num_ranks = dist.get_world_size(group=params[0].ds_process_group)
        shards = reduce_to_owners(grads, [cut_of(param) for param in params], owning_group(params[0]), num_ranks)
        return [shard.to(self.gradient_accumulation_dtype) for shard in shards]

    def _average_everywhere(self, bucket: Tensor, communication_data_type: torch.dtype) -> list[Tensor]:
        """Average gradients by an all-reduce, if ``reduce_scatter`` is not set; return this rank's shards: [s] each."""
        params = self.ipg_buckets[communication_data_type].params
        average = bucket.to(communication_data_type).div_(dist.get_world_size(group=params[0].ds_process_group))
        dist.all_reduce(average, group=owning_group(params[0]))
        grads = zip(params, torch.split(average, [param.ds_numel for param in params]), strict=True)
        return [shard_of(param, grad).to(self.gradient_accumulation_dtype) for param, grad in grads]

    _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = _average_to_owners
    _DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads = _average_everywhere

    def partition_grads(self, params: list[ZeroParameter], shards: list[Tensor]) -> object:
        """Accumulate the gradients of a micro-batch; if it is the last one, start to add them up over the nodes."""
        self._resume_accumulation(params)
        buffers = super().partition_grads(params, shards)
        if is_at_boundary(self):
            self._start_node_sums(params)
        return buffers

    def _resume_accumulation(self, params: Iterable[ZeroParameter]) -> None:
        """Prepare gradients that are already sums over the nodes for the gradients of a further backward.

        A script may run several backwards of the last micro-batch. The first node keeps its sums and the other nodes
        begin at zero, so that the next sum over the nodes counts every gradient once.
        """
        summed = [param for param in params if param.ds_id in self._summed_ids]
        if self.nodes is None or self._node_sums is None or not summed:
            return
        self._node_sums.finish()
        for param in summed:
            self._summed_ids.remove(param.ds_id)
            if self.nodes.node > 0:
                self._gradient_shard(param).zero_()

    def _start_node_sums(self, params: Sequence[ZeroParameter]) -> None:
        """Start to add this rank's gradient shards of ``params`` up over the nodes."""
        if self._node_sums is None or not params:
            return
        shards = [self._gradient_shard(param) for param in params]
        self._node_sums.start(shards, [param.ds_numel for param in params])
        self._summed_ids.update(param.ds_id for param in params)

    def _gradient_shard(self, param: ZeroParameter) -> Tensor:
        """Return this rank's shard of the accumulated gradient of a parameter."""
        gradient: Tensor = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[param.ds_id]
        return gradient

    def _finish_node_sums(self) -> None:
        """Add the gradients of all parameters up over the nodes, and wait for the sums.

        This is called before a norm, a step or the script reads the gradients.
        """
        if self._node_sums is None:
            return
        params = [param for group in self.fp16_groups for param in group if param.requires_grad]
        # On the stream that wrote the gradients: a collective waits for the stream that it is called on.
        with get_accelerator().stream(self.reduce_and_partition_stream):
            self._start_node_sums([param for param in params if param.ds_id not in self._summed_ids])
            self._node_sums.finish()
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()

    def _get_fp32_grad_state_partition(self, *args: object, **kwargs: object) -> object:
        self._finish_node_sums()
        return super()._get_fp32_grad_state_partition(*args, **kwargs)

    def step(self, *args: object, **kwargs: object) -> None:
        """Take DeepSpeed's step on gradients that are added up over the nodes."""
        self._finish_node_sums()
        super().step(*args, **kwargs)
        if self.nodes is not None:
            # DeepSpeed overwrites gradients in the next backward. If a parameter has no gradient there, its sum of this
            # step would stay, and would be added up over the nodes once more.
            self.grad_partitions_flat_buffer.zero_()
            self._summed_ids.clear()

    def _get_norm_groups(self) -> list[Tensor]:
        """Return the gradient norm of each sub-group.

        With nodes, all ranks get the norms of rank 0: each node adds squares up in another order, so that the last bits
        of its norms, and then the clipping, would differ.
        """
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
        """Set a parameter's fp32 master weight, or its optimizer state ``optim_state_key``, from a full tensor [n]."""
        self.set_local_hp_param(shard_of(param, value), param, optim_state_key)

    def set_fp32_grad_for_param(self, value: Tensor, param: ZeroParameter) -> None:
        """Set the gradient of a parameter from the full gradient [n]; this rank keeps its shard."""
        self.set_local_grad_for_param(shard_of(param, value), param)

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[Tensor, Any], Tensor], param_list: Sequence[ZeroParameter]
    ) -> None:
        """Replace each parameter's gradient by ``update_func(gradient, parameter)``; gradients are full tensors [n]."""
        for param in param_list:
            if param.requires_grad:
                gradient = update_func(self.get_fp32_grad_for_param(param), param)
                self.set_fp32_grad_for_param(gradient, param)

    def _rigid_state_dict(self) -> State:
        """Return the state that this rank saves, in shards of equal size.

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
                if torch.is_tensor(value) and value.dim():  # a count of steps has no dimensions, and is not cut
                    state[name] = equal_shards(value, group, name)
            if state:
                state_by_number[number] = state
        state_dict[OPTIMIZER_STATE_DICT] = {**optimizer_dict, "state": state_by_number}
        return state_dict

    def load_hp_checkpoint_state(self, folder: str, key: str, param: Any = None) -> Tensor:
        """Return this rank's shard of one state of a parameter, [s], from a universal checkpoint.

        Args:
            folder: the parameter's folder in the checkpoint, which has the parameter's name.
            key: name of the state, such as ``exp_avg``.
            param: the parameter; DeepSpeed 0.18 does not pass it.
        """
        if param is None:  # DeepSpeed 0.18
            param = next(param for param, name in self.param_names.items() if name == os.path.basename(folder))
        saved = torch.load(os.path.join(folder, f"{key}.pt"), weights_only=False)
        state = saved[PARAM] if isinstance(saved, Mapping) else saved
        return shard_of(param, state)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Load a universal checkpoint, and repair two faults of DeepSpeed's method.

        DeepSpeed's method lets all sub-groups count steps in one tensor, so that each of them adds to the count of all.
        And it gives all parameter groups the options (such as the learning rate) of the first group.
        """
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        for flat in self.fp32_partitioned_groups_flat:
            state = self.optimizer.state[flat]
            state["step"] = copy.deepcopy(state["step"])
        saved = read_part(os.path.join(checkpoint_dir, "zero", "optimizer_state.pt"))[OPTIMIZER_STATE_DICT]
        for group, options in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in options.items() if name != "params"})
