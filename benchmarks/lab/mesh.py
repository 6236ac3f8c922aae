"""Measure the tokens per second of all contenders on four ranks in two unequal nodes with a slow link.

    stock          DeepSpeed Ulysses
    torch-ring     torch's ring attention
    ring, usp 2x2  this engine with the uniform schedules of ring attention and USP; Ulysses is stock's own
    proportional   this engine, a ring with tokens by speed
    pairs          this engine, the best two groups of two: heads by speed inside a group, tokens by speed between them
    plan           this engine, the planner's schedule

One attention layer (forward and backward) and whole training steps of a small Llama with grouped heads run alternately
in the same processes. The bound is the time of rank 0 alone with the whole sequence, times its share of the sum of
speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.emulation.emulator import RankLab
from benchmarks.lab.planning import cost_model, profile_ranks, scaled
from benchmarks.lab.ring import bound_action
from benchmarks.measure.contenders import Shape, make_contender, make_engine
from benchmarks.measure.turns import take_turns
from ds_hetero.cost.model import CostModel
from ds_hetero.planner import strategy
from ds_hetero.values.baselines import ring, usp
from ds_hetero.values.schedule import Group, Schedule

UNIFORM = ("stock", "torch-ring", "ring", "usp 2x2")
CONTENDERS = (*UNIFORM, "proportional", "pairs", "plan")
LAYER, STEP = "attention", "training step"
_PEERS = ("stock", "torch-ring")
_ALONE = "one rank alone"
_WARM_UP_TOKENS = 512


@dataclass(frozen=True)
class MeshCase:
    """One line of the table."""

    speeds: tuple[float, ...]
    scope: str
    tokens: int
    contenders: tuple[str, ...] = CONTENDERS


@dataclass(frozen=True)
class MeshPlan:
    """The cases to measure.

    Args:
        cases: in this order; steps come after layers, because stock stays registered.
        shape: of the model.
        max_rounds: turns of every contender at most.
        budget_s: seconds of one case after which no further round begins.
    """

    cases: tuple[MeshCase, ...]
    shape: Shape
    max_rounds: int
    budget_s: float


def measure(lab: RankLab, plan: MeshPlan) -> dict[str, Any]:
    """Measure all cases on this rank; the result of rank 0 is complete."""
    lab.report(0, "profiling")
    profiled = profile_ranks(lab)
    profile_cores = min(max(lab.cluster.cores), 1.2 / dist.get_world_size())
    total = sum(lab.cluster.cores)
    result: dict[str, Any] = {"cases": [], "emulation": []}
    layers, steps = _Layers(plan), _Steps(plan)
    speeds: tuple[float, ...] = ()
    for num_done, case in enumerate(plan.cases):
        lab.report((1 + num_done) / (1 + len(plan.cases)), f"{case.scope}, {case.tokens} tokens, speeds {case.speeds}")
        if case.speeds != speeds:
            speeds = case.speeds
            cores = [total * speed / sum(speeds) for speed in speeds]
            lab.set_speeds(cores)
            result["emulation"].append({"speeds": speeds, "text": lab.describe(), **lab.to_dict()})
        cluster = scaled(profiled, [share / profile_cores for share in cores])
        cost = cost_model(cluster, plan.shape, case.tokens)
        schedules = {name: _schedule(name, cost, speeds) for name in case.contenders if name not in _PEERS}
        actions = (layers if case.scope == LAYER else steps).actions(case, schedules)
        turns = take_turns(actions, plan.max_rounds, plan.budget_s, lab.own_pids)
        result["cases"].append(
            asdict(case) | asdict(turns) | {"schedules": {name: s.to_dict() for name, s in schedules.items()}}
        )
    return result


def _schedule(name: str, cost: CostModel, speeds: Sequence[float]) -> Schedule:
    heads = (cost.model.num_heads, cost.model.num_kv_heads)
    if name == "ring":
        return ring(len(speeds), *heads)
    if name == "usp 2x2":
        return usp(len(speeds), *heads, 2)
    return best_pairs(cost, speeds) if name == "pairs" else strategy(name, cost)


def best_pairs(cost: CostModel, speeds: Sequence[float]) -> Schedule:
    """Return the predicted fastest schedule of two groups of two ranks, over all pairings and all divisions of heads.

    Groups share tokens by the speed that their division of heads allows; ranks of a group by their speeds.
    """
    heads = cost.model.num_heads
    pairings = (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)))
    candidates = []
    for pairing, cuts in product(pairings, product(range(1, heads), repeat=2)):
        groups = []
        for ranks, cut in zip(pairing, cuts, strict=True):
            by_rank = (cut, heads - cut)
            speed = min(speeds[rank] * heads / num_heads for rank, num_heads in zip(ranks, by_rank, strict=True))
            group_speed = sum(speeds[rank] for rank in ranks)
            tokens = tuple(speed * speeds[rank] / group_speed for rank in ranks)
            groups.append(Group(ranks=ranks, tokens=tokens, heads=by_rank))
        candidates.append(Schedule(num_heads=heads, num_kv_heads=cost.model.num_kv_heads, groups=tuple(groups)))
    return min(candidates, key=lambda schedule: cost.predict(schedule).iteration_s)


class _Layers:
    """Attention layers of the contenders."""

    def __init__(self, plan: MeshPlan) -> None:
        self._shape = plan.shape

    def actions(self, case: MeshCase, schedules: Mapping[str, Schedule]) -> dict[str, Callable[[], object]]:
        """Return the calls to time, by name."""
        actions: dict[str, Callable[[], object]] = {}
        for name in case.contenders:
            make = partial(make_contender, name) if name in _PEERS else partial(make_engine, name, schedules[name])
            contender = make(self._shape)
            contender.layer(self._shape, _WARM_UP_TOKENS)()
            actions[name] = contender.layer(self._shape, case.tokens)
        return actions | {_ALONE: bound_action(self._shape, case.tokens, with_backward=True)}


class _Steps:
    """Models and engines, made once, because stock can be registered only once per process."""

    def __init__(self, plan: MeshPlan) -> None:
        self._shape = plan.shape
        self._longest = max(case.tokens for case in plan.cases)
        self._made: dict[str | Schedule, Callable[[int], float]] = {}

    def actions(self, case: MeshCase, schedules: Mapping[str, Schedule]) -> dict[str, Callable[[], object]]:
        """Return the calls to time, by name."""
        actions: dict[str, Callable[[], object]] = {}
        for name in case.contenders:
            actions[name] = partial(self._step(schedules.get(name, name)), case.tokens)
        alone = self._step(_ALONE) if dist.get_rank() == 0 else None
        return actions | {_ALONE: partial(alone, case.tokens) if alone else lambda: None}

    def _step(self, which: str | Schedule) -> Callable[[int], float]:
        from benchmarks.measure.training import alone_step, make_scheduled_step, make_step

        if which not in self._made:
            if which == _ALONE:
                step = alone_step(self._shape, self._longest)
            elif isinstance(which, Schedule):
                step = make_scheduled_step(which, self._shape, self._longest)
            else:
                step = make_step(which, self._shape, self._longest)
            step(_WARM_UP_TOKENS)
            self._made[which] = step
        return self._made[which]


# --- from times to rows -----------------------------------------------------------------------------


def summarize(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per contender and case."""
    rows = []
    for case in cases:
        medians = {name: median(seconds) for name, seconds in case["seconds"].items()}
        bound_s = medians[_ALONE] * case["speeds"][0] / sum(case["speeds"])
        best_uniform = min((name for name in medians if name in UNIFORM), key=lambda name: medians[name])
        for name in case["contenders"]:
            paired = [a / b for a, b in zip(case["seconds"][best_uniform], case["seconds"][name], strict=True)]
            rows.append(
                {
                    "contender": name,
                    "scope": case["scope"],
                    "tokens": case["tokens"],
                    "speeds": case["speeds"],
                    "seconds": medians[name],
                    "tokens_per_s": case["tokens"] / medians[name],
                    "over_best_uniform": median(paired),
                    "best_uniform": best_uniform,
                    "efficiency_against_bound": bound_s / medians[name],
                    "bound_s": bound_s,
                    "rounds": len(paired),
                    "spread": max(case["seconds"][name]) / min(case["seconds"][name]) - 1,
                    "foreign_cores": case["foreign_cores"],
                }
            )
    return rows
