"""``ds-hetero weights``: a folder of transformers out of a checkpoint of pipelines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from ds_hetero.cli.printing import print_json
from ds_hetero.common.reading import shortened
from ds_hetero.common.units import GIB
from ds_hetero.errors import CheckpointError
from ds_hetero.integrations.deepspeed.pipeline.consolidate import consolidate

__all__ = ["run"]

_DTYPES = ("float32", "bfloat16", "float16")


def run(checkpoint: Path, tag: str | None, out: Path, dtype: str | None, as_json: bool) -> None:
    """Write the folder and say what is in it.

    Raises:
        CheckpointError: see `consolidate`; or an unknown data type.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointError(f"--dtype {shortened(dtype)} is unknown; it is one of {', '.join(_DTYPES)}.")
    written = consolidate(checkpoint, tag, out, None if dtype is None else getattr(torch, dtype))
    if as_json:
        print_json({"out": str(out), **asdict(written)})
        return
    count = len(written.files)
    print(
        f"{written.tensors} tensors, {written.size_bytes / GIB:.2f} GiB in {count} file{'s' if count > 1 else ''}, "
        f"as they were after step {written.step}: {out}"
    )
