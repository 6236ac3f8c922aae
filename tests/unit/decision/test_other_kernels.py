"""A plan counted with other attention kernels than those that run is told with its price, where it has one."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.cluster.notation import read_notation
from ds_hetero.common.text import time_text
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.decision.forecast import forecast
from ds_hetero.decision.other_kernels import as_it_runs, other_kernel_lines
from ds_hetero.models import load_model
from ds_hetero.planner import planning

MODEL = load_model("llama-3.1-8b")
WORK = Workload(seq_len=131_072, zero_stage=3, activation_checkpointing=True)
CLUSTER = cluster_from_dict(read_notation("2xH100-SXM-80GB | 2xA100-SXM-80GB", "25").content)


def start_of(rates: list[str], *, cluster: Any = CLUSTER) -> Any:
    planned = planning.plan(cluster, MODEL, WORK)
    (schedule,) = planned.plan.schedules
    forecasts = (forecast(schedule, cluster, MODEL, WORK, planned),)
    return SimpleNamespace(facts=SimpleNamespace(attention_rates=tuple(rates)), forecasts=forecasts)


def test_a_faster_kernel_on_one_kind_of_card_is_told_with_three_predictions() -> None:
    rates = ["flash_attn_3", "flash_attn_3", "flash_attn_2", "flash_attn_2"]
    start = start_of(rates)
    (line,) = other_kernel_lines(start)
    (of_job,) = start.forecasts
    running = as_it_runs(CLUSTER, rates)
    step_s = make_cost_model("calibrated", running, MODEL, WORK).predict(of_job.schedule).iteration_s
    better_s = planning.plan(running, MODEL, WORK).prediction.iteration_s
    assert better_s < 0.95 * step_s < step_s < of_job.prediction.iteration_s
    assert "H100-SXM-80GB runs flash_attn_3, planned is flash_attn_2" in line and "A100" not in line
    assert f"Predicted {time_text(step_s)} per step, planned {time_text(of_job.prediction.iteration_s)}" in line
    assert f"a plan for the kernels that run takes {time_text(better_s)}" in line
    assert re.search(r'"devices": \{"H100-SXM-80GB": \{"attention": "flash_attn_3"\}\}$', line)


def test_equal_rates_unknown_names_and_measured_devices_are_not_told() -> None:
    assert not list(other_kernel_lines(start_of(["torch", "flash_attn_2", "torch", "flash_attn_2"])))  # the same code
    assert not list(other_kernel_lines(start_of(["", "", "", ""])))
    assert not list(other_kernel_lines(start_of([])))
    measured = CLUSTER.with_devices(lambda device: type(device)(**_fields(device) | {"attention_kernel": ""}))
    assert as_it_runs(measured, ["flash_attn_3"] * 4) == measured


def _fields(device: Any) -> dict[str, Any]:
    return {name: getattr(device, name) for name in device.__dataclass_fields__}
