"""Save a model that is cut into stages in a folder that transformers can load: one file per stage, and an index.

Example, two stages of a model with tied embeddings (sizes in bytes):

    model-00001-of-00002.safetensors    embed_tokens 4096, layers.0 ...
    model-00002-of-00002.safetensors    embed_tokens 4096, layers.1 ..., norm

For ``embed_tokens`` the index names the first file, and its total size counts the 4096 bytes once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.gradient_sync.shards import full_parameter
from ds_hetero.job.weight_files import file_name, make_folder, write_index, write_weights
from ds_hetero.runtime.collectives import on_all_ranks


class _StageFile(NamedTuple):
    """Name of a weights file that one rank of a stage has written, and the size of each tensor in it."""

    name: str
    tensor_bytes: dict[str, int]  # sizes of tensors, by name


def write_stages(parameters: Mapping[str, nn.Parameter | Tensor], stage: tuple[int, int] | None, folder: Path) -> None:
    """Write the parameters of all stages, each stage by one rank.

    Args:
        parameters: of this rank, by their names in the uncut model. A parameter that is tied across two stages has
            the same name in both.
        stage: (index of this rank's stage, number of stages) on the ranks that write, None on all other ranks. All
            ranks of a tensor-parallel stage must call, because the gather of their shards is collective.
        folder: a path that every rank can access.

    Caller: every rank of the world.
    Collectives: two `on_all_ranks`; in tensor-parallel stages an all_gather for every parameter that is sharded.

    Raises:
        CheckpointError: on every rank; a rank could not write.
    """
    full_tensors = {name: full_parameter(tensor) for name, tensor in parameters.items()}

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
        file_by_tensor: dict[str, str] = {}
        bytes_by_tensor: dict[str, int] = {}
        # From the last stage to the first: a tied tensor ends up under the first stage that holds it.
        for file in sorted(files, reverse=True):
            for name, size in file.tensor_bytes.items():
                file_by_tensor[name] = file.name
                bytes_by_tensor[name] = size
        write_index(folder, file_by_tensor, sum(bytes_by_tensor.values()))

    on_all_ranks(write_the_index)
