"""Weights of a model that is cut into stages, as a folder that transformers loads: a file a stage, and an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.gradient_sync.shards import whole_parameter
from ds_hetero.job.weight_files import file_name, make_folder, write_index, write_weights
from ds_hetero.runtime.collectives import on_all_ranks


class _Written(NamedTuple):
    """Files that a stage has written."""

    file: str
    sizes: dict[str, int]  # bytes of every tensor in it, by name


def write_stages(held: Mapping[str, nn.Parameter | Tensor], stage: tuple[int, int] | None, folder: Path) -> None:
    """Write every parameter once, from one rank of each stage. Raises `CheckpointError` on every rank.

    Args:
        held: what this rank holds, by the names of the whole model; a tied parameter in two stages under one name.
        stage: index of this rank's stage, and number of the stages, on the ranks that write; None on others. Every
            rank of a tensor-parallel stage takes part, whether it writes or not.
        folder: that all ranks see.

    Caller: every rank of the world.
    Collectives: two `on_all_ranks`; in tensor-parallel stages an all_gather for every parameter that is cut.
    """
    whole = {name: whole_parameter(tensor) for name, tensor in held.items()}

    def write() -> _Written | None:
        make_folder(folder)
        if stage is None:
            return None
        name = file_name(stage[0] + 1, stage[1])
        write_weights(folder / name, whole)
        return _Written(name, {key: t.numel() * t.element_size() for key, t in whole.items()})

    written = sorted((of_rank for of_rank in on_all_ranks(write) if of_rank is not None), reverse=True)

    def index() -> None:
        if dist.get_rank() == 0:
            files = {key: of_stage.file for of_stage in written for key in of_stage.sizes}  # of the first stage with it
            sizes = {key: size for of_stage in written for key, size in of_stage.sizes.items()}
            write_index(folder, files, sum(sizes.values()))

    on_all_ranks(index)
