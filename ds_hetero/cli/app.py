"""The commands; what they do is in a module each, imported when the command is run."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from ds_hetero.cli.options import (
    CausalOption,
    CheckpointOption,
    ClusterOption,
    CostModelOption,
    GlobalBatchOption,
    GpusOption,
    JsonOption,
    MicroBatchesOption,
    MicroBatchOption,
    ModelOption,
    NetworkOption,
    ParallelOption,
    PlanArgument,
    PlanOption,
    RequiredClusterOption,
    RunOption,
    SaveClusterOption,
    SeedOption,
    SeqLenOption,
    TiledOption,
    ZeroOption,
    read_cluster,
    workload_of,
)
from ds_hetero.common.extras import require

__all__ = [
    "app",
    "compare",
    "doctor",
    "fit",
    "plan",
    "profile",
    "replan",
    "replicas",
    "report",
    "selftest",
    "show",
    "simulate",
    "trace",
    "weights",
]

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


def _is_full(parallel: str, global_batch: int | None) -> bool:
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


@app.callback()
def _root() -> None:
    """Train long sequences on GPUs that are not alike, inside DeepSpeed."""


@app.command()
def plan(
    model: ModelOption,
    seq_len: SeqLenOption,
    cluster: ClusterOption = None,
    gpus: GpusOption = None,
    network: NetworkOption = None,
    save_cluster: SaveClusterOption = None,
    micro_batch: MicroBatchOption = 1,
    micro_batches: MicroBatchesOption = 1,
    causal: CausalOption = True,
    zero_stage: ZeroOption = 3,
    checkpointing: CheckpointOption = True,
    tiled_loss: TiledOption = True,
    cost_model: CostModelOption = "calibrated",
    layout: Annotated[str | None, typer.Option(help="zigzag or contiguous; left out, the planner's choice.")] = None,
    token_unit: Annotated[int, typer.Option(help="Hand out tokens in multiples of this.")] = 1,
    parallel: ParallelOption = "sequence",
    global_batch: GlobalBatchOption = None,
    objective: Annotated[str, typer.Option(help="time, cost or energy, for --parallel full.")] = "time",
    at_most_s: Annotated[float | None, typer.Option(help="Longest step, for the objectives cost and energy.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Plan for batches of documents: a JSON file of lengths, or arxiv, github or prolong64k; --seq-len is "
            "the length of a row."
        ),
    ] = None,
    seed: SeedOption = 0,
    out: Annotated[Path | None, typer.Option(help="Write the schedule or plan file here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Search the best schedule, or the best pipelines, for a cluster, a model and a length, and say why."""
    devices = read_cluster(cluster, gpus, network, save_cluster)
    workload = workload_of(seq_len, micro_batch, micro_batches, causal, zero_stage, checkpointing, tiled_loss)
    if _is_full(parallel, global_batch):
        if (micro_batch, micro_batches, layout, token_unit, lengths) != (1, 1, None, 1, None):
            raise typer.BadParameter("--parallel full chooses micro-batches, layouts and tokens itself.")
        from ds_hetero.cli.pipelines import commands

        task = commands.Task.read(devices, model, cost_model, workload)
        assert global_batch is not None  # see _is_full
        commands.plan(task, global_batch, objective, at_most_s, out, as_json)
        return
    from ds_hetero.cli.scenario import Scenario

    scenario = Scenario.read(devices, model, workload, cost_model)
    if lengths is not None:
        if (layout, token_unit) != (None, 1):
            raise typer.BadParameter("--lengths chooses layouts and tokens itself.")
        from ds_hetero.cli import documents

        documents.plan(scenario, lengths, seed, out, as_json)
        return
    from ds_hetero.cli import plan as command

    command.run(scenario, layout, token_unit, out, as_json)


