"""Slow a rank down during a run: how soon have layers moved away from it, and how long does a step take then?"""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.emulation.emulator import RankLab
from benchmarks.measure.turns import timed_run
from benchmarks.pipelines.plans import equal_stages
from benchmarks.pipelines.run import Contest, cluster_of, of_rank_0

SLOWED_RANK, SLOWED_TO = 1, 0.4
_BEFORE, _AFTER = 10, 30
_JUDGED = 8  # steps at the end


def measure_replan(lab: RankLab, contest: Contest) -> dict[str, Any]:
    """Return steps of equal stages with re-planning, on ranks of which one becomes slow; the same on every rank."""
    from benchmarks.pipelines.contenders import batch_of, engine_of, step_with

    cluster = cluster_of(lab)
    candidate = of_rank_0(lambda: equal_stages(cluster, contest.task))
    batch = batch_of(contest.task)
    fixed = engine_of(candidate.plan, contest.task)
    watched = engine_of(candidate.plan, contest.task, {"replan": {"enabled": True}})
    steps = {"fixed": step_with(fixed, batch), "watched": step_with(watched, batch)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    layers = []
    for number in range(_BEFORE + _AFTER):
        lab.report(number / (_BEFORE + _AFTER), "a rank at 40 %" if number >= _BEFORE else "before the slowdown")
        if number == _BEFORE and lab.rank == SLOWED_RANK:
            lab.change_speed(lab.cluster.cores[SLOWED_RANK] * SLOWED_TO)
        for name, step in steps.items():
            seconds[name].append(_slowest_s(lambda step=step, name=name: losses[name].append(step())))
        layers.append(_layers_by_rank(watched))
    lost_at = next((n for n, by_rank in enumerate(layers) if by_rank != layers[0]), None)
    return {
        **lab.to_dict(),
        "text": lab.describe(),
        "task": asdict(contest.task),
        "seconds": seconds,
        "layers": layers,
        "steps_until_moved": None if lost_at is None else lost_at - _BEFORE,
        "loss_difference": max(abs(a - b) for a, b in zip(losses["fixed"], losses["watched"], strict=True)),
        "gain": median(seconds["fixed"][-_JUDGED:]) / median(seconds["watched"][-_JUDGED:]),
    }


def _layers_by_rank(engine: Any) -> list[int]:
    layers = {name.split(".")[2] for name, _ in engine.module.named_parameters() if name.startswith("model.layers.")}
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, len(layers))
    return by_rank


def _slowest_s(step: Any) -> float:
    box = torch.tensor(timed_run(step), dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)
