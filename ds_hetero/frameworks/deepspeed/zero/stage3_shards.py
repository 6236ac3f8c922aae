"""Parameters of ZeRO-3 in shards of unequal size: making them, gathering and rewriting them, reducing to their owners.

DeepSpeed cuts every parameter into shards of one size, and this is left so wherever a parameter is made: by
``deepspeed.zero.Init``, by transformers' ``from_pretrained``, or when the engine takes a plain model over. `recut`
then exchanges the shards for weighted ones and gives every parameter its cut, on which everything else here depends;
parameters without one stay DeepSpeed's, also in one call with others.

Key: n elements of a parameter, s elements of this rank's shard; cut.total >= n, see `cut_parameter`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import (
    ZeroParamStatus,
    assert_ints_same_as_other_ranks,
    get_allgather_dtype,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.engine.patching import Function
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.protocols import ZeroParameter
from ds_hetero.sharding.zero_partition import FlatGroup, Move, cut_as_deepspeed, cut_parameter, moves
from ds_hetero.values.splits import Split

_CUT = "ds_hetero_cut"


def is_weighted(param: ZeroParameter) -> bool:
    """Whether `recut` gave a parameter its shards; else they are DeepSpeed's."""
    return hasattr(param, _CUT)


def cut_of(param: ZeroParameter) -> Split:
    """How a ZeRO-3 parameter is cut now, by `recut` or by DeepSpeed."""
    if is_weighted(param):
        cut: Split = getattr(param, _CUT)
        return cut
    return cut_as_deepspeed(param.ds_numel, dist.get_world_size(group=param.ds_process_group))


def recut(params: Iterable[ZeroParameter], weights: Sequence[float], *, one_by_one: bool = False) -> None:
    """Exchange DeepSpeed's shards of ``params`` for shards in proportion to ``weights``.

    Caller: every rank, with the same parameters in the same order, none of them gathered.
    Collectives: one all-gather per parameter; no more than one is whole at a time.

    Args:
        params: ZeRO-3 parameters.
        weights: positive, one per rank.
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
        equal, cut = param.ds_tensor, cut_parameter(param.ds_numel, weights)
        shard: Any = own_shard(param.data.detach(), cut, param.ds_process_group).to(equal.device, copy=True)
        if get_accelerator().is_pinned(equal):
            shard = get_accelerator().pin_memory(shard)
        shard.ds_numel = shard.numel()
        shard.status, shard.final_location = equal.status, equal.final_location
        param.ds_tensor = shard
        param.ds_numel_aligned = cut.total
        setattr(param, _CUT, cut)
        param.all_gather_coalesced = functools.partial(_gather, one_by_one=one_by_one)
        param.partition()


def own_shard(full: Tensor, cut: Split, group: ProcessGroup) -> Tensor:
    """This rank's shard of a full tensor of n elements: [s], zeros where the cut goes beyond n."""
    start, stop = cut.ranges[dist.get_rank(group=group)]
    flat = full.reshape(-1)[start:stop]
    return flat if flat.numel() == stop - start else torch.cat([flat, flat.new_zeros(stop - start - flat.numel())])


def parameter_moves(numel: int, source: Split, target: Split, part: int) -> tuple[Move, ...]:
    """How to put ``part`` of the cut ``target`` of a parameter together from the parts of the cut ``source``."""
    before, after = (FlatGroup(starts=(0,), sizes=(numel,), cut=cut) for cut in (source, target))
    return moves(before, after, part)


def gathering(stock: Function) -> Function:
    """For `Init._all_gather`: weighted parameters are gathered here, others by DeepSpeed."""

    @functools.wraps(stock)
    def all_gather(init: object, param_list: Sequence[ZeroParameter], *args: object, **kwargs: object) -> object:
        others = [param for param in param_list if not is_weighted(param)]
        missing = [
            param for param in param_list if is_weighted(param) and param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        ]
        if missing:
            missing[0].all_gather_coalesced(missing).wait()
        return stock(init, others, *args, **kwargs)

    return all_gather


