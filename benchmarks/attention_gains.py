"""Predict steps of Llama-3.1-8B on 4 H100 and 4 A100 with cuDNN, with attention kept, and with coupled rings.

    python -m benchmarks.attention_gains

    before     flash-attn 2 everywhere; checkpointed layers compute attention again
    cudnn      cuDNN on the H100s, which the catalogue has at 1.6 times the rate
    kept       the recomputation takes attention from the forward
    both       cuDNN, and attention kept

Each is planned for itself: ZeRO-3, one sequence a step; with 524,288 tokens, for lack of memory, MLPs in tiles and
checkpoints on the host; two machines with 25 GB/s between them. Nothing here is
measured: all steps are predicted from the catalogue's rates.

Plans of two groups are not slowed down by the coupling of a ring (`ds_hetero.cost.terms.ring`). So the last columns
have the step of a ring of all eight ranks with tokens in proportion to their speeds, over one communicator (coupled)
and over communicators by colour, with cuDNN and attention kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks.measure.results import FOLDER, header, write
from ds_hetero.cluster.attention_rates import with_attention
from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cluster.topology import Cluster, DeviceSpec
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.cost.passes import BlockPasses
from ds_hetero.cost.terms.ring import RingCoefficients
from ds_hetero.models import load_model
from ds_hetero.planner import plan, strategy

GPUS, NETWORK, MODEL = "4xH100-SXM-80GB | 4xA100-SXM-80GB", "25", "llama-3.1-8b"
LENGTHS = (32_768, 131_072, 524_288)
_LONGEST_WITHOUT_OFFLOAD = 262_144  # tokens
WAYS = {"before": (False, False), "cudnn": (True, False), "kept": (False, True), "both": (True, True)}


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_gains", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--output", type=Path, default=FOLDER / "attention_gains.json", help="the result file")
    options = parser.parse_args(words)
    result = header("python -m benchmarks.attention_gains") | {
        "gpus": GPUS,
        "network_gb_per_s": float(NETWORK),
        "model": MODEL,
        "predicted": True,
        "rows": [row(tokens) for tokens in LENGTHS],
    }
    write(result, options.output)
    _show(result, Console())


def row(tokens: int) -> dict[str, Any]:
    """Return the predicted steps of one length, in seconds."""
    model = load_model(MODEL)
    of_length: dict[str, Any] = {"tokens": tokens}
    for name, (has_cudnn, keeps) in WAYS.items():
        planned = plan(_cluster(has_cudnn), model, _workload(tokens, keeps))
        of_length[f"{name}_s"] = planned.prediction.iteration_s
        of_length[f"{name}_plan"] = planned.name
        of_length[f"{name}_groups"] = len(planned.schedule.groups)
    cost = make_cost_model("calibrated", _cluster(True), model, _workload(tokens, True))
    schedule = strategy("proportional", cost)
    of_length["ring_of_8_s"] = cost.predict(schedule).iteration_s
    with mock.patch.object(BlockPasses, "_ring", _coupled(BlockPasses._ring)):
        coupled = make_cost_model("calibrated", cost.cluster, model, cost.workload)
        of_length["ring_of_8_coupled_s"] = coupled.predict(schedule).iteration_s
    return of_length


def _cluster(has_cudnn: bool) -> Cluster:
    """Return the cluster, with the rates of cuDNN on the H100s or of flash-attn 2 everywhere."""
    cluster = cluster_from_dict(read_notation(GPUS, NETWORK).content)

    def with_cudnn(device: DeviceSpec) -> DeviceSpec:
        rates = CATALOGUE[device.name].attention
        return with_attention(device, "cudnn", rates) if "cudnn" in rates else device

    return cluster.with_devices(with_cudnn) if has_cudnn else cluster


def _workload(tokens: int, keeps_attention: bool) -> Workload:
    is_long = tokens > _LONGEST_WITHOUT_OFFLOAD
    return Workload(
        seq_len=tokens,
        zero_stage=3,
        activation_checkpointing=True,
        keep_attention=keeps_attention,
        tiled_mlp=is_long,
        offload_activations=is_long,
    )


def _coupled(ring: Any) -> Any:
    """Return the method that makes a ring's coefficients, for a coupled ring."""

    def make(passes: BlockPasses, *args: Any, **kwargs: Any) -> RingCoefficients:
        made: RingCoefficients = ring(passes, *args, **kwargs)
        return made._replace(coupled=True)

    return make


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table(
        "tokens", *WAYS, "both, of before", "ring of 8, coupled", "by colour", title="PREDICTED seconds of a step"
    )
    for of_length in result["rows"]:
        table.add_row(
            f"{of_length['tokens']:,}",
            *(f"{of_length[f'{name}_s']:.2f}" for name in WAYS),
            f"{of_length['both_s'] / of_length['before_s']:.0%}",
            f"{of_length['ring_of_8_coupled_s']:.2f}",
            f"{of_length['ring_of_8_s']:.2f}",
        )
    console.print(table)
    for of_length in result["rows"]:
        console.print(
            f"{of_length['tokens']:,} tokens: {of_length['before_plan']}; with both: {of_length['both_plan']}"
        )


if __name__ == "__main__":
    main()
