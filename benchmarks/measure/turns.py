"""Run contenders alternately in the same processes, so that disturbances of the machine affect all of them.

Every run starts at a barrier, and its time is that of the slowest rank. Every second round is in reverse order. There
are two forms: `alternate` warms up, and then makes a number of rounds that it has computed before; `take_turns` makes
rounds while its budget lasts, of contenders that were warm before.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure.machine import cpu_s_of, machine_busy_s
from benchmarks.measure.ranks import Report

_WARM_UPS = 2  # pages, caches, connections; and the plans that ours keeps by batch layout
_MAX_PAIRS = 101

Actions = Mapping[str, Callable[[], object]]


@dataclass
class Turns:
    """Results of the rounds.

    Args:
        seconds: of the slowest rank, by contender and round.
        foreign_cores: cores that other processes of the machine used meanwhile.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    foreign_cores: float = 0.0

    def spread(self, name: str) -> float:
        """Return largest over smallest time of a contender, minus one."""
        return max(self.seconds[name]) / min(self.seconds[name]) - 1


def alternate(actions: Actions, budget_s: float, min_pairs: int, report: Report, own_pids: Sequence[int]) -> Turns:
    """Warm up, then run the actions in rounds for about ``budget_s``.

    Args:
        actions: by contender.
        budget_s: seconds for all rounds and the warm-up.
        min_pairs: least number of rounds, however long they take.
        report: called with the share that is done, 0 to 1.
        own_pids: process ids of the measurement besides the ranks.

    Caller: every rank.
    """
    _freeze()
    begin = time.perf_counter()
    warm_up: list[list[float]] = []
    for done in range(_WARM_UPS):
        report(done / (_WARM_UPS + min_pairs), "warming up")
        warm_up.append([timed_run(action) for action in actions.values()])
    left_s = budget_s - (time.perf_counter() - begin)
    pairs = _of_rank_0(number_of_pairs(sum(warm_up[-1]), left_s, min_pairs))
    with _measured(actions, own_pids) as turns:
        for pair in range(pairs):
            report((_WARM_UPS + pair) / (_WARM_UPS + pairs), f"pair {pair + 1} of {pairs}")
            _run_round(actions, turns, backwards=pair % 2 == 0)
    return turns


def take_turns(actions: Actions, max_rounds: int, budget_s: float, own_pids: Sequence[int]) -> Turns:
    """Run the actions in rounds while ``budget_s`` lasts.

    Except for the first one, a round that would not fit into the rest of the budget is not begun.

    Args:
        actions: by contender; they are warm.
        max_rounds: largest number of rounds.
        budget_s: seconds for all rounds.
        own_pids: process ids of the measurement besides the ranks.

    Caller: every rank.
    """
    _freeze()
    with _measured(actions, own_pids) as turns:
        begin = time.perf_counter()
        for done in range(max_rounds):
            used_s = time.perf_counter() - begin
            if done and not _of_rank_0(int(used_s * (1 + 1 / done) <= budget_s)):
                break
            _run_round(actions, turns, backwards=done % 2 == 1)
    return turns


def number_of_pairs(pair_s: float, left_s: float, min_pairs: int) -> int:
    """Return how many pairs of ``pair_s`` fit into ``left_s``, at least ``min_pairs``.

    Odd, so that one is the median.
    """
    pairs = max(min(int(left_s / pair_s), _MAX_PAIRS), min_pairs)
    return pairs - 1 + pairs % 2


def timed_run(action: Callable[[], object]) -> float:
    """Return the seconds of this rank from a barrier to the end of ``action``."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _freeze() -> None:
    """Exempt the objects that DeepSpeed and transformers made from garbage collections during runs."""
    gc.collect()
    gc.freeze()


def _run_round(actions: Actions, turns: Turns, *, backwards: bool) -> None:
    for name in reversed(list(actions)) if backwards else list(actions):
        turns.seconds[name].append(timed_run(actions[name]))


@contextmanager
def _measured(actions: Actions, own_pids: Sequence[int]) -> Iterator[Turns]:
    """Yield turns without a run; at the end keep the slowest rank's times, and count the cores that others used."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    pids += own_pids
    turns = Turns({name: [] for name in actions})
    busy_s, own_s, begin = machine_busy_s(), cpu_s_of(pids), time.perf_counter()
    yield turns
    foreign_s = machine_busy_s() - busy_s - (cpu_s_of(pids) - own_s)
    turns.foreign_cores = max(0.0, foreign_s / (time.perf_counter() - begin))
    turns.seconds = {name: _slowest(values) for name, values in turns.seconds.items()}


def _of_rank_0(number: int) -> int:
    """Return rank 0's number on every rank."""
    box = torch.tensor(number)
    dist.broadcast(box, src=0)
    return int(box)


def _slowest(seconds: list[float]) -> list[float]:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()
