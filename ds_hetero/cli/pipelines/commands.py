"""Plans of pipelines on the command line: search, predict, compare, plan again."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_hetero.cli.plan_files import scenario_dict, write_plan
from ds_hetero.cli.printing import check_out, print_json
from ds_hetero.cluster.files import load_cluster
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import read_file, shortened
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.models import make_stage_costs
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models import ModelSpec, load_model
from ds_hetero.planner.outer.explain import reasons_of, shape_text
from ds_hetero.planner.outer.finish import Finished, memory_by_rank, memory_bytes
from ds_hetero.planner.outer.given import judge_plan, with_owners_of
from ds_hetero.planner.outer.planned import PlannedPipelines
from ds_hetero.planner.outer.planning import plan_pipelines
from ds_hetero.planner.outer.search.evaluate import Candidate
from ds_hetero.planner.outer.uneven import ScheduleFinder
from ds_hetero.plans import Plan, read_plan
from ds_hetero.plans.reading import SCENARIO

__all__ = ["Task", "costs_for", "plan", "read_plan_file", "replan", "simulate"]

SLOW_S = 1.0  # searches below this show no progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained on what, as the options of a command say it."""

    cluster: Cluster
    model: ModelSpec
    workload: Workload
    cost_model: str

    @classmethod
    def read(cls, cluster: str | Cluster, model: str, cost_model: str, workload: Workload) -> Task:
        """Load the model, and the cluster if it is not loaded yet, each by file or by name.

        Raises:
            ClusterError, ModelError: what is wrong with them.
            PlanError: the length is no length.
        """
        if workload.seq_len < 1:
            raise PlanError(f"seq_len must be a whole number >= 1, got {workload.seq_len}.")
        loaded = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        return cls(cluster=loaded, model=load_model(model), workload=workload, cost_model=cost_model)

    def costs(self, cluster: Cluster | None = None) -> StageCosts:
        """The cost model, for the task's cluster or another one."""
        find = ScheduleFinder()
        return make_stage_costs(self.cost_model, cluster or self.cluster, self.model, self.workload, find)


def read_plan_file(path: Path) -> Plan:
    """Read a plan file, or what ``ds-hetero plan --json`` printed.

    Raises:
        PlanError, ScheduleError: it cannot be read, or is no plan.
    """
    data = read_file(path, "plan", PlanError)
    return read_plan(data["plan"] if isinstance(data, dict) and "plan" in data else data)


def plan(
    task: Task, global_batch: int, objective: str, at_most_s: float | None, out: Path | None, as_json: bool
) -> None:
    """Search, print, and write the plan file if asked to."""
    if out is not None:
        check_out(out)
    costs = None if task.cost_model == "calibrated" else task.costs()
    progress = _Progress(as_json)
    planned = plan_pipelines(
        task.cluster,
        task.model,
        task.workload,
        global_batch,
        costs=costs,
        objective=objective,
        at_most_s=at_most_s,
        progress=progress,
    )
    progress.end()
    described = scenario_dict(task.cost_model, task.model, task.workload, [task.cluster])
    if out is not None:
        write_plan(out, planned.plan.to_dict(), described)
    if as_json:
        print_json({**planned.to_dict(), SCENARIO: described})
        return
    _print_plan(task, planned)
    if out is not None:
        print(f"written to {out}")


def simulate(task: Task, path: Path, as_json: bool) -> None:
    """Predict the time and the memory of a plan file."""
    given = read_plan_file(path)
    costs, objective = costs_for(task, given)
    finished = judge_plan(costs, given, objective)
    reasons = reasons_of(costs, finished)
    if as_json:
        ranks = [[stage.ranks for stage in pipeline.stages] for pipeline in given.pipelines]
        by_rank = {str(rank): need for rank, need in memory_by_rank(costs, finished, ranks).items()}
        predicted = {
            "cost_model": costs.name,
            "step_s": finished.step_s,
            "pipeline_s": list(finished.pipeline_s),
            "gradients_s": finished.candidate.gradients_s,
            "memory_bytes": by_rank,
        }
        print_json({"predicted": predicted, "plan": given.to_dict(), "reasons": reasons})
        return
    _print_pipelines(costs, finished, given)
    print(f"predicted:  {time_text(finished.step_s)} per step")
    print("\n".join(f"            {reason}" for reason in reasons))


