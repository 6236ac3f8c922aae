"""ZeRO-3 with parameters, gradients and optimizer state owned in proportion to weights.

DeepSpeed's optimizer works on the local shards of parameters, whatever their sizes, once it has them; the shards are
exchanged as soon as its parent object has made them, with `Nodes` so that every node has all. What is left to override
is where it computes the place of a shard from its size and the rank, or counts on all shards having one size: averaging
gradients, gathering and setting states, sub-groups, checkpoints. Methods with names like
``_DeepSpeedZeroOptimizer_Stage3__x`` are its private ones.

In a checkpoint the shards are again of one size, see `stage3_checkpoint`.

DeepSpeed cuts every parameter into shards of one size, and this is left so wherever a parameter is made: by
``deepspeed.zero.Init``, by transformers' ``from_pretrained``, or when the engine takes a plain model over. `recut`
then exchanges the shards for weighted ones and gives every parameter its cut, on which everything else here depends;
parameters without one stay DeepSpeed's, also in one call with others.

Key: n elements of a parameter, s elements of this rank's shard; cut.total >= n, see `cut_parameter`.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import deepspeed.runtime.superoffload.superoffload_stage3  # see make_stage3_optimizer
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT, PARAM
from deepspeed.runtime.zero.config import get_zero_config
from deepspeed.runtime.zero.partition_parameters import (
    ZeroParamStatus,
    assert_ints_same_as_other_ranks,
    get_allgather_dtype,
)
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import set_z3_leaf_module
from packaging.specifiers import SpecifierSet
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.errors import CheckpointError, ConfigError
from ds_hetero.frameworks.deepspeed.in_memory import read_part
from ds_hetero.frameworks.deepspeed.names import WHOLE
from ds_hetero.frameworks.deepspeed.protocols import State, ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.nodes import Nodes, NodeSums, chunks, start_exchange, write
from ds_hetero.runtime.backends import gathers_unequal_parts
from ds_hetero.sharding.zero_partition import FlatGroup, Move, cut_as_deepspeed, cut_parameter, is_even, moves
from ds_hetero.values.section import SECTION
from ds_hetero.values.splits import Split

_CUT, _GROUP = "ds_hetero_cut", "ds_hetero_owners"


def is_weighted(param: ZeroParameter) -> bool:
    """Whether `recut` gave a parameter its shards; else they are DeepSpeed's."""
    return hasattr(param, _CUT)


def cut_of(param: ZeroParameter) -> Split:
    """How a ZeRO-3 parameter is cut now, by `recut` or by DeepSpeed."""
    if is_weighted(param):
        cut: Split = getattr(param, _CUT)
        return cut
    return cut_as_deepspeed(param.ds_numel, dist.get_world_size(group=param.ds_process_group))


def owning_group(param: ZeroParameter) -> ProcessGroup:
    """The ranks that a parameter is cut for: those of this node with `Nodes`, else its ``ds_process_group``."""
    group: ProcessGroup = getattr(param, _GROUP, param.ds_process_group)
    return group


