"""Contenders by turns in the same processes, so that whatever happens to the machine happens to all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.emulation.emulator import RankLab
from benchmarks.measure.machine import cpu_s_of, machine_busy_s
from benchmarks.measure.turns import timed_run

__all__ = ["Turns", "take_turns"]


@dataclass(frozen=True)
class Turns:
    """What came of it.

    Args:
        seconds: of the slowest rank, by contender and round.
        foreign_cores: cores that others used meanwhile.
    """

    seconds: dict[str, list[float]]
    foreign_cores: float

    def spread(self, name: str) -> float:
        """Largest over smallest, minus one."""
        return max(self.seconds[name]) / min(self.seconds[name]) - 1


def take_turns(lab: RankLab, actions: Mapping[str, Callable[[], object]], max_rounds: int, budget_s: float) -> Turns:
    """Run every action once a round, every second round the other way round, while ``budget_s`` lasts.

    Every run starts at a barrier, and its time is that of the slowest rank. A round that would not fit into what is
    left of the budget is not begun, the first one excepted. What needs warming up has been run before.

    Caller: every rank.
    """
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    pids += lab.own_pids
    busy_s, own_s, begin = machine_busy_s(), cpu_s_of(pids), time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for done in range(max_rounds):
        used_s = time.perf_counter() - begin
        if done and not _rank_0_says(used_s * (1 + 1 / done) <= budget_s):
            break
        for name in reversed(list(actions)) if done % 2 else list(actions):
            times[name].append(timed_run(actions[name]))
    foreign_s = machine_busy_s() - busy_s - (cpu_s_of(pids) - own_s)
    foreign_cores = max(0.0, foreign_s / (time.perf_counter() - begin))
    return Turns({name: _slowest(values) for name, values in times.items()}, foreign_cores)


def _rank_0_says(yes: bool) -> bool:
    box = torch.tensor(int(yes))
    dist.broadcast(box, src=0)
    return bool(box)


def _slowest(seconds: list[float]) -> list[float]:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()
