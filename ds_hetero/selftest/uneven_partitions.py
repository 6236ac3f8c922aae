"""Gather and reduce unequal partitions as weighted ZeRO-3 does, and compare the rate with that of equal partitions.

NCCL and gloo run a collective of unequal partitions as one broadcast or reduce for each rank (NVIDIA/nccl#773), and one
of equal partitions as a single collective.
Values are 0 and 1, so that sums are exact in 16 bits up to 256 ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.common.extras import TRAINING_PACKAGES, require
from ds_hetero.common.units import GB
from ds_hetero.errors import HeteroError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session
from ds_hetero.sharding.zero_partition import cut_parameter
from ds_hetero.values.splits import Split

_GATHER, _REDUCE = "uneven gather of ZeRO-3", "uneven reduce of ZeRO-3"
_GPU_ELEMENTS = 32 * 2**20 + 3  # 64 MiB in 16 bits: a layer of some billion parameters
_CPU_ELEMENTS = 2**20 + 3
_REPETITIONS = 3
_MAX_EXACT_RANKS = 256  # bfloat16 represents every sum of up to so many ones
_TIMES = 3.0  # limits of a call that one line may take: two kinds of partitions, each several times


def check_uneven_partitions(session: Session) -> Iterator[Line]:
    """Yield two lines of the report: results and rates of gathers, and of reduces, of unequal partitions."""
    try:
        require(*TRAINING_PACKAGES, purpose="ZeRO")
    except HeteroError as error:
        yield Line(_GATHER, "skip", str(error))
        return
    if not 1 < session.size <= _MAX_EXACT_RANKS:
        yield Line(_GATHER, "skip", f"for 2 to {_MAX_EXACT_RANKS} ranks, here is {session.size}")
        return
    from ds_hetero.frameworks.deepspeed.small_job import use_torch_process_group

    use_torch_process_group()
    elements = _GPU_ELEMENTS if session.is_on_gpu else _CPU_ELEMENTS
    cuts = {
        "uneven": cut_parameter(elements, [1 + rank % 3 for rank in range(session.size)]),
        "even": Split((elements // session.size + 1,) * session.size),
    }
    for name, run in ((_GATHER, _gather), (_REDUCE, _reduce)):
        with session.watch.call(name, times=_TIMES):
            trials = {kind: _try(session, cut, elements, run) for kind, cut in cuts.items()}
        sent_bytes = 2 * elements * (session.size - 1) / session.size
        rates = {kind: sent_bytes / trial.seconds for kind, trial in trials.items()}
        wrong_kinds = [kind for kind, trial in trials.items() if not trial.is_right]
        if wrong_kinds:
            yield Line(name, "fail", f"other values than were sent, in {' and '.join(wrong_kinds)} parts")
        else:
            detail = f"{rates['uneven'] / GB:.3g} GB/s; of even parts {rates['even'] / GB:.3g}"
            yield Line(name, "pass", detail, rates["uneven"])


class _Trial(NamedTuple):
    """Result of repeating one gather or reduce."""

    is_right: bool  # whether all results on this rank are as expected
    seconds: float  # median over repetitions on the slowest rank, the same on all ranks


def _try(session: Session, cut: Split, elements: int, run: Callable[[Tensor, Split], tuple[Tensor, Tensor]]) -> _Trial:
    """Run an operation several times over a tensor of ``elements`` that is partitioned by ``cut``.

    Args:
        run: the operation; it returns its result and the expected result.
    """
    bits = torch.arange(elements, device=session.device) % 2
    full = bits.to(session.trained_dtype)
    times, is_right = [], True
    for _ in range(1 + _REPETITIONS):  # the first one connects, and is not timed
        dist.barrier(device_ids=[session.device.index] if session.is_on_gpu else None)
        begin_s = time.perf_counter()
        result, expected = run(full, cut)
        if session.is_on_gpu:
            torch.cuda.synchronize(session.device)
        times.append(time.perf_counter() - begin_s)
        is_right &= torch.equal(result, expected)
    slowest_s = max(on_all_ranks(lambda: median(times[1:])))
    return _Trial(is_right, slowest_s)


def _gather(full: Tensor, cut: Split) -> tuple[Tensor, Tensor]:
    """Gather the tensor from the ranks' shards; return it, and the expected tensor."""
    from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import Gathering
    from ds_hetero.frameworks.deepspeed.zero.weighted_shards import own_shard

    world = dist.group.WORLD
    assert world is not None
    (gathered,) = Gathering([own_shard(full, cut, world)], [cut], world).wait()
    return gathered[: full.numel()], full


def _reduce(full: Tensor, cut: Split) -> tuple[Tensor, Tensor]:
    """Sum the tensors of all ranks; return this rank's shard of the sum, and the expected shard."""
    from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import reduce_to_owners
    from ds_hetero.frameworks.deepspeed.zero.weighted_shards import own_shard

    world = dist.group.WORLD
    assert world is not None
    (shard,) = reduce_to_owners([full.clone()], [cut], world, divisor=1)
    return shard, own_shard(full * dist.get_world_size(), cut, world)
