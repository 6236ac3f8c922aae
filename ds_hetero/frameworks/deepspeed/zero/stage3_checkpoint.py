"""Save checkpoints of ZeRO-3 as stock DeepSpeed does, and load them on any number of ranks, with any weights.

On disk every checkpoint has DeepSpeed's format: one file per rank that saved it, with shards of equal size. So stock
DeepSpeed resumes from it on that many ranks, and its ``zero_to_fp32.py`` and ``ds_to_universal`` convert it. While
saving, weighted shards are exchanged for equal ones, see `equal_shards`. While loading, each rank reads the elements
that it owns now from the files that have them.

Example: a parameter of 10 elements, saved by 2 ranks as 5 and 5, loaded by ranks that own 8 and 2: rank 0 reads both
files, rank 1 the second one.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    OPTIMIZER_STATE_DICT,
    PARAM_SHAPES,
)
from torch import Tensor

from ds_hetero.engine.patching import Function
from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.in_memory import read_part
from ds_hetero.frameworks.deepspeed.protocols import Content, Engine, State, ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.equal_shards import equal_shards
from ds_hetero.frameworks.deepspeed.zero.parameter_cut import cut_of, is_weighted, owning_group
from ds_hetero.frameworks.deepspeed.zero.weighted_shards import parameter_moves
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.sharding.zero_partition import Move, cut_as_deepspeed


class Stage3Checkpoints:
    """Saves shards of equal size, and loads checkpoints of any number of ranks, for one engine of stage 3.

    Each public method replaces a method of the engine, which it gets as ``method`` and may call. Universal checkpoints
    are loaded by DeepSpeed alone.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saved: SavedCheckpoint | None = None  # the checkpoint that is being loaded

    def equal_shard(self, method: Function, param: ZeroParameter) -> Tensor:
        """Replace ``_get_param_fragment_func``: return the shard of a frozen parameter that this rank saves.

        The result has the same size on every rank; the last shards are padded with zeros.
        """
        if not is_weighted(param):
            fragment: Tensor = method(param)
            return fragment
        return equal_shards(param.ds_tensor.detach(), [param])

    def examine(self, method: Function, load_dir: str, tag: str, **kwargs: object) -> object:
        """Replace ``_load_checkpoint``: examine all files of a checkpoint, then load it.

        Raises:
            CheckpointError: on every rank, before anything is loaded: files are missing or damaged, or the checkpoint
                has other parameters than the model.
        """
        if self._engine.load_universal_checkpoint():
            return method(load_dir, tag, **kwargs)
        self._saved = examine_files(self._engine, load_dir, str(tag))
        with_state = kwargs.get("load_optimizer_states", True) and not kwargs.get("load_module_only", False)
        if with_state:
            expect_same_parameters(self._saved, self._engine)
        loaded = method(load_dir, tag, **kwargs)
        if not with_state:
            self._saved = None
        return loaded

    def list_model_files(self, method: Function, load_dir: str, tag: str) -> list[str]:
        """Replace ``_get_all_ckpt_names``: a rank for which no file was saved reads the file of rank 0."""
        names: list[str] = method(load_dir, tag)
        return names or [self._engine._get_ckpt_name(load_dir, tag, pp_placeholder="0")]

    def load_frozen_parameters(self, method: Function, checkpoint: State, **kwargs: object) -> object:
        """Replace ``load_module_state_dict``: call it with the shards of frozen parameters that this rank owns now."""
        if self._saved is not None and checkpoint.get(FROZEN_PARAM_FRAGMENTS):
            names = set(checkpoint[FROZEN_PARAM_FRAGMENTS])
            shards = read_frozen_shards(self._saved, self._engine, names)
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: shards}
        return method(checkpoint=checkpoint, **kwargs)

    def load_state(self, method: Function, load_dir: str, tag: str, load_optimizer_states: bool = True) -> bool:
        """Replace ``_load_zero_checkpoint``: load this rank's master weights and optimizer state from all files."""
        if self._saved is None or not load_optimizer_states:
            return bool(method(load_dir, tag, load_optimizer_states=load_optimizer_states))
        optimizer, saved = self._engine.optimizer, self._saved
        self._saved = None
        rank = dist.get_rank(group=optimizer.dp_process_group)
        optimizer.load_state_dict({rank: read_state(saved, optimizer)})
        return True


@dataclass(frozen=True)
class _Place:
    """Place of a parameter's shard in each file of a checkpoint; it is the same in all files."""

    sub_group: int  # number of the flat tensor that has the shard
    offset: int  # where the shard begins in that tensor


@dataclass(frozen=True)
class SavedCheckpoint:
    """Files of a checkpoint on disk, in the order of the ranks that saved them, and the parameters in the files."""

    model_files: tuple[str, ...]  # paths of files with buffers, frozen parameters and the state of training
    optimizer_files: tuple[str, ...]  # paths of files with master weights and optimizer state
    places: Mapping[str, _Place]  # by name of a trained parameter
    shapes: Mapping[str, tuple[int, ...]]  # by name of a trained or frozen parameter

    def moves(self, param: ZeroParameter) -> tuple[Move, ...]:
        """Return the copies that fill this rank's shard of a parameter; ``source`` is the number of the file."""
        saved_cut = cut_as_deepspeed(param.ds_numel, len(self.model_files))
        return parameter_moves(param.ds_numel, saved_cut, cut_of(param), dist.get_rank(group=owning_group(param)))