def replan(
    task: Task,
    path: Path,
    lost: Sequence[int],
    lost_nodes: Sequence[str],
    added: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Plan again for the devices that are left, and say what must move."""
    from ds_hetero.planner.outer import replan as module

    if out is not None:
        check_out(out)
    if not lost and not lost_nodes and added is None:
        raise PlanError("say what has changed: --lost RANK, --lost-node NAME or --added CLUSTER_FILE.")
    old, cluster = read_plan_file(path), task.cluster
    names = [node.name for node in cluster.nodes]
    unknown = [name for name in lost_nodes if name not in names]
    if unknown:
        raise PlanError(
            f"--lost-node {', '.join(map(shortened, unknown))}: the nodes of the cluster are {', '.join(names)}."
        )
    gone = {rank for rank in range(cluster.num_ranks) if names[cluster.node_of_rank[rank]] in lost_nodes}
    own = True if old.activation_checkpointing is None else old.activation_checkpointing
    tasks = [_with_checkpointing(task, choice) for choice in (own, not own)]
    replanned = module.replan(
        old,
        cluster,
        lambda left: [one.costs(left) for one in tasks[: 2 if task.cost_model == "calibrated" else 1]],
        lost=sorted(gone | set(lost)),
        added=None if added is None else load_cluster(added),
    )
    if out is not None:
        out.write_text(json.dumps(replanned.plan.to_dict(), indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(replanned.to_dict())
        return
    before = (old.predicted or {}).get("step_s")
    was = f" (before: {time_text(before)})" if before else ""
    print(f"{shape_text(replanned.finished.candidate)}, {time_text(replanned.finished.step_s)} per step{was}")
    print(f"first plan after {time_text(replanned.first_after_s)}: {time_text(replanned.first_s)} per step")
    moves = ", ".join(f"{bytes_text(moved)} GiB over {link!r}" for link, moved in sorted(replanned.moved_bytes.items()))
    print(f"state to move: {moves or 'none'}")
    if out is not None:
        print(f"written to {out}")


def costs_for(task: Task, given: Plan) -> tuple[StageCosts, Objective]:
    """The cost model under which a given plan is judged, with its own choice of recomputation."""
    if given.activation_checkpointing is not None:
        task = _with_checkpointing(task, given.activation_checkpointing)
    costs = with_owners_of(task.costs(), given)
    return costs, Objective.of("time", [kind.device for kind in costs.pools.kinds], 1)


def _with_checkpointing(task: Task, checkpointing: bool) -> Task:
    return replace(task, workload=replace(task.workload, activation_checkpointing=checkpointing))


class _Progress:
    """One line on stderr that follows a long search; nothing where nobody watches."""

    def __init__(self, quiet: bool) -> None:
        self._watched = not quiet and sys.stderr.isatty()
        self._shown = False

    def __call__(self, best: Candidate, share: float) -> None:
        """Show the best step so far."""
        if self._watched:
            self._shown = True
            text = (
                f"\r{100 * share:3.0f} %  {shape_text(best)}, {time_text(best.step_s)} per step (Ctrl-C takes it)\033[K"
            )
            print(text, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _print_plan(task: Task, planned: PlannedPipelines) -> None:
    if planned.finished is not None:
        _print_pipelines(planned.costs, planned.finished, planned.plan)
    else:
        print(f"one stage of sequence parallelism over ranks {planned.plan.ranks[0]} to {planned.plan.ranks[-1]}")
    recomputed = {True: "with", False: "without"}[bool(planned.plan.activation_checkpointing)]
    lines = [
        f"{task.model.name}, {planned.global_batch} sequences of {task.workload.seq_len} tokens per step, "
        f"{planned.costs.name} cost model; searched for {time_text(planned.search_s)}"
        f"{', then interrupted: the best plan so far' if planned.interrupted else ''}",
        f"predicted:  {time_text(planned.step_s)} per step, {planned.tokens_per_s:,.0f} tokens/s, {recomputed} "
        "recomputation",
    ]
    if planned.objective.name != "time":
        unit = {"cost": "money", "energy": "joules"}[planned.objective.name]
        lines.append(f"objective:  {planned.value:.4g} {unit} per token")
    lines += [f"{'why:' if i == 0 else '':12}{reason}" for i, reason in enumerate(planned.reasons)]
    for rival in planned.rivals.values():
        if rival.value is None:
            lines.append(f"not {rival.name}: {rival.reason}")
        else:
            lines.append(
                f"not {rival.name}: {rival.value / planned.value:.2f} x as much "
                f"({time_text(rival.step_s or 0)} per step)"
            )
    print("\n".join(lines))


def _print_pipelines(costs: StageCosts, finished: Finished, given: Plan) -> None:
    """One row per stage; pipelines of one makeup once."""
    from rich.console import Console
    from rich.table import Table

    table = Table("pipelines", "micro-batches", "stage", "devices", "layers", "time", "memory GiB", "of")
    memory = memory_bytes(costs, finished)
    placed = finished.candidate.placed
    alike: dict[Any, list[int]] = {}
    for i, pipeline in enumerate(placed):
        kinds = tuple((block.kind, block.size, block.inner, block.others) for block in pipeline.blocks)
        alike.setdefault((kinds, *pipeline[1:]), []).append(i)
    for members in alike.values():
        i = members[0]
        pipeline, cut = placed[i], finished.candidate.cuts[i]
        for j, block in enumerate(pipeline.blocks):
            head = (
                (f"{len(members)} x", f"{pipeline.micro_batches} of {pipeline.micro_batch_size}")
                if j == 0
                else ("", "")
            )
            devices = [costs.pools.kinds[part.kind].device for part in block.parts]
            inner = "" if block.inner == "one" else f" {block.inner}"
            names = [f"{part.size} {device.name}" for part, device in zip(block.parts, devices, strict=True)]
            table.add_row(
                *head,
                str(j),
                f"{' + '.join(names)}{inner}",
                f"{sum(cut.layers[:j])}-{sum(cut.layers[: j + 1])}",
                time_text(cut.forward_s[j] + cut.backward_s[j]),
                " + ".join(map(bytes_text, memory[i][j])),
                " + ".join(bytes_text(device.memory_bytes - device.reserved_bytes) for device in devices),
                end_section=j + 1 == len(pipeline.blocks),
            )
    Console().print(table)
