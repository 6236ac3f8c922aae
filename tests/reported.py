"""Plans and runs for the tests of ``report`` and ``trace``, made by the commands of users."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_hetero.cli import main
from ds_hetero.reporting.described_plan import DescribedPlan, read_described_plan
from ds_hetero.reporting.run_file import MeasuredRank, RunFile, TracedRange, write_run

TWO_MACHINES: dict[str, Any] = {
    "nodes": [
        {"name": "fast", "device": "RTX-4090", "count": 2, "link": {"bandwidth_gb_per_s": 20, "latency_us": 5}},
        {"name": "slow", "device": "RTX-3090", "count": 2, "link": {"bandwidth_gb_per_s": 20, "latency_us": 5}},
    ],
    "network": {"bandwidth_gb_per_s": 5, "latency_us": 20},
}
SEQ_LEN = 16384


def command(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    """Run ``ds-hetero`` with these arguments; return exit code, stdout and stderr."""
    capsys.readouterr()
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return int(code or 0), out, err


def plan_file(capsys: Any, folder: Path, *options: object, cluster: Any = TWO_MACHINES) -> Path:
    """Write a plan file of four different GPUs by ``plan --out``."""
    (folder / "cluster.json").write_text(json.dumps(cluster))
    out = folder / "plan.json"
    usual = ("--model", "llama-3.2-1b", "--seq-len", SEQ_LEN, "--out", out)
    usual = (*usual, "--parallel", "sequence", "--zero-stage", "3")
    code, _, err = command(capsys, "plan", "--cluster", folder / "cluster.json", *usual, *options)
    assert code == 0, err
    return out


def described(path: Path) -> DescribedPlan:
    plan = read_described_plan(path)
    assert isinstance(plan, DescribedPlan)
    return plan


def run_of(plan: DescribedPlan, path: Path) -> RunFile:
    """Return a run of a plan of one replica that took 10 % longer than predicted, with a trace of two layers."""
    step_s = 1.1 * plan.cost_of(0).predict(plan.schedule_of(0)).iteration_s
    ranks = tuple(
        MeasuredRank(
            device=device.name,
            step_s=step_s,
            attention_s=0.4 * step_s,
            model_s=0.3 * step_s,
            all_to_all_s=0.1 * step_s,
            ring_wait_s=0.05 * step_s,
            idle_s=0.05 * step_s,
            tokens=plan.scenario.workload.seq_len / 4,
            memory_bytes=7 * 2**30,
            own_min_s=0.6 * step_s,
            own_median_s=0.7 * step_s,
            own_max_s=0.8 * step_s,
        )
        for device in plan.cluster_of(0).devices
    )
    run = RunFile(
        plan=plan.plan,
        scenario=plan.scenario,
        predicted_s=step_s / 1.1,
        ended="normally",
        written="2026-11-22T12:00:00+00:00",
        versions={"torch": "2.13.0"},
        steps=40,
        ranks=ranks,
        observations=tuple(
            {"step": 10 * i, "steps": 10, "step_s": step_s, "tokens_per_s": 16384 / step_s + i, "imbalance": 1.05}
            for i in range(1, 5)
        ),
        traced_step=40,
        trace=tuple(tuple(_ranges(step_s)) for _ in ranks),
    )
    write_run(run, path)
    return run


def _ranges(step_s: float) -> Iterator[TracedRange]:
    """Yield traced ranges of a step: two layers, forward and backward, take 9/10 of it, the optimizer the rest."""
    part = 0.9 * step_s / 4
    names = {"forward": ("gather_sequence", "attention", "ring_wait", "attention", "scatter_output")}
    names["backward"] = ("gather_output_heads", "attention_backward", "ring_finish", "attention_backward")
    for call, (name, phases) in enumerate(names.items()):
        begin = 2 * call * part
        yield f"ds_hetero.{name}", begin, begin + 2 * part
        for layer in range(2):
            for i, phase in enumerate(phases):
                start = begin + (layer + i / 8) * part
                yield f"ds_hetero.{phase}", start, start + part / 8
    yield "ds_hetero.step", 4 * part, step_s
