"""On the ranks of the lab: engines of all plans, steps by turns, peaks of memory, a rank that loses speed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.emulation.emulator import RankLab
from benchmarks.lab.planning import profile_ranks, scaled
from benchmarks.measure.turns import take_turns
from benchmarks.pipelines.plans import Candidate, Task, equal_stages
from ds_hetero.cluster import Cluster

STOCK = "deepspeed"
_WARM_UPS = 2
_WINDOW_S = 0.3  # of a timing of the profile: the scheduler gives a rank its share every 10 ms
T = TypeVar("T")


@dataclass(frozen=True)
class Contest:
    """What is measured.

    Args:
        task: what is trained.
        choose: makes the plans of a cluster and a task, so many at most.
        plans: of them, at most; 0 for all.
        rounds: turns of every contender at most.
        budget_s: after which no further round begins.
    """

    task: Task
    choose: Callable[[Cluster, Task, int], list[Candidate]]
    plans: int
    rounds: int
    budget_s: float


def measure_plans(lab: RankLab, contest: Contest) -> dict[str, Any]:
    """Steps of ours, of its rivals and of other plans, by turns; the same on every rank."""
    cluster = cluster_of(lab)
    chosen = of_rank_0(lambda: contest.choose(cluster, contest.task, contest.plans))
    return _by_turns(lab, contest, [*chosen])


def measure_equal(lab: RankLab, contest: Contest) -> dict[str, Any]:
    """Steps of equal stages under this engine and under DeepSpeed's, by turns."""
    cluster = cluster_of(lab)
    return _by_turns(lab, contest, of_rank_0(lambda: [equal_stages(cluster, contest.task)]))


def _by_turns(lab: RankLab, contest: Contest, chosen: list[Candidate]) -> dict[str, Any]:
    from benchmarks.pipelines.contenders import step_of, stock_step

    lab.report(0.1, "making engines")
    steps = {STOCK: stock_step(contest.task)}  # before any of ours is registered
    for candidate in chosen:
        steps[candidate.name] = step_of(candidate.plan, contest.task)
    losses = {}
    for done, (name, step) in enumerate(steps.items()):
        lab.report(0.2 + 0.2 * done / len(steps), f"warming up {name}")
        losses[name] = [step() for _ in range(_WARM_UPS)]
    gc.collect()
    lab.report(0.5, "by turns")
    turns = take_turns(steps, contest.rounds, contest.budget_s, lab.own_pids)
    return {
        **lab.to_dict(),
        "text": lab.describe(),
        "task": asdict(contest.task),
        "losses": losses,
        "plans": {
            candidate.name: {"predicted_s": candidate.predicted_s, "plan": candidate.plan.to_dict()}
            for candidate in chosen
        },
        **asdict(turns),
    }


def cluster_of(lab: RankLab) -> Cluster:
    """What the planner may know: ranks profiled at equal speed, and scaled to their own."""
    lab.report(0, "profiling")
    profiled = profile_ranks(lab, _WINDOW_S)
    profile_cores = min(max(lab.cluster.cores), 1.2 / dist.get_world_size())
    return of_rank_0(lambda: scaled(profiled, [cores / profile_cores for cores in lab.cluster.cores]))


def of_rank_0(make: Callable[[], T]) -> T:
    """Return what ``make`` returns on rank 0. Caller: every rank."""
    box: list[Any] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    made: T = box[0]
    return made