def recut(
    params: Iterable[ZeroParameter], weights: Sequence[float], nodes: Nodes | None = None, *, one_by_one: bool = False
) -> None:
    """Exchange DeepSpeed's shards of ``params`` for shards in proportion to ``weights``.

    Caller: every rank, with the same parameters in the same order, none of them gathered.
    Collectives: one all-gather per parameter; no more than one is whole at a time.

    Args:
        weights: positive, one per rank.
        nodes: each of which is to own all parameters.
        one_by_one: have later gathers take one parameter at a time (``stage3_allgather_sequential``).

    Raises:
        ConfigError: a parameter that is partitioned over other ranks than all, as experts are.
    """
    for param in params:
        num_ranks = dist.get_world_size(group=param.ds_process_group)
        if num_ranks != len(weights):
            raise ConfigError(
                f'"zero_partition" has {len(weights)} weights, but a parameter of shape {tuple(param.ds_shape)} is '
                f'partitioned over {num_ranks} ranks, as experts are. Set "zero_partition": "uniform".'
            )
        param.all_gather()
        equal = param.ds_tensor
        setattr(param, _CUT, cut_parameter(param.ds_numel, weights if nodes is None else nodes.own_weights))
        setattr(param, _GROUP, param.ds_process_group if nodes is None else nodes.group)
        shard: Any = shard_of(param, param.data.detach()).to(equal.device, copy=True)
        if get_accelerator().is_pinned(equal):
            shard = get_accelerator().pin_memory(shard)
        shard.ds_numel = shard.numel()
        shard.status, shard.final_location = equal.status, equal.final_location
        param.ds_tensor = shard
        param.ds_numel_aligned = cut_of(param).total
        param.partition_numel = functools.partial(_shard_size, param)
        param.all_gather_coalesced = functools.partial(_gather, one_by_one=one_by_one)
        param.partition()


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


class _ShardSize(int):
    """Elements of a shard, also in the one place where DeepSpeed multiplies them by the rank to find the shard's start.

    It skips the gradients of shards that are padding alone; with start 0 those are zeros that are copied.
    """

    def __mul__(self, rank: int) -> int:
        return 0


def _shard_size(param: ZeroParameter) -> int:
    return _ShardSize(param.ds_tensor.ds_numel)


def shard_of(param: ZeroParameter, full: Tensor) -> Tensor:
    """This rank's shard of a value for every element of a parameter: [n] -> [s]."""
    return own_shard(full, cut_of(param), owning_group(param))


def own_shard(full: Tensor, cut: Split, group: ProcessGroup) -> Tensor:
    """This rank's shard of a full tensor of n elements: [s], zeros where the cut goes beyond n."""
    start, stop = cut.ranges[dist.get_rank(group=group)]
    flat = full.reshape(-1)[start:stop]
    return flat if flat.numel() == stop - start else torch.cat([flat, flat.new_zeros(stop - start - flat.numel())])


def parameter_moves(numel: int, source: Split, target: Split, part: int) -> tuple[Move, ...]:
    """How to put ``part`` of the cut ``target`` of a parameter together from the parts of the cut ``source``."""
    before, after = (FlatGroup(starts=(0,), sizes=(numel,), cut=cut) for cut in (source, target))
    return moves(before, after, part)


class Gathering:
    """Several tensors of one type under way, of which every rank holds a shard; the shards of a rank lie side by side.

        shards   [s] each
        result   of ``wait()``: [n] each, still with the padding that its cut has

    Collectives: one all_gather_into_tensor where all ranks hold as much. Where they do not, one all_gather of a list
        on NCCL, which runs it as a batch of broadcasts, and one broadcast per rank on gloo, all under way at once. A
        rank sends its shards of all tensors in one message either way. None on one rank.
    """

    def __init__(self, shards: Sequence[Tensor], cuts: Sequence[Split], group: ProcessGroup) -> None:
        self._cuts = cuts
        rank, device = dist.get_rank(group=group), get_accelerator().current_device_name()
        self._alone = [shard.detach().to(device, copy=True) for shard in shards if len(cuts[0].sizes) == 1]
        if self._alone:
            return
        sizes = [sum(parts) for parts in zip(*(cut.sizes for cut in cuts), strict=True)]
        self._flat = torch.empty(sum(sizes), dtype=shards[0].dtype, device=device)
        self._by_rank = torch.split(self._flat, sizes)
        torch.cat([shard.detach().to(device) for shard in shards], out=self._by_rank[rank])
        if len(set(sizes)) == 1:
            works = [dist.all_gather_into_tensor(self._flat, self._by_rank[rank], group=group, async_op=True)]
        elif gathers_unequal_parts(group):
            works = [dist.all_gather(list(self._by_rank), self._by_rank[rank], group=group, async_op=True)]
        else:
            works = [
                dist.broadcast(part, dist.get_global_rank(group, owner), group=group, async_op=True)
                for owner, part in enumerate(self._by_rank)
            ]
        self._works = works

    def wait(self) -> list[Tensor]:
        """The tensors, whole and flat. One alone is not copied."""
        if self._alone:
            return self._alone
        for work in self._works:
            work.wait()
        if not get_accelerator().is_synchronized_device():
            self._flat.record_stream(get_accelerator().current_stream())
        if len(self._cuts) == 1:
            return [self._flat]
        shards = zip(
            *(torch.split(part, [cut.sizes[rank] for cut in self._cuts]) for rank, part in enumerate(self._by_rank)),
            strict=True,
        )
        return [torch.cat(parts) for parts in shards]


