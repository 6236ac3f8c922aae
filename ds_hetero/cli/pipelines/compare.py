"""``ds-hetero compare --parallel full``: planners of pipelines on one cluster, judged by one cost model."""

from __future__ import annotations

import time
from typing import Any

from ds_hetero.cli.pipelines.commands import Task
from ds_hetero.cli.printing import print_json
from ds_hetero.common.text import time_text
from ds_hetero.planner.outer.planning import plan_pipelines
from ds_hetero.planner.outer.search.columns import Columns, balance_bound_s

__all__ = ["run"]


def run(task: Task, global_batch: int, as_json: bool) -> None:
    """Compare and print."""
    costs = task.costs()
    planned = plan_pipelines(
        task.cluster,
        task.model,
        task.workload,
        global_batch,
        costs=None if task.cost_model == "calibrated" else costs,
    )
    rows: list[dict[str, Any]] = [{"name": "plan", "step_s": planned.step_s, "search_s": planned.search_s}]
    rows += [rival.to_dict() for rival in planned.rivals.values()]
    started = time.perf_counter()
    columns = Columns(planned.costs, micro_batch_size=1)
    rows.append(
        {
            "name": "bound: integer programme, free gradients",
            "step_s": columns.bound_s(global_batch),
            "search_s": time.perf_counter() - started,
        }
    )
    rows.append(
        {"name": "bound: perfect balance, free communication", "step_s": balance_bound_s(planned.costs, global_batch)}
    )
    if as_json:
        print_json({"rows": rows, "plan": planned.plan.to_dict()})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("planner", "step", "tokens/s", "of plan's time", title="Pipelines under one cost model")
    for row in rows:
        step_s = row["step_s"]
        if step_s is None:
            table.add_row(row["name"], "-", "-", str(row.get("reason")))
        else:
            rate = global_batch * costs.seq_len / step_s
            table.add_row(row["name"], time_text(step_s), f"{rate:,.0f}", f"{step_s / planned.step_s:.2f} x")
    Console().print(table)