def examine_files(engine: Engine, load_dir: str, tag: str) -> SavedCheckpoint:
    """Read all files of a checkpoint, each on one rank, and return their paths and parameters.

    Caller: every rank of the job.
    Collectives: one `on_all_ranks`.

    Raises:
        CheckpointError: on every rank: files are missing or damaged.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    first_file = engine._get_ckpt_name(load_dir, tag, pp_placeholder="0")
    first_faults = _list_faults([first_file])
    content = {} if first_faults else read_part(first_file)
    num_saved = content.get("dp_world_size", 0)  # ranks that saved the checkpoint
    model_files = tuple(engine._get_ckpt_name(load_dir, tag, pp_placeholder=str(i)) for i in range(num_saved))
    optimizer_files = tuple(_optimizer_file(engine, load_dir, tag, i) for i in range(num_saved))
    files_of_this_rank = (model_files + optimizer_files)[rank::num_ranks]
    faults = set[str]().union(*on_all_ranks(lambda: first_faults | _list_faults(files_of_this_rank)))
    if faults:
        raise CheckpointError(
            f"the checkpoint {os.path.join(load_dir, tag)} is incomplete: {'; '.join(sorted(faults))}. "
            "Load an earlier one."
        )
    places, shapes = {}, {}
    for sub_group, shapes_of_group in enumerate(content[PARAM_SHAPES]):
        offset = 0
        for name, shape in shapes_of_group.items():
            places[name] = _Place(sub_group, offset)
            shapes[name] = tuple(shape)
            offset += cut_as_deepspeed(prod(shape), num_saved).sizes[0]
    frozen_shapes = content.get(FROZEN_PARAM_SHAPES) or {}
    shapes |= {name: tuple(shape) for name, shape in frozen_shapes.items()}
    return SavedCheckpoint(model_files, optimizer_files, places, shapes)


def _optimizer_file(engine: Engine, load_dir: str, tag: str, rank: int) -> str:
    """Return the path of a rank's optimizer state, whose name has a prefix if the saving job trained in bf16.

    If no such file exists, the path has the prefix that this job would use.
    """
    trains_in_bf16 = engine.bfloat16_enabled()
    names = []
    for bf16_mode in (trains_in_bf16, not trains_in_bf16):
        names.append(str(engine._get_rank_zero_ckpt_name(load_dir, tag, 0, rank, bf16_mode=bf16_mode)))
    return next((name for name in names if os.path.exists(name)), names[0])


def _list_faults(files: Iterable[str]) -> set[str]:
    """Return a message for each file that is missing or damaged."""
    return {fault for file in files if (fault := _find_fault(file))}


def _find_fault(file: str) -> str:
    """Return a message that says why a file cannot be read; empty if it can be read."""
    try:
        read_part(file)
    except CheckpointError as error:
        return str(error)
    return ""


def expect_same_parameters(saved: SavedCheckpoint, engine: Engine) -> None:
    """Check that a checkpoint has the parameters that the engine trains. Raises `CheckpointError`, on every rank."""
    shapes = {name: tuple(shape) for group in engine._get_zero_param_shapes() for name, shape in group.items()}
    faults = {
        "missing": sorted(shapes.keys() - saved.places.keys()),
        "not in this model": sorted(saved.places.keys() - shapes.keys()),
        "of another shape": [
            f"{name} {saved.shapes[name]} instead of {shape}"
            for name, shape in shapes.items()
            if saved.shapes.get(name, shape) != shape
        ],
    }
    if any(faults.values()):
        listed = "; ".join(f"{fault}: {', '.join(names[:5])}" for fault, names in faults.items() if names)
        raise CheckpointError(
            f"the checkpoint was saved from another model, or from one with other trained parameters. {listed}. "
            "Load it into the model that it was saved from."
        )


class _StateCopy(NamedTuple):
    """Which elements of a parameter are copied from a file, and to where in this rank's flat tensors."""

    sub_group: int  # number of this rank's flat tensor
    offset: int  # where this rank's shard of the parameter begins in that tensor
    place: _Place  # of the parameter's shard in the file
    move: Move  # from the saved shard to this rank's


