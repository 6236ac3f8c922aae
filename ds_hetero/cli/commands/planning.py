"""Commands that search: for a schedule, for pipelines, for replicas, and for what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds_hetero.cli.options import (
    AS_JSON,
    COST_MODEL,
    FILE,
    GLOBAL_BATCH,
    LAYOUT,
    MODEL,
    PARALLEL,
    SEED,
    cluster_options,
    training_options,
)

if TYPE_CHECKING:
    from ds_hetero.cluster.topology import Cluster
    from ds_hetero.cost.workload import Workload

__all__ = ["fit", "is_full", "plan", "replan", "replicas"]

_LENGTHS_HELP = (
    "Plan for batches of documents: a JSON file of lengths, or arxiv, github or prolong64k; --seq-len is the length "
    "of a row."
)
_BUCKET_HELP = "Elements of DeepSpeed's buffer for gradients; left out, DeepSpeed's default."


def is_full(parallel: str, global_batch: int | None) -> bool:
    """Whether pipelines are planned.

    Raises:
        PlanError: an unknown kind of parallelism, or one without the batch that it needs.
    """
    from ds_hetero.common.reading import shortened
    from ds_hetero.errors import PlanError

    if parallel not in ("sequence", "full"):
        raise PlanError(f"--parallel {shortened(parallel)} is unknown; it is sequence or full.")
    if parallel == "full" and global_batch is None:
        raise PlanError("--parallel full shares the samples of a step among pipelines. Give --global-batch.")
    return parallel == "full"


@click.command
@cluster_options
@MODEL
@training_options()
@COST_MODEL
@LAYOUT
@click.option("--token-unit", type=int, default=1, help="Hand out tokens in multiples of this.")
@PARALLEL
@GLOBAL_BATCH
@click.option("--objective", default="time", help="time, cost or energy, for --parallel full.")
@click.option("--at-most-s", type=float, help="Longest step, for the objectives cost and energy.")
@click.option("--lengths", help=_LENGTHS_HELP)
@SEED
@click.option("--out", type=FILE, help="Write the schedule or plan file here.")
@AS_JSON
def plan(cluster: Cluster, model: str, workload: Workload, cost_model: str, **asked: Any) -> None:
    """Search the best schedule, or the best pipelines, for a cluster, a model and a length, and say why."""
    if is_full(asked["parallel"], asked["global_batch"]):
        _plan_pipelines(cluster, model, workload, cost_model, **asked)
        return
    from ds_hetero.cli.scenario import Scenario

    scenario = Scenario.read(cluster, model, workload, cost_model)
    layout, token_unit, out, as_json = (asked[name] for name in ("layout", "token_unit", "out", "as_json"))
    if asked["lengths"] is not None:
        if (layout, token_unit) != (None, 1):
            raise click.UsageError("--lengths chooses layouts and tokens itself.")
        from ds_hetero.cli import documents

        documents.plan(scenario, asked["lengths"], asked["seed"], out, as_json)
        return
    from ds_hetero.cli import plan as command

    command.run(scenario, layout, token_unit, out, as_json)


def _plan_pipelines(cluster: Cluster, model: str, workload: Workload, cost_model: str, **asked: Any) -> None:
    chosen = (workload.micro_batch, workload.micro_batches, asked["layout"], asked["token_unit"], asked["lengths"])
    if chosen != (1, 1, None, 1, None):
        raise click.UsageError("--parallel full chooses micro-batches, layouts and tokens itself.")
    from ds_hetero.cli.pipelines import commands

    task = commands.Task.read(cluster, model, cost_model, workload)
    commands.plan(task, asked["global_batch"], asked["objective"], asked["at_most_s"], asked["out"], asked["as_json"])


@click.command
@cluster_options
@MODEL
@training_options(tiled_loss=False)
@click.option("--schedule", default="plan", help="Schedule file, or a strategy's name.")
@click.option(
    "--what-if", multiple=True, help="add=3090, remove=1 or network=10: the same beside today's; may be repeated."
)
@click.option("--reduce-bucket-size", type=click.IntRange(min=0), default=500_000_000, help=_BUCKET_HELP)
@AS_JSON
def fit(
    cluster: Cluster,
    model: str,
    workload: Workload,
    schedule: str,
    what_if: Sequence[str],
    reduce_bucket_size: int,
    as_json: bool,
) -> None:
    """Does it fit into memory, up to which length, and what would make it fit? Ends with 0 if it fits, 1 if not."""
    from ds_hetero.cli import fit as command
    from ds_hetero.cli.scenario import Scenario
    from ds_hetero.cost.workload import Buffers

    workload = replace(workload, buffers=Buffers(reduce_bucket=reduce_bucket_size))
    scenario = Scenario.read(cluster, model, workload, "calibrated")
    if not command.run(scenario, schedule, what_if, as_json):
        raise click.exceptions.Exit(1)


@click.command
@click.option(
    "--cluster", required=True, multiple=True, help="Cluster of one replica; once per replica, in rank order."
)
@MODEL
@training_options(batch=False)
@click.option("--global-batch", type=int, required=True, help="Sequences per optimizer step, over all replicas.")
@COST_MODEL
@LAYOUT
@click.option("--out", type=FILE, help="Write the schedule file here.")
@AS_JSON
def replicas(
    cluster: Sequence[str],
    model: str,
    workload: Workload,
    global_batch: int,
    cost_model: str,
    layout: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Schedules and micro-batches for replicas that differ, so that all finish together."""
    from ds_hetero.cli import replicas as command
    from ds_hetero.cli.scenario import Scenario

    scenarios = [Scenario.read(of_replica, model, workload, cost_model) for of_replica in cluster]
    command.run(scenarios, global_batch, layout, out, as_json)


@click.command
@click.option("--plan", type=FILE, required=True, help="Plan file of pipelines.")
@click.option("--cluster", required=True, help="Cluster file, YAML or JSON, or the name of a ready one.")
@MODEL
@training_options(batch=False, memory=False)
@click.option("--lost", type=int, multiple=True, help="Ranks that are lost: --lost 5 9.")
@click.argument("more_lost", type=int, nargs=-1, metavar="")
@click.option("--lost-node", multiple=True, help="A node whose ranks are all lost.")
@click.option("--added", help="Cluster file of nodes that are new.")
@COST_MODEL
@click.option("--out", type=FILE, help="Write the new plan file here.")
@AS_JSON
def replan(
    plan: Path,
    cluster: str,
    model: str,
    workload: Workload,
    lost: Sequence[int],
    more_lost: Sequence[int],
    lost_node: Sequence[str],
    added: str | None,
    cost_model: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Plan pipelines again after devices are lost or added, and say what must move."""
    from ds_hetero.cli.pipelines import commands
    from ds_hetero.errors import PlanError

    if more_lost and not lost:
        ranks = " ".join(map(str, more_lost))
        raise PlanError(f"what is {ranks}? Ranks that are lost: --lost {ranks}.")
    task = commands.Task.read(cluster, model, cost_model, workload)
    commands.replan(task, plan, [*lost, *more_lost], list(lost_node), added, out, as_json)
