"""ZeRO stages 1 and 2 with partitions in proportion to weights: DeepSpeed's optimizer with other cuts.

DeepSpeed flattens every parameter group and lets rank r own ``[r * n / W, (r + 1) * n / W)`` of it. Its reductions,
norms, clipping and steps work on whatever a rank owns; only the places that compute a boundary as rank times size are
replaced here, and the all-gather of the updated parameters, which takes equal sizes only. With equal weights the
partitions and the communication are DeepSpeed's own.

Example: a group of 1,000 elements on ranks of weights 3, 1 and 1 is cut at 600 and 800, where DeepSpeed pads it to
1,002 and cuts it at 334 and 668.

    at the start     get_data_parallel_partitions, get_partition_info, initialize_gradient_partition
    in a backward    gradients arrive in any order on each rank, and are reduced in one order (`ReductionOrder`)
    in a step        DeepSpeed's own, whose all-gather takes parts of any size
    in checkpoints   the layout is saved with the shards, see `stage12_checkpoint`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed.runtime.zero.stage_1_and_2 as stock
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import link_hp_params
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_hetero.frameworks.deepspeed.protocols import State
from ds_hetero.frameworks.deepspeed.zero import stage12_checkpoint
from ds_hetero.frameworks.deepspeed.zero.reduction_order import ReductionOrder
from ds_hetero.frameworks.deepspeed.zero.stage12_checkpoint import RestoredGroup
from ds_hetero.sharding.zero_partition import FlatGroup, Fragment, cut_flat_group


class WeightedZeroOptimizer(DeepSpeedZeroOptimizer):  # type: ignore[misc]  # DeepSpeed has no type information
    """`DeepSpeedZeroOptimizer` whose rank r owns ``weights[r] / sum(weights)`` of every parameter group.

    Args:
        weights: by rank of the data-parallel group, not negative; a rank of weight zero owns nothing.

    Collectives: DeepSpeed's; with unequal parts the updated parameters are gathered by one broadcast per owner and
    group, all posted together.
    Source: ZeRO (arXiv:1910.02054), section 5.
    """

    def __init__(self, *args: object, weights: Sequence[float], **kwargs: object) -> None:
        self.weights = tuple(weights)
        self.layouts: list[FlatGroup] = []  # by parameter group, in the order of bit16_groups
        super().__init__(*args, **kwargs)
        self._group_of: dict[int, int] = {}  # by id of a trained parameter
        trained = []
        for group_id, group in enumerate(self.bit16_groups):
            for parameter in group:
                if parameter.requires_grad:
                    self._group_of[id(parameter)] = group_id
                    trained.append(parameter)
        self.reduction_order = ReductionOrder(trained, self.dp_process_group, self._reduce)

    def rank_in(self, group_id: int) -> int:
        """Return this rank's part of parameter group ``group_id``."""
        rank: int = dist.get_rank(group=self.real_dp_process_group[group_id])
        return rank

    def get_data_parallel_partitions(self, tensor: Tensor, group_id: int) -> list[Tensor]:
        """Return flat ``tensor``, cut for all ranks."""
        return list(torch.split(tensor, list(cut_flat_group(tensor.numel(), self.weights).sizes)))

    def get_partition_info(
        self, tensor_list: list[Tensor], partition_size: int, partition_id: int, param_padding: Any = None
    ) -> tuple[list[Tensor], list[Tensor], int]:
        """Return the tensors that a part has elements of, those that it has not, and where it begins in the first.

        Called while the optimizer is built, once for each group in turn and just after it was flattened, so this is
        where the layout of the group becomes known.
        """
        self.layouts.append(self._layout_of(len(self.layouts)))
        fragments = self.fragments(len(self.layouts) - 1, partition_id)
        inside = {id(parameter) for parameter, _ in fragments}
        return (
            [tensor for tensor in tensor_list if id(tensor) in inside],
            [tensor for tensor in tensor_list if id(tensor) not in inside],
            fragments[0][1].in_parameter if fragments else 0,
        )

    def _layout_of(self, group_id: int) -> FlatGroup:
        flat, parameters = self.bit16_groups_flat[group_id], self.bit16_groups[group_id]
        return FlatGroup(
            starts=tuple(parameter.storage_offset() - flat.storage_offset() for parameter in parameters),
            sizes=tuple(parameter.numel() for parameter in parameters),
            cut=cut_flat_group(flat.numel(), self.weights),
        )

    def fragments(self, group_id: int, partition_id: int) -> list[tuple[Tensor, Fragment]]:
        """Return the parameters that a part of a group has elements of, in their order, each with these elements."""
        parameters = self.bit16_groups[group_id]
        fragments = self.layouts[group_id].fragments(partition_id)
        return [(parameters[fragment.parameter], fragment) for fragment in fragments]

    def initialize_gradient_partitioning_data_structures(self) -> None:
        """Do as DeepSpeed; what reads ``partition_size`` from here on means this rank's own."""
        self.partition_size = [layout.cut.sizes[self.rank_in(group_id)] for group_id, layout in enumerate(self.layouts)]
        super().initialize_gradient_partitioning_data_structures()

    def initialize_gradient_partition(self, i: int, param_group: list[Tensor], partition_id: int) -> None:
        """Record for a part which gradients it takes, from which element on, and where they go."""
        for parameter, fragment in self.fragments(i, partition_id):
            param_id = self.get_param_id(parameter)
            self.param_to_partition_ids[i].setdefault(param_id, []).append(partition_id)
            self.total_grads_in_partition[i][partition_id] += 1
            self.is_grad_computed[i][partition_id][param_id] = False
            self.grad_partition_insertion_offset[i][partition_id][param_id] = fragment.in_part
            self.grad_start_offset[i][partition_id][param_id] = fragment.in_parameter

    def get_grad_position(self, group_id: int, *_: object) -> None:
        """Note where gradients lie in their parameters and in this rank's part, for offloading."""
        for parameter, fragment in self.fragments(group_id, self.rank_in(group_id)):
            position = [group_id, fragment.in_parameter, fragment.in_part, fragment.count]
            self.grad_position[self.get_param_id(parameter)] = position

    def flatten_dense_tensors_aligned(
        self, tensor_list: Any, alignment: int, *args: object, **kwargs: object
    ) -> Tensor:
        """Do as DeepSpeed, also for the empty part of a rank that owns nothing."""
        flat: Tensor = super().flatten_dense_tensors_aligned(tensor_list, max(alignment, 1), *args, **kwargs)
        return flat

    def _link_all_hp_params(self) -> None:
        """Link every parameter to the part of its fp32 copy that is here, for checkpoints and ``safe_get_full_*``."""
        if self.cpu_offload:
            self._get_offload_gradient_dict()
        for group_id, layout in enumerate(self.layouts):
            start, stop = layout.cut.ranges[self.rank_in(group_id)]
            parameters = self.bit16_groups[group_id]
            in_flat_order = sorted(range(len(parameters)), key=layout.starts.__getitem__)
            last = in_flat_order[-1]
            # DeepSpeed computes the offsets from the sizes, unless it is given them: releases without padding between
            # parameters do not know the argument.
            is_padded = sum(layout.sizes) < layout.starts[last] + layout.sizes[last]
            offsets = {"param_offsets": [layout.starts[index] for index in in_flat_order]} if is_padded else {}
            link_hp_params(
                lp_param_list=[parameters[index] for index in in_flat_order],
                flat_hp_partition=self.single_partition_of_fp32_groups[group_id],
                gradient_dict=self.averaged_gradients,
                offload_gradient_dict=self.offload_gradient_dict,
                use_offload=self.cpu_offload,
                param_group_index=group_id,
                # An empty part within a parameter would count as a fragment of it; behind the end it does not.
                partition_start=start if start < stop else layout.cut.total,
                partition_size=stop - start,
                dp_group=self.real_dp_process_group[group_id],
                **offsets,
            )

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: nn.Parameter, i: int) -> None:
        """Put a new gradient into its bucket when its turn comes, the same on every rank."""
        if not self.reduction_order.knows(param):
            super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        elif getattr(param, "ds_grad_is_ready", True):  # not so in all tiles of a computation but the last
            self.reduction_order.arrive(param)

    def _reduce(self, param: nn.Parameter) -> None:
        """Put a gradient into its bucket, zeros where this rank has none."""
        if self.get_gradient_for_reduction(param) is None:
            param.grad = torch.zeros_like(param)
            if self.use_grad_accum_attribute:
                self._fill_param_grad_accum_attribute(param)
        super().reduce_independent_p_g_buckets_and_remove_grads(param, self._group_of[id(param)])

    def independent_gradient_partition_epilogue(self) -> None:
        """Reduce zeros for gradients that this rank lacks, at the end of a backward; then do as DeepSpeed."""
        self.setup_buckets()  # on a rank without any gradient nothing has
        self.reduction_order.finish()
        super().independent_gradient_partition_epilogue()

    def step(self, *args: object, **kwargs: object) -> None:
        """Take DeepSpeed's step."""
        with _gathering_any_sizes():
            super().step(*args, **kwargs)

    def update_lp_params(self) -> None:
        """Do as DeepSpeed: refresh the parameters of all ranks from their owners' fp32 copies."""
        with _gathering_any_sizes():
            super().update_lp_params()

    @property
    def group_names(self) -> list[list[str]]:
        """Names of the parameters of every group."""
        return [[self.param_names[parameter] for parameter in group] for group in self.bit16_groups]

    def state_dict(self) -> State:
        """Return this rank's shard: DeepSpeed's, and where its parts lie."""
        state: State = super().state_dict()
        state[stage12_checkpoint.LAYOUT] = stage12_checkpoint.layout_to_save(self.group_names, self.layouts)
        return state

    def read_checkpoint(self, read: Callable[[int], State], num_shards: int) -> tuple[list[RestoredGroup], State]:
        """This rank's part of a checkpoint of any layout; see `stage12_checkpoint.read_groups`. Changes nothing yet."""
        return stage12_checkpoint.read_groups(
            read,
            num_shards,
            self.group_names,
            self.layouts,
            dist.get_rank(group=self.dp_process_group),
            round_robin=self.round_robin_gradients,
        )

    def restore(self, groups: list[RestoredGroup], state: State, *, load_from_fp32_weights: bool) -> None:
        """Take over what `read_checkpoint` returned.

        Args:
            state: of one shard, for what is the same in all of them.
            load_from_fp32_weights: take the saved master weights, else those of the model, which has been loaded.
        """
        self._load_global_state(state)
        base = self.optimizer.state_dict()
        state_by_number = dict(enumerate(group.state for group in groups))
        options = [{**now, **group.options} for now, group in zip(base["param_groups"], groups, strict=True)]
        self.optimizer.load_state_dict({"state": state_by_number, "param_groups": options})
        if load_from_fp32_weights:
            for current, group in zip(self.single_partition_of_fp32_groups, groups, strict=True):
                current.data.copy_(group.fp32)
        else:
            self._restore_from_bit16_weights()
        self._link_all_hp_params()
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()

    def _load_universal_checkpoint(self, checkpoint_folder: str, *_: object) -> None:
        """Load a universal checkpoint, also where this rank owns nothing of a group.

        DeepSpeed reads the optimizer's step from a parameter that the rank owns. Where there is none, one stands in
        that has no state.
        """
        nothing = _Nothing()
        names: dict[Any, str] = self.param_names  # type: ignore[has-type]
        self.param_names = {**names, nothing: "nothing"}
        self.groups_or_nothing = []
        for group_id, group in enumerate(self.bit16_groups):
            owns_some = bool(self.fragments(group_id, self.rank_in(group_id)))
            self.groups_or_nothing.append(group if owns_some else [*group, nothing])
        try:
            self.load_hp_checkpoint_state_from_checkpoint_dir("groups_or_nothing", checkpoint_folder)
        finally:
            self.param_names = names
            del self.groups_or_nothing