class _ParameterGathering:
    """Parameters under way, as DeepSpeed's coordinator handles them: ``wait`` is called for each of them."""

    def __init__(self, batches: list[tuple[list[Any], Gathering]]) -> None:
        self._batches = batches

    def wait(self, handle_dependency: bool = True) -> None:
        """Give every parameter its data; the first call waits, others find it done."""
        for params, batch_gathering in self._batches:
            for param, flat in zip(params, batch_gathering.wait(), strict=True):
                param.data = flat[: param.ds_numel].view(param.ds_shape).to(param.ds_tensor.dtype)
                param.ds_status = ZeroParamStatus.AVAILABLE
        self._batches = []


def _gather(
    params: Iterable[ZeroParameter], safe_mode: bool = False, quantize: bool = False, *, one_by_one: bool
) -> _ParameterGathering:
    """Start gathering weighted parameters that are not available; see `Gathering`.

    Takes the place of ``all_gather_coalesced`` of a parameter. Sorted, so that ranks may list them in any order.
    """
    params = sorted(params, key=lambda param: param.ds_id)
    for param in params:
        if param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
            raise RuntimeError(param.ds_summary())
        param.ds_status = ZeroParamStatus.INFLIGHT
    if safe_mode:
        assert_ints_same_as_other_ranks([param.ds_id for param in params])
    by_type: dict[Any, list[Any]] = {}
    for param in params:
        dtype = get_allgather_dtype(param, param.ds_tensor)
        by_type.setdefault((param.ds_id if one_by_one else id(owning_group(param)), dtype), []).append(param)
    return _ParameterGathering(
        [
            (
                batch,
                Gathering(
                    [param.ds_tensor.to(dtype) for param in batch],
                    [cut_of(param) for param in batch],
                    owning_group(batch[0]),
                ),
            )
            for (_, dtype), batch in by_type.items()
        ]
    )


def reduce_to_owners(grads: Sequence[Tensor], cuts: Sequence[Split], group: ProcessGroup, divisor: int) -> list[Tensor]:
    """Add up whole gradients over the ranks and divide them, each rank receiving its shards: [n] each -> [s] each.

    Collectives: one reduce_scatter_tensor where all ranks own as much; else one reduce_scatter of a list, which NCCL
        and gloo run as one reduce per rank, all at once. A rank receives its shards of all gradients in one message.
        None on one rank.
    """
    rank, num_ranks = dist.get_rank(group=group), dist.get_world_size(group=group)
    if num_ranks == 1:
        return [grad.reshape(-1).div(divisor) for grad in grads]
    pieces = [
        torch.split(_padded(grad.reshape(-1), cut.total), list(cut.sizes))
        for grad, cut in zip(grads, cuts, strict=True)
    ]
    flat = torch.cat([parts[owner] for owner in range(num_ranks) for parts in pieces]).div_(divisor)
    sizes = [sum(cut.sizes[owner] for cut in cuts) for owner in range(num_ranks)]
    by_rank = list(torch.split(flat, sizes))
    received = torch.empty_like(by_rank[rank])
    if len(set(sizes)) == 1:
        dist.reduce_scatter_tensor(received, flat, group=group)
    else:
        dist.reduce_scatter(received, by_rank, group=group)
    return list(torch.split(received, [cut.sizes[rank] for cut in cuts]))


