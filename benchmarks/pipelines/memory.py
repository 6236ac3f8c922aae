"""Compare the peak memory of every rank under a plan with the plan's prediction.

Counted are torch's allocations: the bytes of a rank between two steps (parameters, owned values, optimizer state), and
the largest increase during a step. Memory of the interpreter, of libraries and of gloo is not counted, as in plans.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.emulation.emulator import RankLab
from benchmarks.measure.allocations import peak_allocations
from benchmarks.pipelines.plans import Candidate
from benchmarks.pipelines.run import Contest, cluster_of, of_rank_0
from ds_hetero.gradient_sync.shards import local_tensor

_REPEATS = 3


def measure_memory(lab: RankLab, contest: Contest) -> dict[str, Any]:
    """Return the peaks under every plan, one engine after the other; the same on every rank."""
    cluster = cluster_of(lab)
    candidates = of_rank_0(lambda: contest.choose(cluster, contest.task, contest.plans))
    plans = {}
    staged = [candidate for candidate in candidates if not candidate.plan.is_replicas]
    for done, candidate in enumerate(staged):
        lab.report(0.1 + 0.9 * done / len(candidates), f"memory of {candidate.name}")
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, _peak_bytes(candidate, contest))
        plans[candidate.name] = {
            "plan": candidate.plan.to_dict(),
            "bytes": dict(enumerate(peaks)),
            "predicted_bytes": candidate.memory_bytes,
        }
    return {**lab.to_dict(), "text": lab.describe(), "task": asdict(contest.task), "plans": plans}


def _peak_bytes(candidate: Candidate, contest: Contest) -> int:
    """Return the peak of this rank under one plan."""
    from benchmarks.pipelines.contenders import batch_of, engine_of, step_with

    engine = engine_of(candidate.plan, contest.task)
    step = step_with(engine, batch_of(contest.task))
    step()  # the optimizer's state exists afterwards

    def settle() -> None:
        gc.collect()
        dist.barrier()

    rise = min(peak_allocations(step, _REPEATS, settle))
    held_bytes = sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _held_tensors(engine)}.values()
    )
    engine.destroy()
    return held_bytes + rise


def _held_tensors(engine: Any) -> Iterator[Tensor]:
    """Yield the bytes that a rank holds between steps."""
    optimizer = engine.optimizer
    yield from map(local_tensor, engine.module.parameters())
    yield from engine.module.buffers()
    for owned in optimizer.sync.owned.values():
        yield owned
        yield from (entry for entry in optimizer.inner.state[owned].values() if isinstance(entry, torch.Tensor))
