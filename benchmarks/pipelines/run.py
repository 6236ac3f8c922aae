"""Run on the ranks of the lab: engines of all plans, alternating steps, peaks of memory, a rank that becomes slow."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.emulation.emulator import RankLab
from benchmarks.lab.planning import product_rate, profile_machine, scaled
from benchmarks.measure.turns import take_turns
from benchmarks.pipelines.plans import Candidate, Task, equal_stages, predicted_s
from ds_hetero.cluster import Cluster

STOCK, MACHINE = "deepspeed", "machine"  # what has turns beside the plans
_WARM_UPS = 2
_WINDOW_S = 0.3  # of a timing of the profile: the scheduler gives a rank its share every 10 ms
_SPEED_S = 0.5  # of a look at how fast the machine is
T = TypeVar("T")


@dataclass(frozen=True)
class Contest:
    """The measurement.

    Args:
        task: to train.
        choose: makes the plans of a cluster and a task, with a largest number.
        plans: largest number of plans; 0 for all.
        rounds: turns of every contender at most.
        budget_s: seconds after which no further round begins.
    """

    task: Task
    choose: Callable[[Cluster, Task, int], list[Candidate]]
    plans: int
    rounds: int
    budget_s: float


def measure_plans(lab: RankLab, contest: Contest) -> dict[str, Any]:
    """Return steps of our plan, of baselines and of other plans, in turn; the same on every rank."""
    profile = profile_of(lab)
    cluster = at_asked_speeds(lab, profile)
    candidates = of_rank_0(lambda: contest.choose(cluster, contest.task, contest.plans))
    return _by_turns(lab, contest, [*candidates], profile)


def measure_equal(lab: RankLab, contest: Contest) -> dict[str, Any]:
    """Return steps of equal stages under this engine and under DeepSpeed's, in turn."""
    profile = profile_of(lab)
    cluster = at_asked_speeds(lab, profile)
    return _by_turns(lab, contest, of_rank_0(lambda: [equal_stages(cluster, contest.task)]), profile)


def _by_turns(lab: RankLab, contest: Contest, candidates: list[Candidate], profile: Profile) -> dict[str, Any]:
    """Run steps in turn, and between them measure how fast the ranks are.

    Plans are chosen before, at the requested speeds. Their steps are predicted again for the speeds that ranks had
    during the turns: a machine may be faster or slower then than while it was profiled.
    """
    from benchmarks.pipelines.contenders import step_of, stock_step

    lab.report(0.1, "making engines")
    steps = {STOCK: stock_step(contest.task)}  # before any of ours is registered
    for candidate in candidates:
        steps[candidate.name] = step_of(candidate.plan, contest.task)
    cpu_s: dict[str, list[float]] = {name: [] for name in steps}
    steps = {name: _counted(step, cpu_s[name]) for name, step in steps.items()}
    losses = {}
    for done, (name, step) in enumerate(steps.items()):
        lab.report(0.2 + 0.2 * done / len(steps), f"warming up {name}")
        losses[name] = [step() for _ in range(_WARM_UPS)]
    gc.collect()
    lab.report(0.5, "by turns")
    rates: list[float] = []
    looks = {MACHINE: lambda: rates.append(product_rate(_SPEED_S))}
    turns = take_turns({**looks, **steps}, contest.rounds, contest.budget_s, lab.own_pids)
    del turns.seconds[MACHINE]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, {name: median(spent[_WARM_UPS:]) for name, spent in cpu_s.items()})
    speeds = speeds_meanwhile(lab, median(rates) / profile[1])
    meanwhile = of_rank_0(
        lambda: {
            candidate.name: predicted_s(scaled(profile[0], speeds), contest.task, candidate.plan)
            for candidate in candidates
        }
    )
    return {
        **lab.to_dict(),
        "text": lab.describe(),
        "task": asdict(contest.task),
        "losses": losses,
        "cpu_s": {name: [of_rank[name] for of_rank in by_rank] for name in steps},
        "speeds_meanwhile": speeds,
        "plans": {
            candidate.name: {
                "chosen_at_s": candidate.predicted_s,
                "predicted_s": meanwhile[candidate.name],
                "plan": candidate.plan.to_dict(),
            }
            for candidate in candidates
        },
        **asdict(turns),
    }


def _counted(step: Callable[[], float], cpu_s: list[float]) -> Callable[[], float]:
    """Return the step, which also records the CPU time of this rank's thread; waiting does not count."""

    def run() -> float:
        begin_s = time.thread_time()
        loss = step()
        cpu_s.append(time.thread_time() - begin_s)
        return loss

    return run


def cluster_of(lab: RankLab) -> Cluster:
    """Return the planner's knowledge: ranks profiled at equal speed, and scaled to theirs. Caller: every rank."""
    return at_asked_speeds(lab, profile_of(lab))


Profile = tuple[Cluster, float]
"""Ranks profiled at equal speed, and the rate of their products meanwhile."""


def profile_of(lab: RankLab) -> Profile:
    """Profile the ranks at equal speed. Caller: every rank."""
    lab.report(0, "profiling")
    return profile_machine(lab, _WINDOW_S)


def at_asked_speeds(lab: RankLab, profile: Profile) -> Cluster:
    """Return the cluster of the profile with every rank at the speed that was asked for. Caller: every rank."""
    profile_cores = min(max(lab.cluster.cores), 1.2 / dist.get_world_size())
    return of_rank_0(lambda: scaled(profile[0], [cores / profile_cores for cores in lab.cluster.cores]))


def speeds_meanwhile(lab: RankLab, local_speed: float) -> list[float]:
    """Return the speeds of all ranks over those of the profile; equal where equal ones were requested.

    Caller: every rank.
    """
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, local_speed)
    alike = {
        cores: [s for s, c in zip(by_rank, lab.cluster.cores, strict=True) if c == cores] for cores in lab.cluster.cores
    }
    return [mean(alike[cores]) for cores in lab.cluster.cores]


def of_rank_0(make: Callable[[], T]) -> T:
    """Return the result of ``make`` on rank 0. Caller: every rank."""
    box: list[Any] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    value: T = box[0]
    return value