def read_state(saved: SavedCheckpoint, optimizer: Any) -> State:
    """Return the state dict that this rank would have saved with the shards that it owns now.

    Raises:
        CheckpointError: the checkpoint has another number of parameter groups, or state that cannot be repartitioned.
    """
    weights = [torch.zeros(flat.shape, dtype=flat.dtype) for flat in optimizer.fp32_partitioned_groups_flat]
    states: list[State] = [{} for _ in weights]
    copies_by_file: dict[int, list[_StateCopy]] = {}
    for sub_group, params in enumerate(optimizer.fp16_groups):
        offset = 0
        for param in params:
            place = saved.places[optimizer.param_names[param]]
            for move in saved.moves(param):
                copies_by_file.setdefault(move.source, []).append(_StateCopy(sub_group, offset, place, move))
            offset += param.ds_tensor.ds_numel

    file: State = {}
    for source, copies in sorted(copies_by_file.items()):
        file = read_part(saved.optimizer_files[source])[OPTIMIZER_STATE_DICT]
        for state_copy in copies:
            _copy_elements(file, state_copy, weights[state_copy.sub_group], states[state_copy.sub_group])
    inner = _inner_state_dict(optimizer)
    saved_groups = file[OPTIMIZER_STATE_DICT]["param_groups"]
    if len(saved_groups) != len(inner["param_groups"]):
        raise CheckpointError(
            f"the checkpoint has {len(saved_groups)} parameter groups, but this optimizer has "
            f"{len(inner['param_groups'])}. Make the optimizer with the groups that it had when the checkpoint was "
            "saved."
        )
    param_groups = []
    for saved_group, group in zip(saved_groups, inner["param_groups"], strict=True):
        param_groups.append({**saved_group, "params": group["params"]})
    order = [index for group in param_groups for index in group["params"]]
    return {
        **file,
        FP32_FLAT_GROUPS: weights,
        OPTIMIZER_STATE_DICT: {
            "state": {index: state for index, state in zip(order, states, strict=True) if state},
            "param_groups": param_groups,
        },
    }


def _copy_elements(file: Content, state_copy: _StateCopy, weights: Tensor, state: State) -> None:
    """Copy elements of one parameter from a file into this rank's master weights and optimizer state."""
    place, move = state_copy.place, state_copy.move
    flat = file[FP32_FLAT_GROUPS][place.sub_group]
    source_start = place.offset + move.in_source
    target_start = state_copy.offset + move.in_target
    source = slice(source_start, source_start + move.count)
    target = slice(target_start, target_start + move.count)
    weights[target] = flat.detach()[source]
    inner = file[OPTIMIZER_STATE_DICT]
    # The inner optimizer numbers the flat tensors, of which each has one sub-group, through all parameter groups.
    order = [index for group in inner["param_groups"] for index in group["params"]]
    for name, value in inner["state"].get(order[place.sub_group], {}).items():
        if not torch.is_tensor(value) or not value.dim():
            # A copy for each sub-group: optimizers count steps in place.
            state.setdefault(name, copy.deepcopy(value))
            continue
        if value.numel() != flat.numel():
            raise CheckpointError(
                f'optimizer state "{name}" has {value.numel()} values for {flat.numel()} elements of parameters, so '
                "ds_hetero cannot repartition it. Load this checkpoint with stock DeepSpeed, on as many ranks as saved "
                "it."
            )
        if name not in state:
            state[name] = torch.zeros(weights.shape, dtype=value.dtype)
        state[name][target] = value.reshape(-1)[source]


def _inner_state_dict(optimizer: Any) -> State:
    """Return the state dict of the user's optimizer.

    DeepSpeed sets that optimizer's parameter groups only during a step, so they are set here and cleared again.
    """
    optimizer._set_fp32_optimizer_param_groups()
    state_dict: State = optimizer.optimizer.state_dict()
    optimizer._clear_fp32_optimizer_param_groups()
    return state_dict


def read_frozen_shards(saved: SavedCheckpoint, engine: Engine, names: set[str]) -> dict[str, Tensor]:
    """Return this rank's shards of frozen parameters, by name.

    Args:
        names: names of the parameters that the checkpoint has as frozen, which includes parameters without elements.

    Raises:
        CheckpointError: the checkpoint lacks a frozen parameter of the model, or has it with another shape.
    """
    param_by_name: State = {engine.param_names[param]: param for param in engine.module.parameters()}
    frozen = {name: param for name, param in param_by_name.items() if name in names or not param.requires_grad}
    for name, param in frozen.items():
        if saved.shapes.get(name) != tuple(param.ds_shape):
            raise CheckpointError(
                f"the frozen parameter {name} has shape {saved.shapes.get(name)} in the checkpoint (None: it is not "
                f"there), but {tuple(param.ds_shape)} in this model. Load it into the model that it was saved from."
            )
    shards = {name: torch.zeros(p.ds_tensor.shape, dtype=p.ds_tensor.dtype) for name, p in frozen.items()}
    moves_by_file: dict[int, list[tuple[str, Move]]] = {}
    for name, param in frozen.items():
        for move in saved.moves(param):
            moves_by_file.setdefault(move.source, []).append((name, move))
    for source, moves in sorted(moves_by_file.items()):
        fragments = read_part(saved.model_files[source])[FROZEN_PARAM_FRAGMENTS]
        for name, move in moves:
            elements = fragments[name][move.in_source : move.in_source + move.count]
            shards[name][move.in_target : move.in_target + move.count] = elements
    return shards