def writing_back(stock: Function) -> Function:
    """For `Init._partition_param`: a whole parameter that was changed is written to its weighted shard."""

    @functools.wraps(stock)
    def partition_param(
        init: object, param: ZeroParameter, *args: object, has_been_updated: bool = False, **kwargs: object
    ) -> object:
        if is_weighted(param) and has_been_updated and param.ds_status is ZeroParamStatus.AVAILABLE:
            param.ds_tensor.data.copy_(own_shard(param.data, cut_of(param), param.ds_process_group))
            has_been_updated = False  # what is left to do is to free the whole
        return stock(init, param, *args, has_been_updated=has_been_updated, **kwargs)

    return partition_param


def all_gather_shards(shards: Sequence[Tensor], cuts: Sequence[Split], group: ProcessGroup) -> Gathering:
    """Start gathering several tensors of one type, of which every rank holds a shard.

        shards   [s] each
        result   of ``wait()``: [n] each, still with the padding that its cut has

    Collectives: on NCCL one all_gather of a list, which it runs as one batch of broadcasts; elsewhere one broadcast per
        rank, all under way at once. Either way a rank sends its shards of all tensors in one message.
    """
    return Gathering(shards, cuts, group)


class Gathering:
    """Tensors under way; one buffer, in which the shards of a rank lie side by side."""

    def __init__(self, shards: Sequence[Tensor], cuts: Sequence[Split], group: ProcessGroup) -> None:
        self._cuts = cuts
        rank, device = dist.get_rank(group=group), get_accelerator().current_device_name()
        sizes = [sum(parts) for parts in zip(*(cut.sizes for cut in cuts), strict=True)]
        self._flat = torch.empty(sum(sizes), dtype=shards[0].dtype, device=device)
        self._by_rank = torch.split(self._flat, sizes)
        torch.cat([shard.detach().to(device) for shard in shards], out=self._by_rank[rank])
        if "nccl" in torch.distributed.get_backend(group):
            works = [dist.all_gather(list(self._by_rank), self._by_rank[rank], group=group, async_op=True)]
        else:
            works = [
                dist.broadcast(part, dist.get_global_rank(group, owner), group=group, async_op=True)
                for owner, part in enumerate(self._by_rank)
            ]
        self._works = works

    def wait(self) -> list[Tensor]:
        """The tensors, whole and flat. One alone is not copied."""
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
    """Start gathering weighted parameters that are not available; see `all_gather_shards`.

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
        by_type.setdefault((param.ds_id if one_by_one else None, dtype), []).append(param)
    return _ParameterGathering(
        [
            (
                batch,
                all_gather_shards(
                    [param.ds_tensor.to(dtype) for param in batch],
                    [cut_of(param) for param in batch],
                    batch[0].ds_process_group,
                ),
            )
            for (_, dtype), batch in by_type.items()
        ]
    )


def reduce_to_owners(grads: Sequence[Tensor], cuts: Sequence[Split], group: ProcessGroup) -> list[Tensor]:
    """Average whole gradients over the ranks, each rank receiving its shards: [n] each -> [s] each.

    Collectives: one reduce_scatter of a list, which NCCL and gloo run as one reduce per rank, all at once; a rank
        receives its shards of all gradients in one message.
    """
    rank, num_ranks = dist.get_rank(group=group), dist.get_world_size(group=group)
    pieces = [
        torch.split(_padded(grad.reshape(-1), cut.total), list(cut.sizes))
        for grad, cut in zip(grads, cuts, strict=True)
    ]
    flat = torch.cat([parts[owner] for owner in range(num_ranks) for parts in pieces]).div_(num_ranks)
    by_rank = list(torch.split(flat, [sum(cut.sizes[owner] for cut in cuts) for owner in range(num_ranks)]))
    received = torch.empty_like(by_rank[rank])
    dist.reduce_scatter(received, by_rank, group=group)
    return list(torch.split(received, [cut.sizes[rank] for cut in cuts]))


def _padded(flat: Tensor, size: int) -> Tensor:
    return flat if flat.numel() == size else torch.cat([flat, flat.new_zeros(size - flat.numel())])
