"""Slow the second of two ranks down: the cost of each strategy of the hetero-ring paper, and of a planned schedule.

    even           half of the tokens each
    proportional   tokens in proportion to the known speeds
    lut, formula   from times that rank 0 measured at every length and throttle setting
    plan           the planner's schedule, from a profile of the ranks

One attention layer runs, forward alone (prefill) and forward and backward (step), causal, float32. For every case:

    slowdown                   latency / latency of the even split on two equal ranks
    speedup                    latency of the even split on the same ranks / latency
    efficiency_against_bound   bound / latency. The bound is the time that rank 0 alone takes with one undivided kernel
                               call, divided by the sum of the speeds: all ranks busy to the end, nothing sent or merged
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.emulation.cluster import pair
from benchmarks.emulation.emulator import RankLab
from benchmarks.lab.planning import cost_model, measure_table, profile_ranks, scaled
from benchmarks.measure.contenders import Layer, Shape, make_engine
from benchmarks.measure.turns import take_turns
from ds_hetero.planner import strategy
from ds_hetero.runtime.attention.kernels import Band, SavedForward, Scores, select

STRATEGIES = ("even", "proportional", "lut", "formula", "plan")
PREFILL, STEP = "prefill", "step"
PUBLISHED = {
    "source": "hetero-ring paper (Columbia): two GPUs, the second throttled by MPS, Q, K, V of 1 x 8 x L x 64, prefill",
    "even_slowdown_at_10_percent": (5.0, 8.0),
    "proportional_slowdown_at_10_percent": 2.0,
    "best_speedup": 4.4,
    "efficiency": (0.40, 0.50),
}
_ALONE = "one rank alone"
_TABLE_LENGTHS = (1024, 2048, 4096, 8192)
_WARM_UP_TOKENS = 512


@dataclass(frozen=True)
class RingCase:
    """Lengths and scopes to measure at some fractions, with at most ``max_rounds`` turns of every strategy."""

    fractions: tuple[float, ...]
    tokens: tuple[int, ...]
    scopes: tuple[str, ...] = (PREFILL, STEP)
    max_rounds: int = 3


@dataclass(frozen=True)
class RingPlan:
    """The cases to measure.

    Args:
        cases: in this order.
        shape: of the layer.
        budget_s: seconds of one case after which no further round begins.
    """

    cases: tuple[RingCase, ...]
    shape: Shape
    budget_s: float

    @property
    def fractions(self) -> tuple[float, ...]:
        """All fractions, the largest first: slowdowns refer to equal speeds."""
        return tuple(sorted({f for case in self.cases for f in case.fractions}, reverse=True))


def measure(lab: RankLab, plan: RingPlan) -> dict[str, Any]:
    """Measure all cases on this rank; the result of rank 0 is complete."""
    steps = 1 + len(plan.fractions)
    lab.report(0, "profiling")
    profiled = profile_ranks(lab)
    table = measure_table(lab, plan.shape, _TABLE_LENGTHS, plan.fractions)
    fastest = lab.cluster.fastest_cores
    result: dict[str, Any] = {"cases": [], "speeds": [], "table": asdict(table)}
    for num_done, fraction in enumerate(plan.fractions, start=1):
        lab.set_speeds(pair(fraction).cores)
        result["speeds"].append({"slow_fraction": fraction, "text": lab.describe(), **lab.to_dict()})
        cluster = scaled(profiled, [cores / _profile_cores(fastest) for cores in pair(fraction).cores])
        for tokens, scopes, max_rounds in _lengths(plan, fraction):
            lab.report(num_done / steps, f"second rank at {fraction:.0%}, {tokens} tokens")
            cost = cost_model(cluster, plan.shape, tokens)
            schedules = {name: strategy(name, cost, table) for name in STRATEGIES}
            engines = {name: make_engine(name, schedule, plan.shape) for name, schedule in schedules.items()}
            for engine in engines.values():
                engine.layer(plan.shape, _WARM_UP_TOKENS)()
            layers = {name: engine.layer(plan.shape, tokens) for name, engine in engines.items()}
            for scope in scopes:
                actions = {name: _action(layer, scope) for name, layer in layers.items()}
                actions[_ALONE] = bound_action(plan.shape, tokens, scope == STEP)
                turns = take_turns(actions, max_rounds, plan.budget_s, lab.own_pids)
                result["cases"].append(
                    {
                        "slow_fraction": fraction,
                        "tokens": tokens,
                        "scope": scope,
                        "split": {name: list(s.tokens(tokens).values()) for name, s in schedules.items()},
                        **asdict(turns),
                    }
                )
    return result


def _profile_cores(fastest: float) -> float:
    return min(fastest, 1.2 / 2)


def _lengths(plan: RingPlan, fraction: float) -> list[tuple[int, tuple[str, ...], int]]:
    cases = [case for case in plan.cases if fraction in case.fractions]
    return [(tokens, case.scopes, case.max_rounds) for case in cases for tokens in case.tokens]


def _action(layer: Layer, scope: str) -> Callable[[], object]:
    return layer.forward if scope == PREFILL else layer


def bound_action(shape: Shape, tokens: int, with_backward: bool) -> Callable[[], object]:
    """Return an action that runs the whole layer on rank 0 with one kernel call per pass.

    The other ranks do nothing.
    """
    if dist.get_rank() != 0:
        return lambda: None
    kernel = select(torch.device("cpu"), torch.float32, shape.head_dim, None, None)
    q, k, v, dout = (
        torch.randn(shape.batch_size, tokens, heads, shape.head_dim).transpose(1, 2)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    )
    band, scores = Band(None, 0), Scores(shape.head_dim**-0.5)

    def run() -> None:
        out, lse = kernel.forward(q, k, v, scores, band)
        if with_backward:
            kernel.backward(dout, SavedForward(q, k, v, out, lse), scores, band)

    return run


# --- from times to rows -----------------------------------------------------------------------------


def summarize(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per strategy and case."""
    homogeneous = {
        (case["tokens"], case["scope"]): _median(case, "even") for case in cases if case["slow_fraction"] == 1.0
    }
    rows = []
    for case in cases:
        fraction, tokens, scope = case["slow_fraction"], case["tokens"], case["scope"]
        bound_s = _median(case, _ALONE) / (1 + fraction)
        for name in STRATEGIES:
            latency_s = _median(case, name)
            equal_s = homogeneous.get((tokens, scope))
            rows.append(
                {
                    "strategy": name,
                    "slow_fraction": fraction,
                    "tokens": tokens,
                    "scope": scope,
                    "latency_s": latency_s,
                    "slowdown": equal_s and latency_s / equal_s,
                    "efficiency": equal_s and equal_s / latency_s,
                    "speedup": _median(case, "even") / latency_s,
                    "efficiency_against_bound": bound_s / latency_s,
                    "bound_s": bound_s,
                    "bound_speedup": _median(case, "even") / bound_s,
                    "rounds": len(case["seconds"][name]),
                    "spread": max(case["seconds"][name]) / min(case["seconds"][name]) - 1,
                    "split": case["split"][name],
                    "foreign_cores": case["foreign_cores"],
                }
            )
    return rows


def _median(case: dict[str, Any], name: str) -> float:
    return float(median(case["seconds"][name]))
