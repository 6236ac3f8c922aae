"""``ds-hetero replan``: plans pipelines again after devices are lost or added, and lists the state that must move."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds_hetero.cli.options import AS_JSON, FILE
from ds_hetero.cli.printing import check_out, print_json, print_lines, print_written, write_out
from ds_hetero.cli.scenario import CLUSTER_FILE, Scenario, read_plan_file, scenario_options
from ds_hetero.cluster import Cluster
from ds_hetero.cluster.files import load_cluster
from ds_hetero.common.reading import shortened
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.errors import PlanError
from ds_hetero.planner.pipelines import replan as planner
from ds_hetero.planner.pipelines.explain import shape_text

if TYPE_CHECKING:
    from ds_hetero.cost.stages.stage import StageCosts


@click.command
@click.option("--plan", type=FILE, required=True, help="Plan file of pipelines.")
@scenario_options(CLUSTER_FILE, batch=False, memory=False)
@click.option("--lost", type=int, multiple=True, help="Ranks that are lost: --lost 5 9.")
@click.argument("more_lost", type=int, nargs=-1, metavar="")
@click.option("--lost-node", multiple=True, help="A node whose ranks are all lost.")
@click.option("--added", help="Cluster file of nodes that are new.")
@click.option("--out", type=FILE, help="New plan file to write, .json.")
@AS_JSON
def replan(
    scenario: Scenario, plan: Path, added: str | None, out: Path | None, as_json: bool, **of_lost: Sequence[Any]
) -> None:
    """Plan pipelines again after devices are lost or added, and say what must move."""
    check_out(out, endings=(".json",))
    old, cluster = read_plan_file(plan), scenario.cluster
    lost = _lost_ranks(cluster, **of_lost)
    if not lost and added is None:
        raise PlanError("say what has changed: --lost RANK, --lost-node NAME or --added CLUSTER_FILE.")
    # The calibrated cost model is asked with and without recomputation, first as the old plan has it. Published ones
    # know only one of the two.
    recomputes = True if old.activation_checkpointing is None else old.activation_checkpointing
    settings = (recomputes, not recomputes) if scenario.cost_model == "calibrated" else (recomputes,)

    def costs_on(remaining: Cluster) -> list[StageCosts]:
        """Return the cost models on the remaining cluster, one for each setting of recomputation."""
        return [scenario.with_workload(activation_checkpointing=setting).stage_costs(remaining) for setting in settings]

    added_cluster = None if added is None else load_cluster(added)
    replanned = planner.replan(old, cluster, costs_on, lost=lost, added=added_cluster)
    if out is not None:
        write_out(out, json.dumps(replanned.plan.to_dict(), indent=1) + "\n")
    if as_json:
        print_json(replanned.to_dict())
        return
    before = (old.predicted or {}).get("step_s")
    was = f" (before: {time_text(before)})" if before else ""
    print_lines(f"{shape_text(replanned.finished.candidate)}, {time_text(replanned.finished.step_s)} per step{was}")
    print_lines(f"first plan after {time_text(replanned.first_after_s)}: {time_text(replanned.first_s)} per step")
    moves = [f"{bytes_text(moved)} GiB over {link!r}" for link, moved in sorted(replanned.moved_bytes.items())]
    print_lines(f"state to move: {', '.join(moves) or 'none'}")
    print_written(out)


def _lost_ranks(cluster: Cluster, lost: Sequence[int], more_lost: Sequence[int], lost_node: Sequence[str]) -> list[int]:
    """Return the lost ranks of these options, ascending.

    Args:
        lost: ranks that follow a ``--lost`` directly.
        more_lost: further ranks: 9 in ``--lost 5 9``.
        lost_node: names of nodes whose ranks are all lost.

    Raises:
        PlanError: there are ranks without ``--lost``, or a node is unknown.
    """
    if more_lost and not lost:
        ranks = " ".join(map(str, more_lost))
        raise PlanError(f"{ranks} stands without an option. To name lost ranks, write --lost {ranks}.")
    names = [node.name for node in cluster.nodes]
    unknown = [name for name in lost_node if name not in names]
    if unknown:
        raise PlanError(
            f"--lost-node {', '.join(map(shortened, unknown))} is not known: "
            f"the nodes of the cluster are {', '.join(names)}."
        )
    on_lost_nodes = [rank for rank in range(cluster.num_ranks) if names[cluster.node_of_rank[rank]] in lost_node]
    return sorted({*on_lost_nodes, *lost, *more_lost})
