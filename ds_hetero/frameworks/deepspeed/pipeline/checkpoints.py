"""Save checkpoints of pipelines, and load them under any other plan.

DeepSpeed writes one file for each rank, with the engine's counters, the scheduler and the script's state.
`PipelineOptimizer` adds the values and the optimizer state of the elements that the rank owns, and their boxes: index
ranges of the whole parameters. A rank that loads opens the files of all ranks and takes the elements that it owns now.
Nothing is computed, so every element keeps its bits.

Example: a parameter [4, 8] that ranks 0 and 1 own has the boxes ((0, 2), (0, 8)) in the file of rank 0, and
((2, 4), (0, 8)) in the file of rank 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ds_hetero.engine.patching import Function
from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.in_memory import is_in_memory, read_part
from ds_hetero.frameworks.deepspeed.loading import expect_one_save
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.protocols import Content, State
from ds_hetero.frameworks.deepspeed.random_states import restore_random_states
from ds_hetero.frameworks.deepspeed.saving import save_whole
from ds_hetero.gradient_sync.shards import full_parameter, local_tensor
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.packed_weights import checksum_of_packed, is_packed
from ds_hetero.sharding.gradient_chunks import Box, box_size

_FILE_PATTERN = "mp_rank_*_model_states.pt"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
MODEL_CONFIG = "ds_hetero_model_config"  # key of the content of the model's config.json
_CLIENT_STATE = "ds_hetero_client_state"  # key of the script's state, which DeepSpeed would mix with its own keys


def save_pipelines(
    pipelined: PipelinedEngine,
    save: Function,
    save_dir: str,
    tag: object = None,
    client_state: Content | None = None,
    save_latest: bool = True,
    **kwargs: object,
) -> object:
    """Replace ``save_checkpoint``: save a checkpoint that counts only if all files are written; see `save_whole`."""
    state = {_CLIENT_STATE: dict(client_state or {}), MODEL_CONFIG: pipelined.stage.configuration}
    return save_whole(pipelined.engine, save, None, None, save_dir, tag, state, save_latest, **kwargs)


def frozen_state(pipelined: PipelinedEngine, method: Function, *args: object, **kwargs: object) -> State:
    """Replace ``module_state_dict``: return the whole frozen parameters of this rank's stage, by name.

    Of the ranks that hold the same parameters, one returns them, and the others return an empty dictionary. With
    ``exclude_frozen_parameters`` all ranks do. Trained parameters are in the optimizer's state. A weight of 4 bits is
    saved as its checksum alone, like a base model beside PEFT's files: the job that loads has quantized it again.

    Collectives: in a ``"tensor"`` stage an all_gather for every frozen parameter that is cut.
    """
    if kwargs.get("exclude_frozen_parameters"):
        return {}
    frozen = {name: p for name, p in pipelined.stage.parameters().items() if not p.requires_grad}
    full_tensors = {
        name: checksum_of_packed(parameter) if is_packed(parameter) else full_parameter(parameter)
        for name, parameter in frozen.items()
    }
    return full_tensors if pipelined.stage.is_writer else {}


def load_any_plan(
    pipelined: PipelinedEngine,
    load: Function,
    load_dir: str,
    tag: object = None,
    *,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    **kwargs: object,
) -> tuple[str | None, State]:
    """Replace ``load_checkpoint``: load a checkpoint of pipelines that was saved under any plan.

    The arguments are those of ``load_checkpoint``. The following have another meaning for pipelines:

    Args:
        load_optimizer_states: whether to load the optimizer's state, such as moments.
        load_module_only: whether to load parameters alone, without optimizer state and counters.
        kwargs: only ``load_module_strict`` is used. If it is False, a frozen parameter that the checkpoint lacks keeps
            its value.

    Returns:
        The checkpoint's folder and the script's state; None and an empty dictionary if there is no checkpoint.

    Caller: every rank of the world.
    Collectives: `on_all_ranks` for each check; those of `AsymmetricGradientSync.gather`.

    Raises:
        CheckpointError: on every rank: files are missing, damaged, of another save or of another model.
    """
    folder = _folder(Path(load_dir), tag)
    if folder is None:
        return None, {}
    manifest = None if is_in_memory() else expect_one_save(pipelined.engine, folder, with_optimizer=True)
    engine, optimizer = pipelined.engine, pipelined.engine.optimizer
    parts: list[Content] = []  # files of all ranks

    def load_parameters() -> None:
        parts.extend(open_rank_files(folder))
        owned_by_file = [part["optimizer"]["owned"] for part in parts]
        with_state = load_optimizer_states and not load_module_only
        for name, boxes in optimizer.sync.owned_boxes.items():
            pieces = [owned[name] for owned in owned_by_file if name in owned]
            _load_owned(optimizer, name, boxes, pieces, with_state)
        load_frozen(pipelined, parts, is_strict=bool(kwargs.get("load_module_strict", True)))

    on_all_ranks(load_parameters)
    optimizer.sync.gather()
    first_part = parts[0]  # counters, scheduler and the script's state are the same in all files
    if not load_module_only:
        optimizer.load_state_dict(first_part["optimizer"])
        for name in _COUNTERS:
            setattr(engine, name, first_part[name])
        scheduler_state = first_part.get("lr_scheduler")
        if load_lr_scheduler_states and engine.lr_scheduler is not None and scheduler_state is not None:
            engine.lr_scheduler.load_state_dict(scheduler_state)
        if manifest is not None:
            restore_random_states(folder, manifest)
    return str(folder), dict(first_part.get(_CLIENT_STATE, {}))


def open_rank_files(folder: Path) -> list[Content]:
    """Open the files of all ranks of a checkpoint; a tensor is read from its file when it is used.

    Raises:
        CheckpointError: the folder has no files, or pipelines did not save them.
    """
    parts: list[Content] = [read_part(str(path)) for path in sorted(folder.glob(_FILE_PATTERN))]
    if not parts or any("owned" not in (part.get("optimizer") or {}) for part in parts):
        raise CheckpointError(
            f"{folder} has no checkpoint that pipelines saved. Load it with the schedule that it was saved under, "
            "without pipelines, or start from its weights."
        )
    return parts


def whole_tensor(name: str, shape: Sequence[int], pieces: Iterable[tuple[Sequence[Box], Tensor]]) -> Tensor:
    """Assemble a whole parameter, or one of its optimizer states, from the pieces in several files.

    Args:
        name: of the parameter, for the error.
        shape: of the whole parameter.
        pieces: for each file, its boxes of the parameter, and the elements of these boxes: 1-D, box after box.

    Raises:
        CheckpointError: elements are missing.
    """
    full_tensor: Tensor | None = None
    num_elements = 0
    for boxes, values in pieces:
        if full_tensor is None:
            full_tensor = torch.empty(tuple(shape), dtype=values.dtype)
        sizes = [box_size(box) for box in boxes]
        for box, part in zip(boxes, torch.split(values, sizes), strict=True):
            view = full_tensor[_slices(box)]
            view.copy_(part.view(view.shape))
        num_elements += sum(sizes)
    if full_tensor is None or num_elements != prod(shape):
        raise CheckpointError(
            f"the checkpoint has {num_elements} of the {prod(shape)} elements of {name} {list(shape)}: it is of "
            "another model, or files are missing. Load it into the model that it was saved from, or load an earlier "
            "checkpoint."
        )
    return full_tensor


def _load_owned(optimizer: Any, name: str, boxes: Sequence[Box], pieces: Sequence[Content], with_state: bool) -> None:
    """Load the elements of a parameter that this rank owns, and their optimizer state.

    Args:
        optimizer: a `PipelineOptimizer`.
        boxes: boxes of the parameter that this rank owns.
        pieces: entries of the parameter in the files, see `PipelineOptimizer.state_dict`; one for each file that has
            some of its elements.
        with_state: whether to load optimizer state.

    Raises:
        CheckpointError: the parameter has another shape, or elements are missing.
    """
    owned, shape = optimizer.sync.owned[name], optimizer.sync.shapes[name]
    if any(tuple(piece["shape"]) != tuple(shape) for piece in pieces):
        raise CheckpointError(
            f"{name} is {list(shape)} in the model and {list(pieces[0]['shape'])} in the checkpoint. Load it into the "
            "model that it was saved from."
        )

    def owned_elements(values: Sequence[Tensor]) -> Tensor:
        """Return the elements that this rank owns of a tensor whose pieces have ``values``."""
        saved_boxes = [piece["boxes"] for piece in pieces]
        full_tensor = whole_tensor(name, shape, zip(saved_boxes, values, strict=True))
        return torch.cat([full_tensor[_slices(box)].reshape(-1) for box in boxes]).to(owned)

    with torch.no_grad():
        owned.copy_(owned_elements([piece["value"] for piece in pieces]))
    if not with_state or not pieces or not pieces[0]["state"]:
        return
    state = {}
    for key, first_entry in pieces[0]["state"].items():
        has_entry_per_element = isinstance(first_entry, Tensor) and first_entry.shape == pieces[0]["value"].shape
        if has_entry_per_element:
            state[key] = owned_elements([piece["state"][key] for piece in pieces])
        else:  # such as a count of steps, which is the same in all files
            state[key] = first_entry
    optimizer.inner.state[owned] = state


def load_frozen(pipelined: PipelinedEngine, parts: Sequence[Content], *, is_strict: bool) -> None:
    """Load this rank's frozen parameters; compare those of 4 bits with their checksums.

    Args:
        parts: files of all ranks.
        is_strict: whether every frozen parameter has to be in the checkpoint.

    Raises:
        CheckpointError: a frozen parameter is missing, or of another model.
    """
    saved = {name: tensor for part in parts for name, tensor in (part.get("module") or {}).items()}
    for name, parameter in pipelined.stage.parameters().items():
        if parameter.requires_grad:
            continue
        if name not in saved:
            if not is_strict:
                continue
            raise CheckpointError(
                f"the checkpoint has no value for {name}, a frozen parameter of this model. Load with "
                "load_module_strict=False to keep the model's own value, or take a checkpoint with frozen parameters."
            )
        if not _is_of(saved[name], parameter):
            raise CheckpointError(
                f"{name}, a frozen parameter, is not the one that the checkpoint was saved with. Build the model from "
                "the same weights, with the same quantization."
            )
        if not is_packed(parameter):
            with torch.no_grad():
                local_tensor(parameter).copy_(_local_part(parameter, saved[name]))


def _is_of(saved: Tensor, parameter: Tensor) -> bool:
    """Whether a saved value is that of a frozen parameter. Of a packed weight the checkpoint has the checksum alone."""
    if is_packed(parameter):
        return saved.numel() == 1 and bool(saved.cpu() == checksum_of_packed(parameter).cpu())
    return saved.shape == parameter.shape


def _local_part(parameter: Tensor, full_tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``full_tensor`` if ``parameter`` is a sharded DTensor, else all of it."""
    if not isinstance(parameter, DTensor) or not isinstance(placement := parameter.placements[0], Shard):
        return full_tensor
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return full_tensor.chunk(parameter.device_mesh.size(), placement.dim)[coordinate[0]]


def _slices(box: Box) -> tuple[slice, ...]:
    """Return the index of a box in a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def _folder(load_dir: Path, tag: object) -> Path | None:
    """Return the folder of the checkpoint with a tag; None if there is neither a tag nor a file ``latest``.

    Without a tag, rank 0 reads the tag from the file ``latest``.
    """

    def read_tag() -> str | None:
        if tag is not None:
            return str(tag)
        path = load_dir / "latest"
        return path.read_text(encoding="utf-8").strip() if dist.get_rank() == 0 and path.is_file() else None

    name = on_all_ranks(read_tag)[0]
    return None if name is None else load_dir / name
