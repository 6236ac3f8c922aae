"""Section "more_ranks": three ranks on one GPU, for cases that two cannot show."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from benchmarks.first_gpu.parts import Context, Part, Section
from benchmarks.first_gpu.sections import two_ranks
from benchmarks.first_gpu.small_pipeline import largest_difference, lone_stages, plan_of

_RANKS = 3
_WAITS_FOR_EVER = {"STRICT_GROUP_LOCK_S": "0"}  # in a rehearsal as on a card: the part's limit ends it


def used_by_some_first(context: Context) -> None:
    """Use a group without a communicator for a message between two of its three ranks, as its first call."""
    context.join(lazily=True)
    element = torch.zeros(1, device=context.device)
    context.report({"step": "begins"})
    if context.rank == 2:
        time.sleep(context.choose(10.0, 3.0))  # it calls nothing, as a rank outside a message does
    else:
        _exchange(context.rank, 1 - context.rank, element, None)
        context.synchronize()
        context.report({"step": "the message has passed"})


def used_by_all_first(context: Context) -> None:
    """Send the same message in a group that all its ranks have used once, as the package makes groups."""
    from ds_hetero.runtime.process_groups import ProcessGroups

    context.join(lazily=True)
    group = ProcessGroups().of(range(context.ranks), "as the package makes it")
    context.report({"step": "begins"})
    element = torch.zeros(1, device=context.device)
    if context.rank != 2:
        _exchange(context.rank, 1 - context.rank, element, group)
        context.synchronize()
    context.report({"step": "the message has passed"})


def _exchange(rank: int, peer: int, element: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    post = dist.isend if rank == 0 else dist.irecv
    for work in dist.batch_isend_irecv([dist.P2POp(post, element, peer, group)]):
        work.wait()


def three_stages(context: Context) -> None:
    """Train a pipeline of three stages, in which a gradient that is requested too early would wait for a forward."""
    context.join()
    differences = largest_difference(plan_of(lone_stages(context.ranks)), context.device, tied=True)
    context.report({"stages": "3 of one rank", **differences, "right": max(differences.values()) <= two_ranks.RIGHT})


def tensor_stage(context: Context) -> None:
    """Train a stage of one rank before a stage of two ranks that hold copies of their tokens."""
    from ds_hetero.values.plans import Stage

    context.join()
    stages = [Stage(ranks=(0,), layers=(0, 2)), Stage(ranks=(1, 2), layers=(2, 4), inner="tensor")]
    differences = largest_difference(plan_of(stages), context.device, tied=False)
    context.report({"stages": "1 and 2 ranks", **differences, "right": max(differences.values()) <= two_ranks.RIGHT})


SECTION = Section(
    name="more_ranks",
    budget_s=60,
    decides="whether three ranks run on one card, and whether groups are to be used by all ranks first",
    parts=(
        Part(name="used by all first", run=used_by_all_first, ranks=_RANKS, limit_s=20, strict=True),
        Part(
            name="used by some first",
            run=used_by_some_first,
            without_mps=True,
            ranks=_RANKS,
            limit_s=15,
            rehearsed_limit_s=5,
            outcomes=("done", "timed out", "failed", "left out"),
            strict=True,
            rehearsed_env=_WAITS_FOR_EVER,
        ),
        Part(name="three stages", run=three_stages, ranks=_RANKS, limit_s=20, strict=True),
        Part(
            name="tensor stage",
            run=tensor_stage,
            ranks=_RANKS,
            limit_s=20,
            strict=True,
            needs=("torch.distributed.all_gather_single",),
        ),
        Part(name="sub-rings", run=two_ranks.attention, ranks=_RANKS, limit_s=20, strict=True),
        Part(name="unequal collectives", run=two_ranks.unequal_collectives, ranks=_RANKS, limit_s=20),
        Part(
            name="self-test",
            run=two_ranks.selftest,
            without_mps=True,
            ranks=_RANKS,
            limit_s=60,
            not_rehearsed="section two_ranks has it",
        ),
    ),
)
