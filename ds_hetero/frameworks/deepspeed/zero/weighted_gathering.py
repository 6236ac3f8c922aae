"""Gather parameters from unequal shards, and reduce gradients to the owners of unequal shards.

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
    """Starts to gather several tensors of the same dtype from the ranks' shards; `wait` returns the tensors.

        shards   [s] each
        result   of ``wait()``: [n] each, and the padding of the cut, if it has any

    Example: tensors a and b, of which rank 0 holds a0 and b0, rank 1 holds a1 and b1. Each rank sends its shards in one
    message, and the buffer is a0 b0 a1 b1; `wait` puts a0 a1 and b0 b1 together.

    Args:
        shards: this rank's shard of each tensor.
        cuts: how each tensor is cut between the ranks of ``group``.

    Caller: every rank of ``group``.
    Collectives: one all_gather_into_tensor if all ranks hold equally many elements. Otherwise one all_gather of a list
        on NCCL, which runs it as a batch of broadcasts, or one broadcast per rank on gloo, all under way at once. None
        in a group of one rank.
    """

    def __init__(self, shards: Sequence[Tensor], cuts: Sequence[Split], group: ProcessGroup) -> None:
        self._cuts = cuts
        rank = dist.get_rank(group=group)
        num_ranks = len(cuts[0].sizes)
        device = get_accelerator().current_device_name()
        self._single_rank_result: list[Tensor] = []  # the result in a group of one rank
        if num_ranks == 1:
            # Copies: a gathered parameter is released by freeing it, and the shard has to stay.
            self._single_rank_result = [shard.detach().to(device, copy=True) for shard in shards]
            return
        sizes = [sum(cut.sizes[owner] for cut in cuts) for owner in range(num_ranks)]
        self._flat = torch.empty(sum(sizes), dtype=shards[0].dtype, device=device)
        self._by_rank = torch.split(self._flat, sizes)
        torch.cat([shard.detach().to(device) for shard in shards], out=self._by_rank[rank])
        if len(set(sizes)) == 1:
            works = [dist.all_gather_into_tensor(self._flat, self._by_rank[rank], group=group, async_op=True)]
        elif gathers_unequal_parts(group):
            works = [dist.all_gather(list(self._by_rank), self._by_rank[rank], group=group, async_op=True)]
        else:
            works = []
            for owner, part in enumerate(self._by_rank):
                source = dist.get_global_rank(group, owner)
                works.append(dist.broadcast(part, source, group=group, async_op=True))
        self._works = works

    def wait(self) -> list[Tensor]:
        """Wait for the tensors and return them, flat; a single tensor is the buffer itself, without a copy."""
        if self._single_rank_result:
            return self._single_rank_result
        for work in self._works:
            work.wait()
        if not get_accelerator().is_synchronized_device():
            # The buffer was allocated on another stream. Tell the allocator that this stream reads it, so that the
            # memory is not reused before.
            self._flat.record_stream(get_accelerator().current_stream())
        if len(self._cuts) == 1:
            return [self._flat]
        shards_of_ranks = []
        for rank, part in enumerate(self._by_rank):
            shards_of_ranks.append(torch.split(part, [cut.sizes[rank] for cut in self._cuts]))
        return [torch.cat(shards) for shards in zip(*shards_of_ranks, strict=True)]


class _ParameterGathering:
    """The handle of parameters that are being gathered; DeepSpeed's coordinator calls ``wait`` for each of them."""

    def __init__(self, batches: list[tuple[list[Any], Gathering]]) -> None:
        self._batches = batches

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait for all parameters and give them their gathered data; calls after the first one do nothing."""
        for params, batch_gathering in self._batches:
            for param, flat in zip(params, batch_gathering.wait(), strict=True):
                param.data = flat[: param.ds_numel].view(param.ds_shape).to(param.ds_tensor.dtype)
                param.ds_status = ZeroParamStatus.AVAILABLE
        self._batches = []


def gather_weighted(
    params: Iterable[ZeroParameter], safe_mode: bool = False, quantize: bool = False, *, one_by_one: bool
) -> _ParameterGathering:
    """Replace ``all_gather_coalesced`` of a parameter: start to gather weighted parameters; see `Gathering`.

    Args:
        params: parameters that are not gathered yet.
        safe_mode: whether to compare the ranks' parameters first.
        quantize: ignored argument of DeepSpeed; quantized weights are refused elsewhere.
        one_by_one: whether to gather each parameter by itself.
    """
    # Sorted: ranks may list the parameters in different orders, but have to gather them in the same one.
    params = sorted(params, key=lambda param: param.ds_id)
    for param in params:
        if param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
            raise RuntimeError(param.ds_summary())
        param.ds_status = ZeroParamStatus.INFLIGHT
    if safe_mode:
        assert_ints_same_as_other_ranks([param.ds_id for param in params])
    # One gathering for the parameters of one dtype and one group of ranks, or for each parameter.
    batch_by_key: dict[tuple[int, torch.dtype], list[Any]] = {}
    for param in params:
        dtype = get_allgather_dtype(param, param.ds_tensor)
        batch_id = param.ds_id if one_by_one else id(owning_group(param))
        batch_by_key.setdefault((batch_id, dtype), []).append(param)
    batches = []
    for (_, dtype), batch in batch_by_key.items():
        shards = [param.ds_tensor.to(dtype) for param in batch]
        cuts = [cut_of(param) for param in batch]
        batches.append((batch, Gathering(shards, cuts, owning_group(batch[0]))))
    return _ParameterGathering(batches)


def reduce_to_owners(grads: Sequence[Tensor], cuts: Sequence[Split], group: ProcessGroup, divisor: int) -> list[Tensor]:
    """Add gradients up over the ranks, divide the sums, and return this rank's shards of them.

        grads    [n] each
        result   [s] each

    Args:
        grads: this rank's gradients.
        cuts: how each gradient is cut between the ranks of ``group``.
        divisor: the number by which the sums are divided.

    Caller: every rank of ``group``.
    Collectives: one reduce_scatter_tensor if all ranks own equally many elements. Otherwise one reduce_scatter of a
        list, which NCCL and gloo run as one reduce per rank, all at once. None in a group of one rank.
    """
    rank, num_ranks = dist.get_rank(group=group), dist.get_world_size(group=group)
    if num_ranks == 1:
        return [grad.reshape(-1).div(divisor) for grad in grads]
    shards_of_gradients = []
    for grad, cut in zip(grads, cuts, strict=True):
        padded = _padded(grad.reshape(-1), cut.total)
        shards_of_gradients.append(torch.split(padded, list(cut.sizes)))
    # By owner, then by gradient: the message to each rank is one run of the buffer.
    shards_by_owner = [shards[owner] for owner in range(num_ranks) for shards in shards_of_gradients]
    flat = torch.cat(shards_by_owner)
    # fp16 is divided before it is added up, since the sum could overflow. Otherwise this rank's shard of the sum is
    # divided: a smaller tensor, and one rounding less.
    divides_first = flat.dtype == torch.float16
    if divides_first:
        flat.div_(divisor)
    sizes = [sum(cut.sizes[owner] for cut in cuts) for owner in range(num_ranks)]
    by_rank = list(torch.split(flat, sizes))
    received = torch.empty_like(by_rank[rank])
    if len(set(sizes)) == 1:
        dist.reduce_scatter_tensor(received, flat, group=group)
    else:
        dist.reduce_scatter(received, by_rank, group=group)
    if not divides_first:
        received.div_(divisor)
    return list(torch.split(received, [cut.sizes[rank] for cut in cuts]))


def _padded(flat: Tensor, size: int) -> Tensor:
    """Append zeros to a flat tensor, up to ``size`` elements."""
    if flat.numel() == size:
        return flat
    return torch.cat([flat, flat.new_zeros(size - flat.numel())])
