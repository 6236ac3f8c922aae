"""Commands that need what training needs, but no ranks."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from ds_hetero.cli.options import AS_JSON, FILE
from ds_hetero.common.extras import require

__all__ = ["doctor", "weights"]


@click.command
@click.option(
    "--checkpoint", type=FILE, required=True, help="Folder given to engine.save_checkpoint, of a job of pipelines."
)
@click.option(
    "--out", type=FILE, required=True, help="Folder to write: config.json and safetensors, for from_pretrained."
)
@click.option("--tag", help="Checkpoint in the folder; left out, the latest.")
@click.option("--dtype", help="float32, bfloat16 or float16; left out, as the checkpoint has them.")
@AS_JSON
def weights(checkpoint: Path, out: Path, tag: str | None, dtype: str | None, as_json: bool) -> None:
    """Make a Hugging Face folder of a checkpoint of pipelines, without ranks."""
    require("torch", purpose="ds-hetero weights")
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed logs as it is imported
        from ds_hetero.cli import weights as command

    command.run(checkpoint, tag, out, dtype, as_json)


@click.command
@click.option("--config", type=FILE, help="A ds_config.json whose section is to be checked.")
@click.option("--world-size", type=int, default=1, help="Processes of the job, to check a schedule against.")
@click.option("--num-heads", type=int, default=32, help="Query heads of the model, where --model is left out.")
@click.option("--num-kv-heads", type=int, default=8, help="KV heads of the model, where --model is left out.")
@click.option("--model", help="Hugging Face config.json or its folder, or a preset: to plan and predict.")
@click.option("--seq-len", type=int, help="Tokens to plan for, where the section has no seq_len.")
@click.option("--checkpointing/--no-checkpointing", default=False, help="Activation checkpointing of every layer.")
@AS_JSON
def doctor(config: Path | None, world_size: int, model: str | None, as_json: bool, **facts_of_job: Any) -> None:
    """What is installed, which kernels work on this machine's devices, and what a configuration's section comes to."""
    require("torch", purpose="ds-hetero doctor")
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed logs as it is imported
        from ds_hetero.cli.doctor import examine, model_facts, model_of, show

        module = model_of(model)
        report = examine(config, model_facts(model, module, **facts_of_job), world_size, module)
    show(report, as_json)
    if not report["healthy"]:
        raise click.exceptions.Exit(1)
