"""DeepSpeed's optimizer of ZeRO stages 1 and 2 with partitions in proportion to weights.

DeepSpeed flattens every parameter group of n elements, and rank r of W owns ``[r * n / W, (r + 1) * n / W)`` of it. Its
reductions, norms, clipping and steps work on parts of any size. So the class below replaces only methods that compute a
boundary as rank times size, and the all-gather of updated parameters, which needs equal sizes. With equal weights the
partitions and the communication are those of stock DeepSpeed.

Example: a group of 1,000 elements on ranks of weights 3, 1 and 1 is cut at 600 and 800, where DeepSpeed pads it to
1,002 and cuts it at 334 and 668.

    at the start     get_data_parallel_partitions, get_partition_info, initialize_gradient_partition: compute the parts
    in a backward    gradients arrive in any order on each rank, and are reduced in one order (`ReductionOrder`)
    in a step        DeepSpeed's own step, with an all-gather that takes parts of any size
    in checkpoints   the layout is saved with the shards, see `stage12_checkpoint`
"""

from __future__ import annotations

import contextlib
import math
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
        weights: non-negative numbers by rank of the data-parallel group; a rank of weight zero owns nothing.

    Collectives: DeepSpeed's. But if the parts of a group are unequal, its updated parameters are gathered by one
    broadcast per owner; the broadcasts of all groups are started together.
    Source: ZeRO (arXiv:1910.02054), section 5.
    """

    def __init__(self, *args: object, weights: Sequence[float], **kwargs: object) -> None:
        self.weights = tuple(weights)
        self.layouts: list[FlatGroup] = []  # by parameter group, in the order of bit16_groups
        # Sum of squares of gradients that another optimizer steps on, the same on every rank; None if there are none.
        self.squares_elsewhere: Callable[[], float] | None = None
        super().__init__(*args, **kwargs)
        self._group_ids: dict[int, int] = {}  # by id() of a trained parameter
        trained = []
        for group_id, group in enumerate(self.bit16_groups):
            for parameter in group:
                if parameter.requires_grad:
                    self._group_ids[id(parameter)] = group_id
                    trained.append(parameter)
        self.reduction_order = ReductionOrder(trained, self.dp_process_group, self._reduce)

    def rank_in(self, group_id: int) -> int:
        """Return this rank's number in the data-parallel group of a parameter group; its part has the same number."""
        rank: int = dist.get_rank(group=self.real_dp_process_group[group_id])
        return rank

    def get_data_parallel_partitions(self, tensor: Tensor, group_id: int) -> list[Tensor]:
        """Return the parts of the flat vector ``tensor`` that the ranks own, as views."""
        return list(torch.split(tensor, list(cut_flat_group(tensor.numel(), self.weights).sizes)))

    def get_partition_info(
        self, tensor_list: list[Tensor], partition_size: int, partition_id: int, param_padding: Any = None
    ) -> tuple[list[Tensor], list[Tensor], int]:
        """Return which tensors of a group a part contains, and where the part begins.

        DeepSpeed calls this once for each group in turn, just after it has flattened the group. So this method also
        stores the group's layout.

        Args:
            tensor_list: the group's parameters.
            partition_size: of equal parts; not used.
            partition_id: number of the part.
            param_padding: DeepSpeed's padding of parameters; not used, the layout has it.

        Returns:
            The tensors with elements in the part; the other tensors; and the index in the first of the former at which
            the part begins.
        """
        self.layouts.append(self._layout_of(len(self.layouts)))
        fragments = self.fragments(len(self.layouts) - 1, partition_id)
        ids_in_part = {id(parameter) for parameter, _ in fragments}
        first_offset = fragments[0][1].in_parameter if fragments else 0
        return (
            [tensor for tensor in tensor_list if id(tensor) in ids_in_part],
            [tensor for tensor in tensor_list if id(tensor) not in ids_in_part],
            first_offset,
        )

    def _layout_of(self, group_id: int) -> FlatGroup:
        """Return the layout of a group that DeepSpeed has flattened."""
        flat, parameters = self.bit16_groups_flat[group_id], self.bit16_groups[group_id]
        return FlatGroup(
            starts=tuple(parameter.storage_offset() - flat.storage_offset() for parameter in parameters),
            sizes=tuple(parameter.numel() for parameter in parameters),
            cut=cut_flat_group(flat.numel(), self.weights),
        )

    def fragments(self, group_id: int, partition_id: int) -> list[tuple[Tensor, Fragment]]:
        """Return each parameter that has elements in a part of a group, in order, and which elements these are."""
        parameters = self.bit16_groups[group_id]
        fragments = self.layouts[group_id].fragments(partition_id)
        return [(parameters[fragment.parameter], fragment) for fragment in fragments]

    def initialize_gradient_partitioning_data_structures(self) -> None:
        """Set ``partition_size`` to the size of this rank's parts for later methods, and call DeepSpeed's method."""
        self.partition_size = [layout.cut.sizes[self.rank_in(group_id)] for group_id, layout in enumerate(self.layouts)]
        super().initialize_gradient_partitioning_data_structures()

    def initialize_gradient_partition(self, i: int, param_group: list[Tensor], partition_id: int) -> None:
        """Record, for each gradient with elements in a part, which elements these are, and where they are in the part.

        Example: a part that begins at element 3 of a gradient has ``grad_start_offset`` 3 and
        ``grad_partition_insertion_offset`` 0 for this gradient.
        """
        for parameter, fragment in self.fragments(i, partition_id):
            param_id = self.get_param_id(parameter)
            self.param_to_partition_ids[i].setdefault(param_id, []).append(partition_id)
            self.total_grads_in_partition[i][partition_id] += 1
            self.is_grad_computed[i][partition_id][param_id] = False
            self.grad_partition_insertion_offset[i][partition_id][param_id] = fragment.in_part
            self.grad_start_offset[i][partition_id][param_id] = fragment.in_parameter

    def get_grad_position(self, group_id: int, *_: object) -> None:
        """Record where the gradients of a group are in this rank's part; an offloaded optimizer reads this."""
        for parameter, fragment in self.fragments(group_id, self.rank_in(group_id)):
            position = [group_id, fragment.in_parameter, fragment.in_part, fragment.count]
            self.grad_position[self.get_param_id(parameter)] = position

    def flatten_dense_tensors_aligned(
        self, tensor_list: Any, alignment: int, *args: object, **kwargs: object
    ) -> Tensor:
        """Call DeepSpeed's method with an alignment of at least 1, which a rank that owns nothing needs."""
        flat: Tensor = super().flatten_dense_tensors_aligned(tensor_list, max(alignment, 1), *args, **kwargs)
        return flat

    def _link_all_hp_params(self) -> None:
        """Link parameters to this rank's parts of their fp32 copies, for checkpoints and ``safe_get_full_*``."""
        if self.cpu_offload:
            self._get_offload_gradient_dict()
        for group_id, layout in enumerate(self.layouts):
            start, stop = layout.cut.ranges[self.rank_in(group_id)]
            parameters = self.bit16_groups[group_id]
            in_flat_order = sorted(range(len(parameters)), key=layout.starts.__getitem__)
            last = in_flat_order[-1]
            # Without the argument, DeepSpeed computes the offsets from the sizes. Releases that put no padding between
            # parameters do not have the argument.
            is_padded = sum(layout.sizes) < layout.starts[last] + layout.sizes[last]
            offsets = {"param_offsets": [layout.starts[index] for index in in_flat_order]} if is_padded else {}
            link_hp_params(
                lp_param_list=[parameters[index] for index in in_flat_order],
                flat_hp_partition=self.single_partition_of_fp32_groups[group_id],
                gradient_dict=self.averaged_gradients,
                offload_gradient_dict=self.offload_gradient_dict,
                use_offload=self.cpu_offload,
                param_group_index=group_id,
                # DeepSpeed would take an empty part that begins within a parameter for a fragment of it. So an empty
                # part is said to begin at the end.
                partition_start=start if start < stop else layout.cut.total,
                partition_size=stop - start,
                dp_group=self.real_dp_process_group[group_id],
                **offsets,
            )

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: nn.Parameter, i: int) -> None:
        """Replace DeepSpeed's method: put a new gradient into its bucket when it has its turn in `ReductionOrder`."""
        if not self.reduction_order.knows(param):
            super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        elif getattr(param, "ds_grad_is_ready", True):  # False in all tiles of a tiled computation but the last
            self.reduction_order.arrive(param)

    def _reduce(self, param: nn.Parameter) -> None:
        """Put a gradient into its bucket; zeros if this rank does not have the gradient."""
        if self.get_gradient_for_reduction(param) is None:
            param.grad = torch.zeros_like(param)
            if self.use_grad_accum_attribute:
                self._fill_param_grad_accum_attribute(param)
        super().reduce_independent_p_g_buckets_and_remove_grads(param, self._group_ids[id(param)])

    def independent_gradient_partition_epilogue(self) -> None:
        """End a backward: reduce waiting gradients, and zeros for missing ones; then call DeepSpeed's method."""
        self.setup_buckets()  # DeepSpeed does so at the first gradient, and this rank may have none
        self.reduction_order.finish()
        super().independent_gradient_partition_epilogue()

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        """Return the norm of the model's gradient, also of gradients that another optimizer steps on."""
        norm: Tensor = super().scaled_global_norm(norm_type)
        if self.squares_elsewhere is None or norm < 0:  # DeepSpeed returns -1 for a norm that is not finite
            return norm
        return (norm.double().square() + self.squares_elsewhere()).sqrt().to(norm.dtype)

    def has_overflow(self, *args: object, **kwargs: object) -> bool:
        """Return whether the step is skipped: also if a gradient that another optimizer steps on is not finite.

        Releases that decide by the norm of the whole model, as 0.19.8 does, would find out without it.
        """
        is_elsewhere = self.squares_elsewhere is not None and not math.isfinite(self.squares_elsewhere())
        return bool(super().has_overflow(*args, **kwargs)) or is_elsewhere

    def step(self, *args: object, **kwargs: object) -> None:
        """Take DeepSpeed's step, with an all-gather that takes parts of any size."""
        with _gathering_any_sizes():
            super().step(*args, **kwargs)

    def update_lp_params(self) -> None:
        """Copy the owners' fp32 values to the parameters on all ranks, with an all-gather of parts of any size."""
        with _gathering_any_sizes():
            super().update_lp_params()

    @property
    def group_names(self) -> list[list[str]]:
        """Names of the parameters, by group."""
        return [[self.param_names[parameter] for parameter in group] for group in self.bit16_groups]

    def state_dict(self) -> State:
        """Return the state that this rank saves: DeepSpeed's, with the layout of all parts."""
        state: State = super().state_dict()
        state[stage12_checkpoint.LAYOUT] = stage12_checkpoint.layout_to_save(self.group_names, self.layouts)
        return state

    def read_checkpoint(self, read: Callable[[int], State], num_shards: int) -> tuple[list[RestoredGroup], State]:
        """Return this rank's part of a checkpoint, for `restore`; see `stage12_checkpoint.read_groups`."""
        return stage12_checkpoint.read_groups(
            read,
            num_shards,
            self.group_names,
            self.layouts,
            dist.get_rank(group=self.dp_process_group),
            round_robin=self.round_robin_gradients,
        )

    def restore(self, groups: list[RestoredGroup], state: State, *, load_from_fp32_weights: bool) -> None:
        """Load the result of `read_checkpoint`.

        Args:
            groups: this rank's part of every parameter group.
            state: optimizer state of one shard, for values that are the same in all shards.
            load_from_fp32_weights: whether to take the saved master weights; otherwise they are copied from the
                model's weights, which are loaded before.
        """
        self._load_global_state(state)
        base = self.optimizer.state_dict()
        state_by_number = dict(enumerate(group.state for group in groups))
        options = []
        for current_options, group in zip(base["param_groups"], groups, strict=True):
            options.append({**current_options, **group.options})
        self.optimizer.load_state_dict({"state": state_by_number, "param_groups": options})
        if load_from_fp32_weights:
            for current, group in zip(self.single_partition_of_fp32_groups, groups, strict=True):
                current.data.copy_(group.fp32)
        else:
            self.refresh_fp32_params()
        self._link_all_hp_params()
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()

    def _load_universal_checkpoint(self, checkpoint_folder: str, *_: object) -> None:
        """Load a universal checkpoint, also if this rank owns nothing of a group.

        DeepSpeed reads the optimizer's step from a parameter that the rank owns. A group of which the rank owns nothing
        gets a placeholder without state for that.
        """
        placeholder = _Placeholder()
        names: dict[Any, str] = self.param_names  # type: ignore[has-type]
        self.param_names = {**names, placeholder: "placeholder"}
        self.groups_with_placeholders = []
        for group_id, group in enumerate(self.bit16_groups):
            owns_some = bool(self.fragments(group_id, self.rank_in(group_id)))
            self.groups_with_placeholders.append(group if owns_some else [*group, placeholder])
        try:
            self.load_hp_checkpoint_state_from_checkpoint_dir("groups_with_placeholders", checkpoint_folder)
        finally:
            self.param_names = names
            del self.groups_with_placeholders


