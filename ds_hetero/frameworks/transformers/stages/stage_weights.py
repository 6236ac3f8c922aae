"""Save a model that is cut into stages as a folder that transformers loads: one file per stage, and an index.

Example, two stages of a model with tied embeddings (sizes in bytes):

    model-00001-of-00002.safetensors    embed_tokens 4096, layers.0 ...
    model-00002-of-00002.safetensors    embed_tokens 4096, layers.1 ..., norm

The index names the first file for ``embed_tokens``, and its total counts those bytes once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.gradient_sync.shards import whole_parameter
from ds_hetero.job.weight_files import file_name, make_folder, write_index, write_weights
from ds_hetero.runtime.collectives import on_all_ranks


class _StageFile(NamedTuple):
    """The file that the writing rank of a stage has written."""

    name: str
    tensor_bytes: dict[str, int]  # by the name of the tensor


def write_stages(parameters: Mapping[str, nn.Parameter | Tensor], stage: tuple[int, int] | None, folder: Path) -> None:
    """Write every parameter once, from one rank of each stage. Raises `CheckpointError` on every rank.

    Args:
        parameters: of this rank, by their names in the uncut model. A parameter that is tied across two stages has
            the same name in both.
        stage: (index of this rank's stage, number of stages) on the ranks that write, None on all other ranks. All
            ranks of a tensor-parallel stage must call, because the gather of their shards is collective.
        folder: a path that every rank can see.

    Caller: every rank of the world.
    Collectives: two `on_all_ranks`; in tensor-parallel stages an all_gather for every parameter that is cut.
    """
    full_tensors = {name: whole_parameter(tensor) for name, tensor in parameters.items()}

    def write() -> _StageFile | None:
        make_folder(folder)
        if stage is None:
            return None
        index, num_stages = stage
        name = file_name(index + 1, num_stages)  # transformers counts files from 1
        write_weights(folder / name, full_tensors)
        return _StageFile(name, {key: t.numel() * t.element_size() for key, t in full_tensors.items()})

    files = [file for file in on_all_ranks(write) if file is not None]

    def write_the_index() -> None:
        if dist.get_rank() != 0:
            return
        file_of: dict[str, str] = {}
        bytes_of: dict[str, int] = {}
        # From the last stage to the first: a tied tensor ends up under the first stage that holds it.
        for file in sorted(files, reverse=True):
            for name, size in file.tensor_bytes.items():
                file_of[name] = file.name
                bytes_of[name] = size
        write_index(folder, file_of, sum(bytes_of.values()))

    on_all_ranks(write_the_index)
