"""Gathering of parameters in shards of unequal size, and adding up of their gradients.

Dimension key: n elements of a parameter, s elements of this rank's shard.
"""

from __future__ import annotations

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

from ds_hetero.frameworks.deepspeed.protocols import ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.parameter_cut import cut_of, owning_group
from ds_hetero.runtime.backends import gathers_unequal_parts
from ds_hetero.values.splits import Split


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


def gather_weighted(
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
    """Append zeros to a flat tensor, up to ``size`` elements."""
    if flat.numel() == size:
        return flat
    return torch.cat([flat, flat.new_zeros(size - flat.numel())])