@app.command()
def fit(
    model: ModelOption,
    seq_len: SeqLenOption,
    cluster: ClusterOption = None,
    gpus: GpusOption = None,
    network: NetworkOption = None,
    save_cluster: SaveClusterOption = None,
    schedule: Annotated[str, typer.Option(help="Schedule file, or a strategy's name.")] = "plan",
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help="add=3090, remove=1 or network=10: the same beside today's; may be repeated."),
    ] = None,
    micro_batch: MicroBatchOption = 1,
    micro_batches: MicroBatchesOption = 1,
    causal: CausalOption = True,
    zero_stage: ZeroOption = 3,
    checkpointing: CheckpointOption = True,
    tiled_loss: TiledOption = False,
    reduce_bucket_size: Annotated[
        int, typer.Option(min=0, help="Elements of DeepSpeed's buffer for gradients; left out, DeepSpeed's default.")
    ] = 500_000_000,
    as_json: JsonOption = False,
) -> None:
    """Does it fit into memory, up to which length, and what would make it fit? Ends with 0 if it fits, 1 if not."""
    from ds_hetero.cli import fit as command
    from ds_hetero.cli.scenario import Scenario

    devices = read_cluster(cluster, gpus, network, save_cluster)
    training = (seq_len, micro_batch, micro_batches, causal, zero_stage, checkpointing, tiled_loss)
    workload = workload_of(*training, reduce_bucket=reduce_bucket_size)
    if not command.run(Scenario.read(devices, model, workload, "calibrated"), schedule, what_if or [], as_json):
        raise typer.Exit(1)


