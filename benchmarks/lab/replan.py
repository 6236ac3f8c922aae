"""Slow a rank down during a run: how soon does the job adapt, and what do observations cost if nothing happens?

Two ranks train a small Llama; from one step on the second runs at 40 % of its speed, without notice. There are three
engines:

    fixed      an even schedule that stays
    replanned  starts even, with ``"replan": {"enabled": true}``
    optimum    tokens by the new speeds, measured after the slowdown

Before that, fixed and replanned take undisturbed steps alternately: the difference is the cost of observations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.emulation.emulator import RankLab
from benchmarks.measure.contenders import Shape
from benchmarks.measure.turns import timed_run
from ds_hetero.values.baselines import proportional, ring

SLOWED_TO = 0.4
RECOVERED = 0.9
_WARM_UPS = 3
_COMPARED_STEPS = 7


@dataclass(frozen=True)
class ReplanPlan:
    """The measurement.

    Args:
        tokens: of a sequence.
        shape: of the model.
        calm_steps: undisturbed alternating steps of both engines.
        before, after: steps of the replanned engine before and after the slowdown.
        interval_steps, min_gain: of the section.
    """

    tokens: int
    shape: Shape
    calm_steps: int
    before: int
    after: int
    interval_steps: int = 5
    min_gain: float = 0.05


def measure(lab: RankLab, plan: ReplanPlan) -> dict[str, Any]:
    """Measure everything on this rank."""
    from benchmarks.measure.training import make_loaded_step

    heads = (plan.shape.num_heads, plan.shape.num_kv_heads)
    result: dict[str, Any] = {"text": lab.describe(), **lab.to_dict()}
    section = {"enabled": True, "interval_steps": plan.interval_steps, "min_gain": plan.min_gain}
    even, adapted = ring(2, *heads), proportional((1.0, SLOWED_TO), *heads)
    fixed, _ = make_loaded_step(even, plan.shape, plan.tokens, {"enabled": False})
    optimum, _ = make_loaded_step(adapted, plan.shape, plan.tokens, {"enabled": False})
    watched, handle = make_loaded_step(even, plan.shape, plan.tokens, section)
    for step in (fixed, optimum, watched):
        for _ in range(_WARM_UPS):
            step()
    lab.report(0.05, "undisturbed, by turns")
    calm = _by_turns({"fixed": fixed, "watched": watched}, plan.calm_steps)
    result |= {"calm": calm, "calm_switches": len(handle.schedule_changes)}
    lab.report(0.45, "before the slowdown")
    seconds = [_slowest_s(watched) for _ in range(plan.before)]
    lab.report(0.5, f"second rank at {SLOWED_TO:.0%}")
    if dist.get_rank() == 1:
        lab.change_speed(lab.cluster.cores[1] * SLOWED_TO)
    steps_so_far = _WARM_UPS + plan.calm_steps + plan.before
    seconds += [_slowest_s(watched) for _ in range(plan.after)]
    result |= {
        "seconds": seconds,
        "slowed_at": plan.before,
        "switched_at": [change.step - steps_so_far for change in handle.schedule_changes],
        "split": list(handle.schedule.tokens(plan.tokens).values()),
    }
    lab.report(0.85, "the optimum for the new speeds, and no change at all")
    return result | {"slow": _by_turns({"optimum": optimum, "fixed": fixed, "watched": watched}, _COMPARED_STEPS)}


def _by_turns(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return seconds of the slowest rank by engine and round; every second round runs in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in reversed(list(steps)) if number % 2 else list(steps):
            seconds[name].append(_slowest_s(steps[name]))
    return seconds


def _slowest_s(step: Callable[[], object]) -> float:
    box = torch.tensor(timed_run(step), dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


# --- from times to rows -----------------------------------------------------------------------------


def summarize(measured: Mapping[str, Any], tokens: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return one row per step of the disturbed run, and the results of both runs.

    A step's share of the optimum is the optimum's median time over its own. The job has recovered at the first step
    after which the median of five steps around every step stays at nine tenths of the optimum.
    """
    optimum_s = median(measured["slow"]["optimum"])
    slowed_at, seconds = measured["slowed_at"], measured["seconds"]
    rows = [
        {
            "step": number - slowed_at,
            "seconds": step_s,
            "tokens_per_s": tokens / step_s,
            "of_optimum": optimum_s / step_s if number >= slowed_at else None,
        }
        for number, step_s in enumerate(seconds)
    ]
    after = seconds[slowed_at:]
    smooth = [median(after[i : i + 5]) for i in range(len(after) - 4)]
    late = [i for i, step_s in enumerate(smooth) if optimum_s / step_s < RECOVERED]
    recovered = late[-1] + 1 + 2 if late else 0  # the middle of the first five that are good
    ratios = [
        watched / fixed for watched, fixed in zip(measured["calm"]["watched"], measured["calm"]["fixed"], strict=True)
    ]
    return rows, {
        "recovered_after_steps": recovered if recovered < len(smooth) + 2 else None,
        "of_optimum_at_end": optimum_s / median(measured["slow"]["watched"]),
        "gain_over_fixed": median(measured["slow"]["fixed"]) / median(measured["slow"]["watched"]),
        "switched_at": measured["switched_at"],
        "split": measured["split"],
        "undisturbed_steps": len(ratios),
        "undisturbed_switches": measured["calm_switches"],
        "undisturbed_cost": median(ratios) - 1,
    }