def _padded(flat: Tensor, size: int) -> Tensor:
    return flat if flat.numel() == size else torch.cat([flat, flat.new_zeros(size - flat.numel())])


def check_stage3(ds_config: DsConfig) -> None:
    """Refuse settings of stage 3 that need shards of one size. Raises `ConfigError`: names the setting.

    What no stage can do stands in `ds_hetero.frameworks.deepspeed.keys`.
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
    """
    for container in containers:
        set_z3_leaf_module(container, True)


def check_nodes(ds_config: DsConfig) -> None:
    """Refuse settings that keep shards from lying inside nodes. Raises `ConfigError`: it names the setting."""
    zero = get_zero_config(ds_config)
    refused = {
        f"DeepSpeed {deepspeed.__version__} (it needs {WHOLE})": deepspeed.__version__ not in SpecifierSet(WHOLE),
        f"ZeRO stage {int(zero.stage)}": zero.stage != 3,
        "offload_optimizer": zero.offload_optimizer is not None,
        "offload_param": zero.offload_param is not None,
        '"elastic"': ds_config[SECTION].get("elastic") is not None,
    }
    if against := [name for name, is_set in refused.items() if is_set]:
        raise ConfigError(
            f'"zero_within" copies the shards of ZeRO stage 3 across nodes, and does not work with '
            f"{' and '.join(against)}. Remove one of them."
        )


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


def equal_shards(flat: Tensor, params: Sequence[ZeroParameter], name: str = "weights") -> Tensor:
    """Exchange weighted shards of parameters, lying side by side, for shards of one size, on the CPU.

        flat     [sum of s]
        result   [sum of ceil(n / ranks)], the ends padded with zeros

    Caller: every rank, with the same parameters.
    Collectives: one all_to_all_single for each of `chunks`; of copies in every node, inside the node.

    Raises:
        CheckpointError: ``flat`` is no such thing, as with optimizers that quantize their state by blocks.
    """
    rank = dist.get_rank(group=owning_group(params[0]))
    sizes = [cut_of(param).sizes[rank] for param in params]
    if flat.numel() != sum(sizes):
        raise CheckpointError(
            f'the optimizer\'s "{name}" has {flat.numel()} values for {sum(sizes)} elements of parameters, so its '
            'shards cannot be exchanged. Use another optimizer, or set "zero_partition": "uniform".'
        )
    shards = torch.split(flat.reshape(-1), sizes)
    done: list[Tensor] = []
    for chunk in chunks([param.ds_numel for param in params]):
        done += _equal_shards(shards[chunk], params[chunk])
    return torch.cat(done)


def _equal_shards(shards: Sequence[Tensor], params: Sequence[ZeroParameter]) -> list[Tensor]:
    group, job_size = owning_group(params[0]), dist.get_world_size(group=params[0].ds_process_group)
    rank, owners = dist.get_rank(group=group), range(dist.get_world_size(group=group))
    equal = [cut_as_deepspeed(param.ds_numel, job_size) for param in params]
    # By owner of an equal shard, which is that of its place in the job, then by parameter.
    table = [
        [parameter_moves(param.ds_numel, cut_of(param), cut, place) for param, cut in zip(params, equal, strict=True)]
        for place in (dist.get_global_rank(group, owner) for owner in owners)
    ]
    send = [
        [
            shard[move.in_source : move.in_source + move.count]
            for shard, moves in zip(shards, of_owner, strict=True)
            for move in moves
            if move.source == rank
        ]
        for of_owner in table
    ]
    done = [torch.zeros(cut.sizes[0], dtype=shards[0].dtype) for cut in equal]
    receive = [
        [
            part[move.in_target : move.in_target + move.count]
            for part, moves in zip(done, table[rank], strict=True)
            for move in moves
            if move.source == source
        ]
        for source in owners
    ]
    write(start_exchange(send, receive, shards[0].dtype, group)(), receive)
    return done
