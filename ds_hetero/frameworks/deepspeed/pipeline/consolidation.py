"""Convert a checkpoint of pipelines into a folder that transformers reads.

The command ``ds-hetero weights`` does this, in one process and without GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.pipeline.checkpoints import MODEL_CONFIG, open_rank_files, whole_tensor
from ds_hetero.frameworks.deepspeed.protocols import Content
from ds_hetero.job.checkpoints import expect_finished
from ds_hetero.job.manifest import changed_parts, read_manifest
from ds_hetero.job.weight_files import file_name, make_folder, write_index, write_text, write_weights

_ADAPTER_NAME = ".lora_"  # part of the names of LoRA parameters, as PEFT makes them
FILE_BYTES = 5 * 10**9  # largest file of weights, as in transformers; a larger tensor has a file by itself


@dataclass(frozen=True, kw_only=True)
class WrittenWeights:
    """What `consolidate` has written: step, number and bytes of parameters, files."""

    step: int  # optimizer steps done when the checkpoint was saved
    tensors: int  # number of parameters; a tied one counts once
    size_bytes: int  # of all parameters
    files: tuple[str, ...]  # names of the files with weights


def consolidate(
    checkpoint: Path, tag: str | None, out: Path, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES
) -> WrittenWeights:
    """Write the weights and the configuration of a checkpoint of pipelines as ``from_pretrained`` reads them.

    The tensors of one file at a time are in memory.

    Args:
        checkpoint: the folder given to ``save_checkpoint``, or a checkpoint folder of the Trainer.
        tag: of the checkpoint; None for the tag in the file ``latest``.
        out: folder to write, which must not have weights.
        dtype: of the written weights; None keeps the dtype in which they were saved.
        file_bytes: largest size of a file.

    Raises:
        CheckpointError: there is no such checkpoint, files of it are missing or damaged, it has adapters, or ``out``
            cannot be written.
    """
    folder = _folder_of_tag(checkpoint, tag)
    parts = _open_complete_parts(folder)
    shapes = {name: tuple(piece["shape"]) for part in parts for name, piece in part["optimizer"]["owned"].items()}
    frozen = {name: tensor for part in parts for name, tensor in (part.get("module") or {}).items()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in frozen.items()}
    if any(_ADAPTER_NAME in name for name in shapes):
        raise CheckpointError(
            f"{folder} is a checkpoint of a model with adapters, which cannot be written as the weights of a whole "
            "model. Load it into the model with engine.load_checkpoint, and merge the adapters there."
        )
    item_bytes = 4 if dtype is None else dtype.itemsize
    bytes_by_name = {name: prod(shape) * item_bytes for name, shape in shapes.items()}
    names_by_file = list(_split_into_files(bytes_by_name, file_bytes))
    file_by_name: dict[str, str] = {}
    written_bytes: dict[str, int] = {}
    make_folder(out)
    if any(out.glob("*.safetensors")):
        raise CheckpointError(f"{out} holds weights already. Name another folder.")
    for number, names in enumerate(names_by_file, 1):
        file = file_name(number, len(names_by_file))
        tensors = {name: _assemble_tensor(name, shapes[name], parts, frozen, dtype) for name in names}
        write_weights(out / file, tensors)
        file_by_name |= dict.fromkeys(names, file)
        written_bytes |= {name: tensor.nbytes for name, tensor in tensors.items()}
    total_bytes = sum(written_bytes.values())
    write_text(out / "config.json", json.dumps(parts[0][MODEL_CONFIG], indent=2) + "\n")
    write_index(out, file_by_name, total_bytes)
    return WrittenWeights(
        step=parts[0]["global_steps"],
        tensors=len(written_bytes),
        size_bytes=total_bytes,
        files=tuple(dict.fromkeys(file_by_name.values())),
    )


def _folder_of_tag(checkpoint: Path, tag: str | None) -> Path:
    """Return the folder of a tag, or of the tag in the file ``latest``. Raises `CheckpointError`: it does not exist."""
    latest = checkpoint / "latest"
    if tag is None:
        if not latest.is_file():
            raise CheckpointError(
                f"{checkpoint} has no file named latest, which names its newest checkpoint. Choose one with --tag."
            )
        tag = latest.read_text(encoding="utf-8").strip()
    if not (checkpoint / tag).is_dir():
        raise CheckpointError(f"{checkpoint / tag} is not a folder. Choose a checkpoint of {checkpoint} with --tag.")
    return checkpoint / tag


def _open_complete_parts(folder: Path) -> list[Content]:
    """Open the files of all ranks.

    Raises:
        CheckpointError: a file is missing, or not as the save wrote it, or the model's configuration is missing.
    """
    expect_finished(folder)
    manifest = read_manifest(folder)
    if manifest is not None and (faults := changed_parts(folder, manifest, sorted(manifest.parts))):
        listed = "; ".join(f"{name} {fault}" for name, fault in sorted(faults.items()))
        raise CheckpointError(
            f"the checkpoint {folder} (step {manifest.step}) is incomplete or damaged: {listed}. Use another "
            "checkpoint, or restore the files."
        )
    parts = open_rank_files(folder)
    if MODEL_CONFIG not in parts[0]:
        raise CheckpointError(
            f"{folder} was saved by a release of ds_hetero that did not save the model's configuration. Load it with "
            "engine.load_checkpoint, save it again, and convert that."
        )
    return parts


def _split_into_files(sizes: Mapping[str, int], max_bytes: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file, in the order of the layers.

    Args:
        sizes: bytes of each tensor, by name.
        max_bytes: largest sum of sizes in a file; a larger tensor has a file by itself.
    """
    names: list[str] = []
    num_bytes = 0
    for name in sorted(sizes, key=_layer_order):
        if names and num_bytes + sizes[name] > max_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += sizes[name]
    yield names


def _layer_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key with which ``layers.10`` comes after ``layers.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _assemble_tensor(
    name: str, shape: Sequence[int], parts: Sequence[Content], frozen: Mapping[str, Tensor], dtype: torch.dtype | None
) -> Tensor:
    """Return a whole parameter in ``dtype``; see `consolidate`.

    Args:
        name: of the parameter.
        shape: of the parameter.
        parts: files of all ranks, which have pieces of trained parameters.
        frozen: whole frozen parameters, by name.
        dtype: of the result; None keeps the dtype in which the parameter was saved.
    """
    if name in frozen:
        full_tensor = frozen[name]
    else:
        pieces = [part["optimizer"]["owned"][name] for part in parts if name in part["optimizer"]["owned"]]
        full_tensor = whole_tensor(name, shape, [(piece["boxes"], piece["value"]) for piece in pieces])
    return (full_tensor if dtype is None else full_tensor.to(dtype)).contiguous()
