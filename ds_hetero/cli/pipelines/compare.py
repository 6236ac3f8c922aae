"""``ds-hetero compare --parallel full``: planners of pipelines on one cluster, judged by one cost model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ds_hetero.cli.pipelines.commands import Task
from ds_hetero.cli.printing import print_json
from ds_hetero.common.text import time_text
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.outer.planned import PlannedPipelines
from ds_hetero.planner.outer.planning import MICRO_BATCH_SIZES, plan_pipelines, recomputing_or_not
from ds_hetero.planner.outer.rivals import best_hexiscale, best_tangram
from ds_hetero.planner.outer.search.bound import balance_bound_s

__all__ = ["run"]


def run(task: Task, global_batch: int, as_json: bool) -> None:
    """Compare and print."""
    calibrated = task.cost_model == "calibrated"
    models = recomputing_or_not(task.cluster, task.model, task.workload) if calibrated else [task.costs()]
    planned = plan_pipelines(
        task.cluster, task.model, task.workload, global_batch, costs=None if calibrated else models[0]
    )
    rows = [{"name": "ours", "step_s": planned.step_s, "search_s": planned.search_s}]
    rows += [rival.to_dict() for rival in planned.rivals.values()]
    rows += _other_searches(models, planned)
    bound_s = min(balance_bound_s(costs, global_batch) for costs in models)
    rows.append({"name": "bound: perfect balance, free communication", "step_s": bound_s})
    if as_json:
        print_json({"rows": rows, "plan": planned.plan.to_dict()})
        return
    _print_rows(rows, planned)


def _other_searches(models: list[StageCosts], planned: PlannedPipelines) -> Iterator[dict[str, Any]]:
    """HexiScale and Tangram with the recomputation that is best for each."""
    for search in (best_hexiscale, best_tangram):
        started = time.perf_counter()
        rival = search(models, planned.objective, planned.global_batch, MICRO_BATCH_SIZES)
        yield {**rival.to_dict(), "search_s": time.perf_counter() - started}


def _print_rows(rows: list[dict[str, Any]], planned: PlannedPipelines) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("planner", "step", "tokens/s", "of our time", "search", title="Pipelines under one cost model")
    for row in rows:
        search = time_text(row["search_s"]) if "search_s" in row else ""
        if row["step_s"] is None:
            table.add_row(row["name"], "-", "-", str(row.get("reason")), search)
        else:
            rate = planned.global_batch * planned.costs.seq_len / row["step_s"]
            over = f"{row['step_s'] / planned.step_s:.2f} x"
            table.add_row(row["name"], time_text(row["step_s"]), f"{rate:,.0f}", over, search)
    Console().print(table)
