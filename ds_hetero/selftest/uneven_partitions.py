"""Gathers and reduces of unequal parts as weighted ZeRO-3 does them, with their rate beside that of equal parts.

NCCL runs them as a broadcast or a reduce for each rank (NVIDIA/nccl#773), gloo likewise; equal parts take one
collective. Values are 0 and 1, so that sums are exact in 16 bits up to 256 ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.common.extras import TRAINING, require
from ds_hetero.common.units import GB
from ds_hetero.errors import HeteroError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session
from ds_hetero.sharding.zero_partition import cut_parameter
from ds_hetero.values.splits import Split

_GATHER, _REDUCE = "uneven gather of ZeRO-3", "uneven reduce of ZeRO-3"
_ELEMENTS_OF_GPU = 32 * 2**20 + 3  # 64 MiB in 16 bits: a layer of some billion parameters
_ELEMENTS_OF_CPU = 2**20 + 3
_REPETITIONS = 3
_EXACT_SUMS = 256  # of ones, in bfloat16
_TIMES = 3.0  # the limit of a call: four collectives, each some times


def check_uneven_partitions(session: Session) -> Iterator[Line]:
    """Yield one line for gathers, one for reduces."""
    try:
        require(*TRAINING, purpose="ZeRO")
    except HeteroError as error:
        yield Line(_GATHER, "skip", str(error))
        return
    if not 1 < session.size <= _EXACT_SUMS:
        yield Line(_GATHER, "skip", f"for 2 to {_EXACT_SUMS} ranks, here is {session.size}")
        return
    from ds_hetero.frameworks.deepspeed.small_job import use_torchs_groups

    use_torchs_groups()
    elements = _ELEMENTS_OF_GPU if session.is_on_gpu else _ELEMENTS_OF_CPU
    cuts = {
        "uneven": cut_parameter(elements, [1 + rank % 3 for rank in range(session.size)]),
        "even": Split((elements // session.size + 1,) * session.size),
    }
    for name, run in ((_GATHER, _gather), (_REDUCE, _reduce)):
        with session.watch.call(name, times=_TIMES):
            tried = {kind: _timed(session, cut, elements, run) for kind, cut in cuts.items()}
        sent_bytes = 2 * elements * (session.size - 1) / session.size
        rates = {kind: sent_bytes / seconds for kind, (_, seconds) in tried.items()}
        wrong = [kind for kind, (is_right, _) in tried.items() if not is_right]
        if wrong:
            yield Line(name, "fail", f"other values than were sent, in {' and '.join(wrong)} parts")
        else:
            detail = f"{rates['uneven'] / GB:.3g} GB/s; of even parts {rates['even'] / GB:.3g}"
            yield Line(name, "pass", detail, rates["uneven"])


def _timed(
    session: Session, cut: Split, elements: int, run: Callable[[Tensor, Split], tuple[Tensor, Tensor]]
) -> tuple[bool, float]:
    """Whether all results are right on this rank; seconds of the slowest rank, the same on all."""
    bits = torch.arange(elements, device=session.device) % 2
    full = bits.to(session.trained_dtype)
    times, is_right = [], True
    for _ in range(1 + _REPETITIONS):  # the first connects
        dist.barrier(device_ids=[session.device.index] if session.is_on_gpu else None)
        began = time.perf_counter()
        found, expected = run(full, cut)
        if session.is_on_gpu:
            torch.cuda.synchronize(session.device)
        times.append(time.perf_counter() - began)
        is_right &= torch.equal(found, expected)
    slowest = max(on_all_ranks(lambda: median(times[1:])))
    return is_right, slowest


def _gather(full: Tensor, cut: Split) -> tuple[Tensor, Tensor]:
    """Return the whole, put together from shards; and what it should be."""
    from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import Gathering
    from ds_hetero.frameworks.deepspeed.zero.weighted_shards import own_shard

    world = dist.group.WORLD
    assert world is not None
    (gathered,) = Gathering([own_shard(full, cut, world)], [cut], world).wait()
    return gathered[: full.numel()], full


def _reduce(full: Tensor, cut: Split) -> tuple[Tensor, Tensor]:
    """Return this rank's shard of the sum; and what it should be."""
    from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import reduce_to_owners
    from ds_hetero.frameworks.deepspeed.zero.weighted_shards import own_shard

    world = dist.group.WORLD
    assert world is not None
    (shard,) = reduce_to_owners([full.clone()], [cut], world, divisor=1)
    return shard, own_shard(full * dist.get_world_size(), cut, world)
