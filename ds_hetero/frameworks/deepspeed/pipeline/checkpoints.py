"""Checkpoints of pipelines: every rank saves what it owns, and loads what it owns under any other plan.

DeepSpeed writes one file per rank, with its counters, the scheduler and the user's state in each. What the optimizer
puts into it are the values and the optimizer's state of the elements that this rank owns, with the boxes of the whole
parameter that they are. A rank that loads takes its own elements out of the boxes of all files, whatever plan has cut
them: no element is computed with, so it has the bits that were saved.
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
from ds_hetero.gradient_sync.shards import local_tensor, whole_parameter
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.sharding.gradient_chunks import Box, box_size

_PARTS = "mp_rank_*_model_states.pt"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
MODEL_CONFIG = "ds_hetero_model_config"  # the content of config.json
_CLIENT_STATE = "ds_hetero_client_state"  # what the user gave to be saved; DeepSpeed mixes it with its own keys


def save_pipelines(
    pipelined: PipelinedEngine,
    save: Function,
    save_dir: str,
    tag: object = None,
    client_state: Content | None = None,
    save_latest: bool = True,
    **kwargs: object,
) -> object:
    """Around ``save_checkpoint``: see `ds_hetero.frameworks.deepspeed.saving.save_whole`."""
    state = {_CLIENT_STATE: dict(client_state or {}), MODEL_CONFIG: pipelined.stage.configuration}
    return save_whole(pipelined.engine, save, None, save_dir, tag, state, save_latest, **kwargs)


def frozen_state(pipelined: PipelinedEngine, method: Function, *args: object, **kwargs: object) -> State:
    """Replace ``module_state_dict``: gather whole parameters that are not trained, each from one rank that holds it.

    None of them with ``exclude_frozen_parameters``.

    Collectives: in a ``"tensor"`` stage an all_gather for every parameter that is cut and not trained.
    """
    if kwargs.get("exclude_frozen_parameters"):
        return {}
    frozen = {name: p for name, p in pipelined.stage.parameters().items() if not p.requires_grad}
    whole = {name: whole_parameter(parameter) for name, parameter in frozen.items()}
    return whole if pipelined.stage.is_writer else {}


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

    Args:
        load_dir: as of the method, and so the others.
        load_optimizer_states: with moments and the like.
        load_module_only: parameters alone, no counters either.
        kwargs: of the method; without ``load_module_strict`` parameters that are not trained may be left out.

    Caller: every rank of the world.
    Collectives: `on_all_ranks` for each check; those of `AsymmetricGradientSync.gather`.

    Raises:
        CheckpointError: on every rank, when parts are missing, damaged, of another save or of another model.
    """
    folder = _folder(Path(load_dir), tag)
    if folder is None:
        return None, {}
    manifest = None if is_in_memory() else expect_one_save(pipelined.engine, folder, with_optimizer=True)
    engine, optimizer = pipelined.engine, pipelined.engine.optimizer
    parts: list[Content] = []

    def take() -> None:
        parts.extend(read_parts(folder))
        saved = [part["optimizer"]["owned"] for part in parts]
        with_state = load_optimizer_states and not load_module_only
        for name, boxes in optimizer.sync.owned_boxes.items():
            _take_owned(optimizer, name, boxes, [owned[name] for owned in saved if name in owned], with_state)
        _take_frozen(pipelined, parts, is_strict=bool(kwargs.get("load_module_strict", True)))

    on_all_ranks(take)
    optimizer.sync.gather()
    first = parts[0]
    if not load_module_only:
        optimizer.load_state_dict(first["optimizer"])
        for name in _COUNTERS:
            setattr(engine, name, first[name])
        if load_lr_scheduler_states and engine.lr_scheduler is not None and first.get("lr_scheduler") is not None:
            engine.lr_scheduler.load_state_dict(first["lr_scheduler"])
        if manifest is not None:
            restore_random_states(folder, manifest)
    return str(folder), dict(first.get(_CLIENT_STATE, {}))


def read_parts(folder: Path) -> list[Content]:
    """Read the files of all ranks, but no tensors yet. Raises `CheckpointError`: none, or they are of no pipelines."""
    parts: list[Content] = [read_part(str(path)) for path in sorted(folder.glob(_PARTS))]
    if not parts or any("owned" not in (part.get("optimizer") or {}) for part in parts):
        raise CheckpointError(
            f"{folder} holds no checkpoint of pipelines. Load it with the plan or schedule that it was saved under, or "
            "start from its weights."
        )
    return parts


def whole_tensor(name: str, shape: Sequence[int], pieces: Iterable[tuple[Sequence[Box], Tensor]]) -> Tensor:
    """Put a parameter together from boxes and their elements. Raises `CheckpointError`: elements are missing."""
    whole: Tensor | None = None
    filled = 0
    for boxes, values in pieces:
        if whole is None:
            whole = torch.empty(tuple(shape), dtype=values.dtype)
        sizes = [box_size(box) for box in boxes]
        for box, part in zip(boxes, torch.split(values, sizes), strict=True):
            view = whole[_slices(box)]
            view.copy_(part.view(view.shape))
        filled += sum(sizes)
    if whole is None or filled != prod(shape):
        raise CheckpointError(
            f"the checkpoint has {filled} of the {prod(shape)} elements of {name} {list(shape)}: it is of another "
            "model, or parts are missing."
        )
    return whole


def _take_owned(optimizer: Any, name: str, boxes: Sequence[Box], pieces: Sequence[Content], with_state: bool) -> None:
    """Set the values, and the optimizer's state, of what this rank owns of a parameter."""
    owned, shape = optimizer.sync.owned[name], optimizer.sync.shapes[name]
    if any(tuple(piece["shape"]) != tuple(shape) for piece in pieces):
        raise CheckpointError(
            f"{name} is {list(shape)} in the model and {list(pieces[0]['shape'])} in the checkpoint. Load it into the "
            "model that it was saved from."
        )

    def own(values: Sequence[Tensor]) -> Tensor:
        saved = zip((piece["boxes"] for piece in pieces), values, strict=True)
        whole = whole_tensor(name, shape, saved)
        return torch.cat([whole[_slices(box)].reshape(-1) for box in boxes]).to(owned)

    with torch.no_grad():
        owned.copy_(own([piece["value"] for piece in pieces]))
    if not with_state or not pieces or not pieces[0]["state"]:
        return
    state = {}
    for key, first in pieces[0]["state"].items():
        by_element = isinstance(first, Tensor) and first.shape == pieces[0]["value"].shape
        state[key] = own([piece["state"][key] for piece in pieces]) if by_element else first
    optimizer.inner.state[owned] = state


def _take_frozen(pipelined: PipelinedEngine, parts: Sequence[Content], *, is_strict: bool) -> None:
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
        with torch.no_grad():
            local_tensor(parameter).copy_(_part_of(parameter, saved[name]))


def _part_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's shard of a parameter that is cut evenly along one dimension, or all of it."""
    if not isinstance(parameter, DTensor) or not isinstance(placement := parameter.placements[0], Shard):
        return whole
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return whole.chunk(parameter.device_mesh.size(), placement.dim)[coordinate[0]]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _folder(load_dir: Path, tag: object) -> Path | None:
    """Return the folder of a checkpoint, by the tag that rank 0 reads in ``latest`` where none is given."""

    def latest() -> str | None:
        if tag is not None:
            return str(tag)
        path = load_dir / "latest"
        return path.read_text(encoding="utf-8").strip() if dist.get_rank() == 0 and path.is_file() else None

    chosen = on_all_ranks(latest)[0]
    return None if chosen is None else load_dir / chosen
