"""Plan files as the commands write them: what a job reads, and what the plan was made for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_hetero.cli.printing import write_out
from ds_hetero.cluster import Cluster
from ds_hetero.cost.workload import Workload
from ds_hetero.models import ModelSpec
from ds_hetero.plans.reading import SCENARIO
from ds_hetero.reporting.described_plan import PlanScenario

__all__ = ["scenario_dict", "write_plan"]


def scenario_dict(
    cost_model: str,
    model: ModelSpec,
    workload: Workload,
    clusters: Sequence[Cluster],
    lengths: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return what a plan was made for, as in its file; see `PlanScenario`."""
    scenario = PlanScenario(
        cost_model=cost_model,
        model=model,
        workload=workload,
        clusters=tuple(clusters),
        lengths=None if lengths is None else tuple(lengths),
    )
    return scenario.to_dict()


def write_plan(out: Path, plan: Mapping[str, Any], scenario: Mapping[str, Any]) -> None:
    """Write a plan with what it was made for."""
    write_out(out, json.dumps({**plan, SCENARIO: scenario}, indent=1) + "\n")