class _Nothing:
    """Stands in a universal checkpoint's loading for the parameter that a rank does not own."""

    @property
    def _hp_mapping(self) -> _Nothing:
        return self

    def load_hp_checkpoint_state(self, *_: object, **__: object) -> None:
        return None  # the optimizer's step

    def get_optim_state_keys(self) -> list[str]:
        return []


def gather_partitions(partitions: Sequence[Tensor], group: ProcessGroup) -> list[Any]:
    """Start to bring every rank's part of a flat vector to all ranks; return the works to wait for.

        partitions   [sizes[0]], [sizes[1]], ...   views of one flat vector; zero is allowed

    Caller: every rank of ``group``, with the same sizes.
    Collectives: one broadcast for each part that is not empty, in place; none waits for another.
    Sends: as a whole, what an all-gather of equal parts sends.
    """
    works = []
    for owner, part in enumerate(partitions):
        if part.numel():
            source = dist.get_global_rank(group, owner)
            works.append(dist.broadcast(part.detach(), source, group=group, async_op=True))
    return [work for work in works if work is not None]


@contextlib.contextmanager
def _gathering_any_sizes() -> Iterator[None]:
    """Let DeepSpeed's all-gather of updated parameters take parts of any size inside; equal ones go its own way."""
    gather_equal = stock.all_gather_dp_groups

    def all_gather_dp_groups(
        groups_flat: list[Tensor],
        partitioned_param_groups: list[list[Tensor]],
        dp_process_group: list[Any],
        *args: object,
        **kwargs: object,
    ) -> None:
        works: list[Any] = []
        equal = []  # parameter groups whose parts have one size
        for group_id, parts in enumerate(partitioned_param_groups):
            if len({part.numel() for part in parts}) == 1:
                equal.append(group_id)
            else:
                works += gather_partitions(parts, dp_process_group[group_id])
        gather_equal(
            [groups_flat[group_id] for group_id in equal],
            [partitioned_param_groups[group_id] for group_id in equal],
            [dp_process_group[group_id] for group_id in equal],
            *args,
            **kwargs,
        )
        for work in works:
            work.wait()

    stock.all_gather_dp_groups = all_gather_dp_groups
    try:
        yield
    finally:
        stock.all_gather_dp_groups = gather_equal
