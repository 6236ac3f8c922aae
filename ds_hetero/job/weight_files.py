"""Write weight files for transformers: safetensors, and an index with the file of every tensor.

Errors of the file system and of safetensors are raised as a `CheckpointError` that names the file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ds_hetero.errors import CheckpointError
from ds_hetero.job.checkpoints import write_failure_reason


def file_name(number: int, count: int) -> str:
    """Return the name of the ``number``-th of ``count`` files, counted from 1."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def make_folder(folder: Path) -> None:
    """Make a folder if it is missing. Raises `CheckpointError`: it cannot be made."""
    with _write_errors_naming(folder):
        folder.mkdir(parents=True, exist_ok=True)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file. Raises `CheckpointError`: it cannot be written."""
    with _write_errors_naming(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def write_index(folder: Path, files: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of a folder: the file of every tensor, and the total bytes. Raises `CheckpointError`."""
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    write_text(folder / "model.safetensors.index.json", json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file. Raises `CheckpointError`: it cannot be written."""
    with _write_errors_naming(path):
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _write_errors_naming(path: Path) -> Iterator[None]:
    """Raise errors of writing as a `CheckpointError` that names the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {write_failure_reason(path, error)}.") from error