@app.command()
def replicas(
    cluster: Annotated[list[str], typer.Option(help="Cluster of one replica; once per replica, in rank order.")],
    model: ModelOption,
    seq_len: SeqLenOption,
    global_batch: Annotated[int, typer.Option(help="Sequences per optimizer step, over all replicas.")],
    causal: CausalOption = True,
    zero_stage: ZeroOption = 3,
    checkpointing: CheckpointOption = True,
    tiled_loss: TiledOption = True,
    cost_model: CostModelOption = "calibrated",
    layout: Annotated[str | None, typer.Option(help="zigzag or contiguous; left out, the planner's choice.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the schedule file here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Schedules and micro-batches for replicas that differ, so that all finish together."""
    from ds_hetero.cli import replicas as command
    from ds_hetero.cli.scenario import Scenario

    workload = workload_of(seq_len, 1, 1, causal, zero_stage, checkpointing, tiled_loss)
    scenarios = [Scenario.read(of_replica, model, workload, cost_model) for of_replica in cluster]
    command.run(scenarios, global_batch, layout, out, as_json)


@app.command()
def simulate(
    model: ModelOption,
    seq_len: SeqLenOption,
    cluster: ClusterOption = None,
    gpus: GpusOption = None,
    network: NetworkOption = None,
    save_cluster: SaveClusterOption = None,
    schedule: Annotated[
        str | None, typer.Option(help="Schedule file, output of plan --json, or a strategy's name.")
    ] = None,
    plan: PlanOption = None,
    micro_batch: MicroBatchOption = 1,
    micro_batches: MicroBatchesOption = 1,
    causal: CausalOption = True,
    zero_stage: ZeroOption = 3,
    checkpointing: CheckpointOption = True,
    tiled_loss: TiledOption = True,
    cost_model: CostModelOption = "calibrated",
    as_json: JsonOption = False,
) -> None:
    """Predict time and memory of a given schedule or plan of pipelines."""
    devices = read_cluster(cluster, gpus, network, save_cluster)
    workload = workload_of(seq_len, micro_batch, micro_batches, causal, zero_stage, checkpointing, tiled_loss)
    if plan is not None:
        from ds_hetero.cli.pipelines import commands

        commands.simulate(commands.Task.read(devices, model, cost_model, workload), plan, as_json)
        return
    if schedule is None:
        raise typer.BadParameter("give --schedule or --plan.")
    from ds_hetero.cli import simulate as command
    from ds_hetero.cli.scenario import Scenario

    command.run(Scenario.read(devices, model, workload, cost_model), schedule, as_json)


@app.command()
def compare(
    model: ModelOption,
    seq_len: SeqLenOption,
    cluster: ClusterOption = None,
    gpus: GpusOption = None,
    network: NetworkOption = None,
    save_cluster: SaveClusterOption = None,
    micro_batch: MicroBatchOption = 1,
    micro_batches: MicroBatchesOption = 1,
    causal: CausalOption = True,
    zero_stage: ZeroOption = 3,
    checkpointing: CheckpointOption = True,
    tiled_loss: TiledOption = True,
    cost_model: CostModelOption = "calibrated",
    exact: Annotated[bool, typer.Option("--exact", help="Add the optimum in coarse units, up to 8 ranks.")] = False,
    parallel: ParallelOption = "sequence",
    global_batch: GlobalBatchOption = None,
    as_json: JsonOption = False,
) -> None:
    """All strategies, or all planners of pipelines, on one cluster, in one table."""
    devices = read_cluster(cluster, gpus, network, save_cluster)
    workload = workload_of(seq_len, micro_batch, micro_batches, causal, zero_stage, checkpointing, tiled_loss)
    if _is_full(parallel, global_batch):
        from ds_hetero.cli.pipelines import commands, compare

        assert global_batch is not None  # see _is_full
        compare.run(commands.Task.read(devices, model, cost_model, workload), global_batch, as_json)
        return
    from ds_hetero.cli import compare as command
    from ds_hetero.cli.scenario import Scenario

    command.run(Scenario.read(devices, model, workload, cost_model), exact, as_json)


@app.command()
def show(
    model: ModelOption,
    seq_len: SeqLenOption,
    cluster: ClusterOption = None,
    gpus: GpusOption = None,
    network: NetworkOption = None,
    save_cluster: SaveClusterOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Picture to write: .svg, .png or .html; may be left out with --documents and --sample."),
    ] = None,
    schedule: Annotated[str, typer.Option(help="Schedule file, output of plan --json, or a strategy's name.")] = "plan",
    plan: PlanOption = None,
    documents: Annotated[
        Path | None, typer.Option(help="JSON file with the lengths of a row's documents: where they lie, and the load.")
    ] = None,
    sample: Annotated[
        str | None, typer.Option(help="The same for a row drawn from arxiv, github, prolong64k, or a file of lengths.")
    ] = None,
    seed: SeedOption = 0,
    micro_batch: MicroBatchOption = 1,
    micro_batches: MicroBatchesOption = 1,
    causal: CausalOption = True,
    zero_stage: ZeroOption = 3,
    checkpointing: CheckpointOption = True,
    tiled_loss: TiledOption = True,
    cost_model: CostModelOption = "calibrated",
    as_json: JsonOption = False,
) -> None:
    """Draw a schedule or a plan of pipelines with its timeline, or show where the documents of a batch lie."""
    devices = read_cluster(cluster, gpus, network, save_cluster)
    workload = workload_of(seq_len, micro_batch, micro_batches, causal, zero_stage, checkpointing, tiled_loss)
    if documents is not None or sample is not None:
        from ds_hetero.cli import documents as command_for_documents
        from ds_hetero.cli.scenario import Scenario

        scenario = Scenario.read(devices, model, workload, cost_model)
        command_for_documents.show(scenario, schedule, documents, sample, seed, out, as_json)
        return
    if out is None:
        raise typer.BadParameter("give --out, the picture to write.")
    if plan is not None:
        from ds_hetero.cli.pipelines import commands, show

        show.run(commands.Task.read(devices, model, cost_model, workload), plan, out, as_json)
        return
    from ds_hetero.cli import show as command
    from ds_hetero.cli.scenario import Scenario

    command.run(Scenario.read(devices, model, workload, cost_model), schedule, out, as_json)


@app.command()
def replan(
    plan: Annotated[Path, typer.Option(help="Plan file of pipelines.")],
    cluster: RequiredClusterOption,
    model: ModelOption,
    seq_len: SeqLenOption,
    lost: Annotated[list[int] | None, typer.Option(help="A rank that is lost; once per rank.")] = None,
    lost_node: Annotated[list[str] | None, typer.Option(help="A node whose ranks are all lost.")] = None,
    added: Annotated[str | None, typer.Option(help="Cluster file of nodes that are new.")] = None,
    causal: CausalOption = True,
    tiled_loss: TiledOption = True,
    cost_model: CostModelOption = "calibrated",
    out: Annotated[Path | None, typer.Option(help="Write the new plan file here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan pipelines again after devices are lost or added, and say what must move."""
    from ds_hetero.cli.pipelines import commands

    workload = workload_of(seq_len, 1, 1, causal, 3, True, tiled_loss)
    task = commands.Task.read(cluster, model, cost_model, workload)
    commands.replan(task, plan, lost or [], lost_node or [], added, out, as_json)


@app.command()
def report(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(help="Page to write, .html.")],
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make one HTML page of a plan, and of what a job measured that ran it."""
    from ds_hetero.cli import report as command

    command.run(plan, run, out, as_json)


@app.command()
def trace(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(help="Trace to write, .json.")],
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the predicted step as a trace for Perfetto; with --run the measured one beside it."""
    from ds_hetero.cli import trace as command

    command.run(plan, run, out, as_json)


@app.command()
def profile(
    out: Annotated[Path | None, typer.Option(help="Cluster file to write, .yaml or .json.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; left out, what is usual on the device.")
    ] = None,
    window_s: Annotated[float, typer.Option(help="Seconds per timing.")] = 0.15,
    again: Annotated[
        bool, typer.Option("--again", help='Have the next job with "cluster": "measure" measure anew; works alone.')
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure devices and links of the live ranks; run it under the launcher that will train."""
    require("torch", purpose="ds-hetero profile")
    from ds_hetero.cli import profile as command

    command.run(out, dtype, window_s, again, as_json)


@app.command()
def selftest(
    quick: Annotated[bool, typer.Option("--quick", help="One head size and one ZeRO stage.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds that a call may take before the test ends.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="Write the report here as text, to attach to an issue.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the report here as JSON.")] = None,
    host_names: Annotated[bool, typer.Option("--host-names", help="Name hosts instead of numbering nodes.")] = False,
) -> None:
    """Test kernels, links, collectives and a training step on the live ranks; run it under the launcher."""
    from ds_hetero.cli import selftest as command

    if not command.run(quick=quick, limit_s=timeout_s, out=out, as_json=as_json, host_names=host_names):
        raise typer.Exit(1)


@app.command()
def weights(
    checkpoint: Annotated[Path, typer.Option(help="Folder given to engine.save_checkpoint, of a job of pipelines.")],
    out: Annotated[Path, typer.Option(help="Folder to write: config.json and safetensors, for from_pretrained.")],
    tag: Annotated[str | None, typer.Option(help="Checkpoint in the folder; left out, the latest.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; left out, as the checkpoint has them.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a Hugging Face folder of a checkpoint of pipelines, without ranks."""
    require("torch", purpose="ds-hetero weights")
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed logs as it is imported
        from ds_hetero.cli import weights as command

    command.run(checkpoint, tag, out, dtype, as_json)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option(help="A ds_config.json whose section is to be checked.")] = None,
    world_size: Annotated[int, typer.Option(help="Processes of the job, to check a schedule against.")] = 1,
    num_heads: Annotated[int, typer.Option(help="Query heads of the model, where --model is left out.")] = 32,
    num_kv_heads: Annotated[int, typer.Option(help="KV heads of the model, where --model is left out.")] = 8,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face config.json or its folder, or a preset: to plan and predict.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens to plan for, where the section has no seq_len.")] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="Activation checkpointing of every layer.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """What is installed, which kernels work on this machine's devices, and what a configuration's section comes to."""
    require("torch", purpose="ds-hetero doctor")
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed logs as it is imported
        from ds_hetero.cli.doctor import examine, model_facts, model_of, show

        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        module = model_of(model)
        facts = model_facts(model, module, **sizes, seq_len=seq_len, checkpointing=checkpointing)
        report = examine(config, facts, world_size, module)
    show(report, as_json)
    if not report["healthy"]:
        raise typer.Exit(1)
