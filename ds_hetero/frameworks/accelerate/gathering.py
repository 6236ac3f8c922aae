"""Gather and reduce one value for each replica, whose ranks have the same values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    gather_object,
    recursively_apply,
)
from torch import Tensor

from ds_hetero.engine.patching import Function, around
from ds_hetero.engine.read_marks import reads_shards
from ds_hetero.frameworks.accelerate.accelerators import asks_for_engine
from ds_hetero.frameworks.accelerate.process_counts import call_with_all_ranks

_replica_size: ContextVar[int] = ContextVar("_replica_size", default=1)  # ranks of a replica, which have equal values


@contextlib.contextmanager
def gathering_over_replicas(accelerator: Accelerator) -> Iterator[None]:
    """Inside the context, let an Accelerator gather and reduce one value per replica, which its ranks share."""
    token = _replica_size.set(accelerator.parallelism_config.sp_size)
    gather = gathered_from_replicas(accelerator.gather)
    accelerator.gather = gather
    accelerator.reduce = functools.partial(_reduce, gather)
    accelerator.pad_across_processes = around(call_with_all_ranks)(accelerator.pad_across_processes)
    try:
        yield
    finally:
        del accelerator.gather, accelerator.reduce, accelerator.pad_across_processes
        _replica_size.reset(token)


def _gather_from_replicas(stock: Function, values: Any) -> object:
    """Replace accelerate's ``gather`` and ``gather_object``: gather from the first rank of every replica.

    Outside of `gathering_over_replicas`, gather from all ranks, as stock does.
    """
    replica_size = _replica_size.get()
    if replica_size == 1:
        return stock(values)
    if stock.__name__ == "gather_object":
        entries_by_rank = call_with_all_ranks(stock, [values])
        gathered_entries = []
        for entries in entries_by_rank[::replica_size]:
            gathered_entries.extend(entries)
        return gathered_entries

    def first_of_replica(gathered: Tensor) -> Tensor:
        """Keep the rows of the first rank of every replica: [ranks * rows, ...] -> [replicas * rows, ...]."""
        by_rank = gathered.reshape(dist.get_world_size(), -1, *gathered.shape[1:])
        return by_rank[::replica_size].flatten(0, 1)

    return recursively_apply(first_of_replica, call_with_all_ranks(stock, values))


gathered_from_replicas = around(_gather_from_replicas)


def gather_for_metrics(
    stock: Function, accelerator: Accelerator, input_data: Any, use_gather_object: bool = False
) -> object:
    """Replace ``Accelerator.gather_for_metrics``: return each row once, also of a short last batch.

    ranks of a replica have       action
    the same whole rows           gather from one rank per replica; stock removes the duplicates of the last batch
    shards of the rows            gather from all ranks, and remove nothing; stock assumes that each rank has other
                                  rows, and would remove the values of some ranks
    """
    has_shards = reads_shards(accelerator.gradient_state.active_dataloader)
    sp_size = accelerator.parallelism_config.sp_size if accelerator.parallelism_config is not None else 1
    if has_shards is None or sp_size == 1 or not asks_for_engine(accelerator):
        return stock(accelerator, input_data, use_gather_object)
    if not has_shards:
        is_over_replicas = _replica_size.get() > 1
        with contextlib.nullcontext() if is_over_replicas else gathering_over_replicas(accelerator):
            return stock(accelerator, input_data, use_gather_object)
    if use_gather_object or not _has_only_tensors(input_data):
        return gather_object(input_data)
    return accelerator.gather(input_data)


def _has_only_tensors(data: object) -> bool:
    """Return True for a tensor, and for nested lists and dicts of tensors, by the test of ``gather_for_metrics``."""
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


_REDUCTIONS: dict[str, Any] = {
    "sum": Tensor.sum,
    "none": Tensor.sum,  # accelerate's reduce sums before it looks at "none"
    "mean": Tensor.mean,
    "max": Tensor.amax,
}


def _reduce(gather: Any, values: Any, reduction: str = "mean", scale: float = 1.0) -> object:
    """Replace ``Accelerator.reduce``: reduce over replicas. ``scale`` is ignored; accelerate uses it only on XLA."""
    return recursively_apply(lambda value: _REDUCTIONS[reduction](gather(value[None]), dim=0), values)
