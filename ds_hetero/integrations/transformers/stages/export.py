"""The weights of a model that is cut into stages, as a folder that transformers loads: a file a stage, and an index."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ds_hetero.errors import CheckpointError
from ds_hetero.job.checkpoint_folder import why_not_written
from ds_hetero.runtime.collectives import on_all_ranks

__all__ = ["whole_parameter", "write_stages"]

_INDEX = "model.safetensors.index.json"


class _Written(NamedTuple):
    """What a stage has written.

    Args:
        file: its name.
        sizes: bytes of every tensor in it, by name.
    """

    file: str
    sizes: dict[str, int]


def write_stages(held: Mapping[str, nn.Parameter | Tensor], stage: tuple[int, int] | None, folder: Path) -> None:
    """Write every parameter once, from one rank of each stage of a pipeline.

    Args:
        held: what this rank holds, by the names of the whole model; a tied parameter in two stages under one name.
        stage: index of this rank's stage, and number of the stages, on the ranks that write; None on others. Every
            rank of a tensor-parallel stage takes part, whether it writes or not.
        folder: that all ranks see.

    Caller: every rank of the world.
    Collectives: two `on_all_ranks`; in tensor-parallel stages an all_gather for every parameter that is cut.

    Raises:
        CheckpointError: on every rank, when a rank cannot write.
    """
    whole = {name: whole_parameter(tensor) for name, tensor in held.items()}

    def write() -> _Written | None:
        with _naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if stage is None:
            return None
        name = f"model-{stage[0] + 1:05d}-of-{stage[1]:05d}.safetensors"
        with _naming(folder / name):
            save_file({key: t.contiguous() for key, t in whole.items()}, folder / name, metadata={"format": "pt"})
        return _Written(name, {key: t.numel() * t.element_size() for key, t in whole.items()})

    written = sorted((of_rank for of_rank in on_all_ranks(write) if of_rank is not None), reverse=True)

    def index() -> None:
        if dist.get_rank() == 0:
            files = {key: of_stage.file for of_stage in written for key in of_stage.sizes}  # of the first stage with it
            sizes = {key: size for of_stage in written for key, size in of_stage.sizes.items()}
            content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(files.items()))}
            with _naming(folder / _INDEX):
                (folder / _INDEX).write_text(json.dumps(content, indent=2), encoding="utf-8")

    on_all_ranks(index)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise what the file system refuses as a `CheckpointError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {why_not_written(path, error)}.") from error


def whole_parameter(tensor: Tensor) -> Tensor:
    """Return all of a parameter on the CPU; every rank of its mesh, if it has one, takes part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
