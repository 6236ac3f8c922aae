"""``ds-hetero weights``: makes a Hugging Face model folder of a checkpoint of pipelines."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path

import click

from ds_hetero.cli.options import AS_JSON, FILE
from ds_hetero.cli.printing import print_json, print_lines
from ds_hetero.common.extras import require
from ds_hetero.common.reading import shortened
from ds_hetero.common.units import GIB
from ds_hetero.errors import CheckpointError

_DTYPES = ("float32", "bfloat16", "float16")


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
    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointError(f"--dtype {shortened(dtype)} is unknown; it is one of {', '.join(_DTYPES)}.")
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed logs as it is imported
        import torch

        from ds_hetero.frameworks.deepspeed.pipeline.consolidation import consolidate

    written = consolidate(checkpoint, tag, out, None if dtype is None else getattr(torch, dtype))
    if as_json:
        print_json({"out": str(out), **asdict(written)})
        return
    num_files = len(written.files)
    files_text = f"{num_files} file{'s' if num_files > 1 else ''}"
    print_lines(
        f"{written.tensors} tensors, {written.size_bytes / GIB:.2f} GiB in {files_text}, "
        f"as they were after step {written.step}: {out}"
    )
