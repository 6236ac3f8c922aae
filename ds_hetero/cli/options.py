"""Options that several commands share, and the cluster and the training that they describe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ds_hetero.cluster.topology import Cluster
    from ds_hetero.cost.workload import Workload

__all__ = ["read_cluster", "workload_of"]

RequiredClusterOption = Annotated[
    str, typer.Option("--cluster", help="Cluster file, YAML or JSON, or the name of a ready one.")
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="Cluster file, YAML or JSON, or the name of a ready one.")
]
GpusOption = Annotated[
    str | None,
    typer.Option("--gpus", help='Instead of --cluster: "5090,3090x2", or "8xH100 | 8xA100" for two nodes.'),
]
NetworkOption = Annotated[
    str | None,
    typer.Option("--network", help="Between the nodes of --gpus: 25 for GB/s of one direction, or 200Gbit/s."),
]
SaveClusterOption = Annotated[
    Path | None, typer.Option("--save-cluster", help="Write the cluster of --gpus here, .yaml or .json.")
]
ModelOption = Annotated[str, typer.Option("--model", help="Hugging Face config.json or its folder, or a preset.")]
SeqLenOption = Annotated[int, typer.Option("--seq-len", help="Tokens of a sequence, over all ranks.")]
MicroBatchOption = Annotated[int, typer.Option("--micro-batch", help="Sequences per micro-batch.")]
MicroBatchesOption = Annotated[int, typer.Option("--micro-batches", help="Micro-batches per iteration.")]
CausalOption = Annotated[bool, typer.Option("--causal/--full", help="Causal or full attention.")]
ZeroOption = Annotated[int, typer.Option("--zero-stage", help="ZeRO stage, 0 to 3.")]
CheckpointOption = Annotated[
    bool, typer.Option("--checkpointing/--no-checkpointing", help="Activation checkpointing of every layer.")
]
TiledOption = Annotated[bool, typer.Option("--tiled-loss/--whole-loss", help="Compute the loss in tiles of tokens.")]
CostModelOption = Annotated[
    str,
    typer.Option(
        "--cost-model",
        help="calibrated, or published: Eqs. 2-12 of HexiSeq to the letter; of pipelines calibrated or hexiscale.",
    ),
]
ParallelOption = Annotated[
    str,
    typer.Option("--parallel", help="sequence: one replica; full: pipelines of unequal stages, see --global-batch."),
]
GlobalBatchOption = Annotated[
    int | None, typer.Option("--global-batch", help="Sequences per optimizer step, for --parallel full.")
]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="Plan file of pipelines, instead of --schedule.")]
PlanArgument = Annotated[Path, typer.Argument(help="Plan file, as plan --out or plan --json wrote it.")]
RunOption = Annotated[Path | None, typer.Option("--run", help="run.json of a job that ran the plan.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the batches that are drawn from a distribution.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]


def workload_of(
    seq_len: int,
    micro_batch: int,
    micro_batches: int,
    causal: bool,
    zero_stage: int,
    checkpointing: bool,
    tiled_loss: bool,
    reduce_bucket: int | None = None,
) -> Workload:
    """The options that describe the training, as a workload; with ``reduce_bucket`` DeepSpeed's buffers are counted."""
    from ds_hetero.cost.workload import Buffers, Workload

    return Workload(
        seq_len=seq_len,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        causal=causal,
        zero_stage=zero_stage,
        activation_checkpointing=checkpointing,
        tiled_logits=tiled_loss,
        buffers=None if reduce_bucket is None else Buffers(reduce_bucket=reduce_bucket),
    )


def read_cluster(cluster: str | None, gpus: str | None, network: str | None, save: Path | None) -> Cluster:
    """The cluster that the options name; what was decided for the user, and what cannot be trained on, goes to stderr.

    Args:
        cluster: file or name.
        gpus: line of cards, see `ds_hetero.cluster.notation`.
        network: between its nodes.
        save: cluster file to write.

    Raises:
        ClusterError: the cluster is none.
        PlanError: the file cannot be written.
    """
    from ds_hetero.cluster.files import load_cluster
    from ds_hetero.cluster.notation import device_remarks, read_notation

    if (cluster is None) == (gpus is None):
        raise typer.BadParameter("give either --cluster or --gpus.")
    if gpus is None:
        if network is not None or save is not None:
            raise typer.BadParameter("--network and --save-cluster belong to --gpus.")
        loaded = load_cluster(str(cluster))
        _say(device_remarks(loaded.devices))
        return loaded
    notation = read_notation(gpus, network)
    loaded = load_cluster(notation.content)
    if save is not None:
        from ds_hetero.cli.printing import check_out
        from ds_hetero.cluster.writing import check_cluster_file, write_cluster

        check_cluster_file("--save-cluster", save)
        check_out(save, "--save-cluster")
        write_cluster(notation.content, save)
    _say((*notation.remarks, *device_remarks(loaded.devices)))
    return loaded


def _say(remarks: Sequence[str]) -> None:
    for remark in remarks:
        print(f"note: {remark}.", file=sys.stderr)