class _Placeholder:
    """Stands for a parameter without state where DeepSpeed loads universal checkpoints."""

    @property
    def _hp_mapping(self) -> _Placeholder:
        return self

    def load_hp_checkpoint_state(self, *_: object, **__: object) -> None:
        return None  # the optimizer's step

    def get_optim_state_keys(self) -> list[str]:
        return []


def gather_partitions(partitions: Sequence[Tensor], group: ProcessGroup) -> list[Any]:
    """Start to send every rank's part of a flat vector to all ranks, in place; return the handles to wait for.

        partitions   [sizes[0]], [sizes[1]], ...   views of one flat vector; zero is allowed

    Caller: every rank of ``group``, with the same sizes.
    Collectives: one broadcast for each part that is not empty, all under way at once.
    Sends: all ranks together as many bytes as an all-gather of equal parts.
    """
    works = []
    for owner, part in enumerate(partitions):
        if part.numel():
            source = dist.get_global_rank(group, owner)
            works.append(dist.broadcast(part.detach(), source, group=group, async_op=True))
    return [work for work in works if work is not None]


@contextlib.contextmanager
def _gathering_any_sizes() -> Iterator[None]:
    """Inside the context, replace DeepSpeed's all-gather of updated parameters for groups with unequal parts.

    These groups are broadcast, see `gather_partitions`. Groups with equal parts still take DeepSpeed's all-gather.
    """
    gather_equal = stock.all_gather_dp_groups

    def all_gather_dp_groups(
        groups_flat: list[Tensor],
        partitioned_param_groups: list[list[Tensor]],
        dp_process_group: list[Any],
        *args: object,
        **kwargs: object,
    ) -> None:
        works: list[Any] = []
        equal_group_ids = []  # of parameter groups whose parts all have the same size
        for group_id, parts in enumerate(partitioned_param_groups):
            if len({part.numel() for part in parts}) == 1:
                equal_group_ids.append(group_id)
            else:
                works += gather_partitions(parts, dp_process_group[group_id])
        gather_equal(
            [groups_flat[group_id] for group_id in equal_group_ids],
            [partitioned_param_groups[group_id] for group_id in equal_group_ids],
            [dp_process_group[group_id] for group_id in equal_group_ids],
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
