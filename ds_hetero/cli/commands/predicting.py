"""Commands that judge what is given: one schedule, all strategies, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ds_hetero.cli.commands.planning import is_full
from ds_hetero.cli.options import (
    AS_JSON,
    COST_MODEL,
    FILE,
    GLOBAL_BATCH,
    MODEL,
    PARALLEL,
    PLAN_FILE,
    SEED,
    cluster_options,
    training_options,
)

if TYPE_CHECKING:
    from ds_hetero.cluster.topology import Cluster
    from ds_hetero.cost.workload import Workload

__all__ = ["compare", "show", "simulate"]


@click.command
@cluster_options
@MODEL
@training_options()
@click.option("--schedule", help="Schedule file, output of plan --json, or a strategy's name.")
@PLAN_FILE
@COST_MODEL
@AS_JSON
def simulate(
    cluster: Cluster,
    model: str,
    workload: Workload,
    schedule: str | None,
    plan: Path | None,
    cost_model: str,
    as_json: bool,
) -> None:
    """Predict time and memory of a given schedule or plan of pipelines."""
    if plan is not None:
        from ds_hetero.cli.pipelines import commands

        commands.simulate(commands.Task.read(cluster, model, cost_model, workload), plan, as_json)
        return
    if schedule is None:
        raise click.UsageError("give --schedule or --plan.")
    from ds_hetero.cli import simulate as command
    from ds_hetero.cli.scenario import Scenario

    command.run(Scenario.read(cluster, model, workload, cost_model), schedule, as_json)


@click.command
@cluster_options
@MODEL
@training_options()
@COST_MODEL
@click.option("--exact", is_flag=True, help="Add the optimum in coarse units, up to 8 ranks.")
@PARALLEL
@GLOBAL_BATCH
@AS_JSON
def compare(
    cluster: Cluster,
    model: str,
    workload: Workload,
    cost_model: str,
    exact: bool,
    parallel: str,
    global_batch: int | None,
    as_json: bool,
) -> None:
    """All strategies, or all planners of pipelines, on one cluster, in one table."""
    if is_full(parallel, global_batch):
        from ds_hetero.cli.pipelines import commands
        from ds_hetero.cli.pipelines import compare as command_for_pipelines

        assert global_batch is not None  # see is_full
        task = commands.Task.read(cluster, model, cost_model, workload)
        command_for_pipelines.run(task, global_batch, as_json)
        return
    from ds_hetero.cli import compare as command
    from ds_hetero.cli.scenario import Scenario

    command.run(Scenario.read(cluster, model, workload, cost_model), exact, as_json)


@click.command
@cluster_options
@MODEL
@training_options()
@click.option(
    "--out", type=FILE, help="Picture to write: .svg, .png or .html; may be left out with --documents and --sample."
)
@click.option("--schedule", default="plan", help="Schedule file, output of plan --json, or a strategy's name.")
@PLAN_FILE
@click.option(
    "--documents", type=FILE, help="JSON file with the lengths of a row's documents: where they lie, and the load."
)
@click.option("--sample", help="The same for a row drawn from arxiv, github, prolong64k, or a file of lengths.")
@SEED
@COST_MODEL
@AS_JSON
def show(
    cluster: Cluster,
    model: str,
    workload: Workload,
    out: Path | None,
    schedule: str,
    plan: Path | None,
    documents: Path | None,
    sample: str | None,
    seed: int,
    cost_model: str,
    as_json: bool,
) -> None:
    """Draw a schedule or a plan of pipelines with its timeline, or show where the documents of a batch lie."""
    if documents is not None or sample is not None:
        from ds_hetero.cli import documents as command_for_documents
        from ds_hetero.cli.scenario import Scenario

        scenario = Scenario.read(cluster, model, workload, cost_model)
        command_for_documents.show(scenario, schedule, documents, sample, seed, out, as_json)
        return
    if out is None:
        raise click.UsageError("give --out, the picture to write.")
    if plan is not None:
        from ds_hetero.cli.pipelines import commands
        from ds_hetero.cli.pipelines import show as command_for_pipelines

        command_for_pipelines.run(commands.Task.read(cluster, model, cost_model, workload), plan, out, as_json)
        return
    from ds_hetero.cli import show as command
    from ds_hetero.cli.scenario import Scenario

    command.run(Scenario.read(cluster, model, workload, cost_model), schedule, out, as_json)
