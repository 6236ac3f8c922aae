"""Options that several commands share, and the cluster and the training that they describe.

A name in capitals is one option. `cluster_options` and `training_options` are sets of them: the command gets what they
describe, read and checked, as one argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ds_hetero.cluster.topology import Cluster
    from ds_hetero.cost.workload import Workload

__all__ = [
    "AS_JSON",
    "COST_MODEL",
    "FILE",
    "GLOBAL_BATCH",
    "LAYOUT",
    "MODEL",
    "PARALLEL",
    "PLAN_FILE",
    "SEED",
    "cluster_options",
    "training_options",
]

FILE = click.Path(path_type=Path)

_CLUSTER_OPTIONS = (
    click.option("--cluster", help="Cluster file, YAML or JSON, or the name of a ready one."),
    click.option("--gpus", help='Instead of --cluster: "5090,3090x2", or "8xH100 | 8xA100" for two nodes.'),
    click.option("--network", help="Between the nodes of --gpus: 25 for GB/s of one direction, or 200Gbit/s."),
    click.option("--save-cluster", type=FILE, help="Write the cluster of --gpus here, .yaml or .json."),
)
_SEQ_LEN = click.option("--seq-len", type=int, required=True, help="Tokens of a sequence, over all ranks.")
_CAUSAL = click.option("--causal/--full", default=True, help="Causal or full attention.")
_BATCH = (
    click.option("--micro-batch", type=int, default=1, help="Sequences per micro-batch."),
    click.option("--micro-batches", type=int, default=1, help="Micro-batches per iteration."),
)
_MEMORY = (
    click.option("--zero-stage", type=int, default=3, help="ZeRO stage, 0 to 3."),
    click.option("--checkpointing/--no-checkpointing", default=True, help="Activation checkpointing of every layer."),
)
_COST_MODELS = "calibrated, or published: Eqs. 2-12 of HexiSeq to the letter; of pipelines calibrated or hexiscale."

MODEL = click.option("--model", required=True, help="Hugging Face config.json or its folder, or a preset.")
COST_MODEL = click.option("--cost-model", default="calibrated", help=_COST_MODELS)
LAYOUT = click.option("--layout", help="zigzag or contiguous; left out, the planner's choice.")
PARALLEL = click.option(
    "--parallel", default="sequence", help="sequence: one replica; full: pipelines of unequal stages."
)
GLOBAL_BATCH = click.option("--global-batch", type=int, help="Sequences per optimizer step, for --parallel full.")
PLAN_FILE = click.option("--plan", type=FILE, help="Plan file of pipelines, instead of --schedule.")
SEED = click.option("--seed", type=int, default=0, help="Of the batches that are drawn from a distribution.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")


def cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--cluster``, ``--gpus``, ``--network``, ``--save-cluster``; the command gets a `Cluster` as ``cluster``."""

    @wraps(function)
    def with_cluster(
        *, cluster: str | None, gpus: str | None, network: str | None, save_cluster: Path | None, **others: Any
    ) -> Any:
        return function(cluster=_read_cluster(cluster, gpus, network, save_cluster), **others)

    return _with(_CLUSTER_OPTIONS, with_cluster)


def training_options(
    *, tiled_loss: bool = True, batch: bool = True, memory: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options that describe the training; the command gets a `Workload` as ``workload``.

    Args:
        tiled_loss: what holds where it is left out.
        batch: with ``--micro-batch`` and ``--micro-batches``.
        memory: with ``--zero-stage``, ``--checkpointing``, ``--tiled-mlp``, ``--offload-activations`` and
            ``--offload-optimizer``.
    """
    tiled = click.option("--tiled-loss/--whole-loss", default=tiled_loss, help="Compute the loss in tiles of tokens.")
    tiled_mlp = click.option("--tiled-mlp/--whole-mlp", default=False, help="Compute MLPs in tiles of tokens.")
    offload = click.option("--offload-optimizer", is_flag=True, help="Optimizer state in the host's memory.")
    checkpoints = click.option("--offload-activations", is_flag=True, help="Checkpoints in the host's memory.")
    of_memory = (*_MEMORY, tiled_mlp, checkpoints, offload) if memory else ()
    options = (_SEQ_LEN, *(_BATCH if batch else ()), _CAUSAL, *of_memory, tiled)
    names = (
        *("seq_len", "micro_batch", "micro_batches", "causal", "zero_stage", "checkpointing"),
        *("tiled_loss", "tiled_mlp", "offload_activations", "offload_optimizer"),
    )

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def with_workload(**arguments: Any) -> Any:
            training = {name: arguments.pop(name) for name in names if name in arguments}
            return function(workload=_workload(**training), **arguments)

        return _with(options, with_workload)

    return add


def _with(options: Sequence[Callable[[Any], Callable[..., Any]]], function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        function = option(function)
    return function


def _workload(
    seq_len: int,
    micro_batch: int = 1,
    micro_batches: int = 1,
    causal: bool = True,
    zero_stage: int = 3,
    checkpointing: bool = True,
    tiled_loss: bool = True,
    tiled_mlp: bool = False,
    offload_activations: bool = False,
    offload_optimizer: bool = False,
) -> Workload:
    """Return the options that describe the training as a workload."""
    from ds_hetero.cost.workload import Workload

    return Workload(
        seq_len=seq_len,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        causal=causal,
        zero_stage=zero_stage,
        activation_checkpointing=checkpointing,
        tiled_logits=tiled_loss,
        tiled_mlp=tiled_mlp,
        offload_activations=offload_activations,
        offload_optimizer=offload_optimizer,
    )


def _read_cluster(cluster: str | None, gpus: str | None, network: str | None, save: Path | None) -> Cluster:
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
        raise click.UsageError("give either --cluster or --gpus.")
    if gpus is None:
        if network is not None or save is not None:
            raise click.UsageError("--network and --save-cluster belong to --gpus.")
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
