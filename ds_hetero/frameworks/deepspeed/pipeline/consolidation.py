"""A folder of transformers out of a checkpoint of pipelines, by one process without ranks: ``ds-hetero weights``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.pipeline.checkpoints import MODEL_CONFIG, read_parts, whole_tensor
from ds_hetero.frameworks.deepspeed.protocols import Content
from ds_hetero.job.checkpoints import expect_finished
from ds_hetero.job.manifest import changed_parts, read_manifest
from ds_hetero.job.weight_files import file_name, make_folder, write_index, write_text, write_weights

_ADAPTER = ".lora_"
FILE_BYTES = 5 * 10**9  # of a file of weights at most, as transformers has it; one tensor may have more


@dataclass(frozen=True, kw_only=True)
class Consolidated:
    """Files that were written."""

    step: int  # optimizer steps done when the checkpoint was saved
    tensors: int  # parameters, a tied one once
    size_bytes: int  # of all of them
    files: tuple[str, ...]


def consolidate(
    checkpoint: Path, tag: str | None, out: Path, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES
) -> Consolidated:
    """Write the weights of a checkpoint of pipelines, and its configuration, as ``from_pretrained`` reads them.

    One file's tensors are in memory at a time.

    Args:
        checkpoint: the folder given to ``save_checkpoint``, or one of the Trainer's.
        tag: of the checkpoint; None for the one that ``latest`` names.
        out: folder to write, which holds no weights yet.
        dtype: of the weights; None for that in which they were saved.
        file_bytes: of a file at most.

    Raises:
        CheckpointError: there is no such checkpoint, parts of it are missing or damaged, it holds adapters, or ``out``
            cannot be written.
    """
    folder = _folder_of_tag(checkpoint, tag)
    parts = _whole_parts(folder)
    shapes = {name: tuple(piece["shape"]) for part in parts for name, piece in part["optimizer"]["owned"].items()}
    frozen = {name: tensor for part in parts for name, tensor in (part.get("module") or {}).items()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in frozen.items()}
    if any(_ADAPTER in name for name in shapes):
        raise CheckpointError(
            f"{folder} is of a model with adapters, which a folder of a whole model does not hold. Load it into the "
            "model with engine.load_checkpoint, and merge the adapters there."
        )
    item_bytes = 4 if dtype is None else dtype.itemsize
    batches = list(_batches({name: prod(shape) * item_bytes for name, shape in shapes.items()}, file_bytes))
    files: dict[str, str] = {}
    sizes: dict[str, int] = {}
    make_folder(out)
    if any(out.glob("*.safetensors")):
        raise CheckpointError(f"{out} holds weights already. Name another folder.")
    for number, names in enumerate(batches, 1):
        file = file_name(number, len(batches))
        tensors = {name: _tensor(name, shapes[name], parts, frozen, dtype) for name in names}
        write_weights(out / file, tensors)
        files |= dict.fromkeys(names, file)
        sizes |= {name: tensor.nbytes for name, tensor in tensors.items()}
    write_text(out / "config.json", json.dumps(parts[0][MODEL_CONFIG], indent=2) + "\n")
    write_index(out, files, sum(sizes.values()))
    written = tuple(dict.fromkeys(files.values()))
    return Consolidated(
        step=parts[0]["global_steps"], tensors=len(sizes), size_bytes=sum(sizes.values()), files=written
    )


def _folder_of_tag(checkpoint: Path, tag: str | None) -> Path:
    latest = checkpoint / "latest"
    if tag is None:
        if not latest.is_file():
            raise CheckpointError(f"{checkpoint} has no file named latest. Name the checkpoint in it by --tag.")
        tag = latest.read_text(encoding="utf-8").strip()
    if not (checkpoint / tag).is_dir():
        raise CheckpointError(f"{checkpoint / tag} is not a folder.")
    return checkpoint / tag


def _whole_parts(folder: Path) -> list[Content]:
    """Return the files of all ranks, which are as one save wrote them."""
    expect_finished(folder)
    manifest = read_manifest(folder)
    if manifest is not None and (faults := changed_parts(folder, manifest, sorted(manifest.parts))):
        listed = "; ".join(f"{name} {fault}" for name, fault in sorted(faults.items()))
        raise CheckpointError(f"the checkpoint {folder} is of step {manifest.step}, but {listed}.")
    parts = read_parts(folder)
    if MODEL_CONFIG not in parts[0]:
        raise CheckpointError(f"{folder} was saved by a release that did not keep the model's configuration in it.")
    return parts


def _batches(sizes: Mapping[str, int], most_bytes: int) -> Iterator[list[str]]:
    """Yield names in runs of at most ``most_bytes``, in the order of the layers."""
    names: list[str] = []
    held = 0
    for name in sorted(sizes, key=_natural):
        if names and held + sizes[name] > most_bytes:
            yield names
            names, held = [], 0
        names.append(name)
        held += sizes[name]
    yield names


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``layers.10`` after ``layers.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _tensor(
    name: str, shape: Sequence[int], parts: Sequence[Content], frozen: Mapping[str, Tensor], dtype: torch.dtype | None
) -> Tensor:
    if name in frozen:
        whole = frozen[name]
    else:
        pieces = [part["optimizer"]["owned"][name] for part in parts if name in part["optimizer"]["owned"]]
        whole = whole_tensor(name, shape, [(piece["boxes"], piece["value"]) for piece in pieces])
    return (whole if dtype is None else whole.to(dtype)).contiguous()
