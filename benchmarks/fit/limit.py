"""Let a job exceed a real memory limit, and run it again as `ds-hetero fit` advises.

Two ranks train under a limit of their private memory (RLIMIT_DATA): what they have after all imports, plus a budget
that stands for the GPU's memory. The budget is halfway between the estimated needs of the job and of the advised job,
so that both outcomes test the estimate.
"""

from __future__ import annotations

import re
import resource
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.fit.cases import CASES
from benchmarks.fit.training import Case, make_step
from benchmarks.measure.ranks import LOOPBACK, run
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.common.units import GIB
from ds_hetero.cost import make_cost_model
from ds_hetero.planner.memory import Advice, advise, best_schedule
from ds_hetero.values.schedule import Schedule

STEPS = 2
PROCESS_BYTES = 48 << 20  # of the ranks beside torch's tensors: stacks of gloo's threads, its buffers, the heap's gaps
_CHANGES = {
    "activation checkpointing": {"checkpointing": True},
    "ZeRO stage 2": {"zero_stage": 2},
    "ZeRO stage 3": {"zero_stage": 3},
}


def follow_advice() -> dict[str, Any]:
    """Run the job until the limit ends it, follow the advice, run again; return both outcomes and the advice."""
    case = replace(CASES[0], name="a job under a limit", seq_len=6144)
    budget = (_needs(case) + _needs(replace(case, checkpointing=True))) // 2
    advice = _advice(case, budget)
    advised = replace(case, **{key: value for change in advice.changes for key, value in _CHANGES[change.name].items()})
    return {
        "limit_bytes": budget,
        "needs_bytes": _needs(case),
        "advised_needs_bytes": _needs(advised),
        "advice": advice.name,
        "before": _train(case, budget),
        "after": _train(advised, budget),
    }


def _cost(case: Case, budget: int) -> Any:
    device = {"peak_tflops": 0.05, "memory_gib": budget / GIB, "memory_bandwidth_gb_per_s": 10}
    node = {"name": "host", "device": "rank", "count": case.num_ranks, "link": {"bandwidth_gb_per_s": 1}}
    cluster = cluster_from_dict({"nodes": [node], "devices": {"rank": device}})
    return make_cost_model("calibrated", cluster, case.spec, case.workload)


def _needs(case: Case) -> int:
    return max(_cost(case, 1 << 40).predict(Schedule.from_dict(case.schedule)).memory_bytes)


def _advice(case: Case, budget: int) -> Advice:
    """Return the cheapest advice that `_CHANGES` can follow."""
    schedule = Schedule.from_dict(case.schedule)
    fitted = best_schedule(_cost(case, budget), schedule)
    assert not fitted.fits, "the estimate says that the job fits"
    return next(
        advice for advice in advise(fitted, schedule) if advice.fits and all(c.name in _CHANGES for c in advice.changes)
    )


def _train(case: Case, budget: int) -> dict[str, Any]:
    try:
        run(_limited, [LOOPBACK] * case.num_ranks, asdict(case), budget)
    except RuntimeError as error:
        text = str(error)
        reason = re.search(r".*(can't allocate memory|bad_alloc|MemoryError|Cannot allocate memory).*", text)
        end = f"out of memory: {reason[0].strip()}" if reason else f"failed: {text.strip().splitlines()[-1]}"
        return {"finished": False, "out_of_memory": reason is not None, "end": end}
    return {"finished": True, "out_of_memory": False, "end": f"{STEPS} steps trained"}


# --- on a rank --------------------------------------------------------------------------------------


def _limited(rank: int, report: Any, case: dict[str, Any], budget: int) -> None:
    """Train on one rank under the limit."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmData:\s+(\d+) kB", status)
    assert match is not None
    limit = int(match[1]) * 1024 + PROCESS_BYTES + budget
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    step = make_step(rank, Case(**case))
    for _ in range(STEPS):
        step()
