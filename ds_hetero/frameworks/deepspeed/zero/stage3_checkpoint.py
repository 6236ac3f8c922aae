"""Checkpoints of ZeRO-3 that outlive the cut: any number of ranks may load them, with any weights or none.

On disk they are always DeepSpeed's own, of as many ranks as saved them, with shards of one size. So DeepSpeed itself
resumes from them on that many ranks, and its ``zero_to_fp32.py`` and ``ds_to_universal`` convert them. Weighted shards
are exchanged for equal ones while saving, `equal_shards`; a rank that loads takes
the ranges that it owns from the files that have them, whatever the weights and the number of ranks are now.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

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
    """Saves shards of one size and loads checkpoints of any number of ranks, for one engine of stage 3.

    Each method runs around the method of the engine that its first line names, and is given that as ``method``. Files
    and their names are DeepSpeed's; universal checkpoints stay DeepSpeed's to load.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saved: Saved | None = None  # the checkpoint that is being loaded

    def equal_shard(self, method: Function, param: ZeroParameter) -> Tensor:
        """Replace ``_get_param_fragment_func``: return a rank's shard of a frozen parameter, of one size on all."""
        if not is_weighted(param):
            fragment: Tensor = method(param)
            return fragment
        return equal_shards(param.ds_tensor.detach(), [param])

    def examine(self, method: Function, load_dir: str, tag: str, **kwargs: object) -> object:
        """Look over a checkpoint before anything is taken from it. Raises `CheckpointError` on every rank."""
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
        """Replace ``_get_all_ckpt_names``: a rank that the saving job did not have reads the first file."""
        names: list[str] = method(load_dir, tag)
        return names or [self._engine._get_ckpt_name(load_dir, tag, pp_placeholder="0")]

    def load_frozen_parameters(self, method: Function, checkpoint: State, **kwargs: object) -> object:
        """Replace ``load_module_state_dict``: this rank's file need not have the frozen shards that it owns now."""
        if self._saved is not None and checkpoint.get(FROZEN_PARAM_FRAGMENTS):
            names = set(checkpoint[FROZEN_PARAM_FRAGMENTS])
            shards = own_frozen_shards(self._saved, self._engine, names)
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: shards}
        return method(checkpoint=checkpoint, **kwargs)

    def load_state(self, method: Function, load_dir: str, tag: str, load_optimizer_states: bool = True) -> bool:
        """Replace ``_load_zero_checkpoint``: load master weights and optimizer state saved under any weights."""
        if self._saved is None or not load_optimizer_states:
            return bool(method(load_dir, tag, load_optimizer_states=load_optimizer_states))
        optimizer, saved = self._engine.optimizer, self._saved
        self._saved = None
        rank = dist.get_rank(group=optimizer.dp_process_group)
        optimizer.load_state_dict({rank: own_state(saved, optimizer)})
        return True


@dataclass(frozen=True)
class _Place:
    """Place of a parameter's shard in every file of a checkpoint: from ``offset`` on in its ``sub_group``."""

    sub_group: int
    offset: int


@dataclass(frozen=True)
class Saved:
    """The files of a checkpoint, by the rank that saved them, and what they hold."""

    model_files: tuple[str, ...]  # names of the files with buffers, frozen parameters and the state of training
    optimizer_files: tuple[str, ...]  # names of the files with master weights and optimizer state
    places: Mapping[str, _Place]
    shapes: Mapping[str, tuple[int, ...]]  # of trained and of frozen parameters

    def moves(self, param: ZeroParameter) -> tuple[Move, ...]:
        """Return the pieces of saved shards, by file, of which this rank puts its shard of a parameter together."""
        saved = cut_as_deepspeed(param.ds_numel, len(self.model_files))
        return parameter_moves(param.ds_numel, saved, cut_of(param), dist.get_rank(group=owning_group(param)))


def examine_files(engine: Engine, load_dir: str, tag: str) -> Saved:
    """Examine a checkpoint's files, a share on each rank. Raises `CheckpointError` on every rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    first = engine._get_ckpt_name(load_dir, tag, pp_placeholder="0")
    faults_of_first = _faults_of([first])
    head = {} if faults_of_first else read_part(first)
    count = head.get("dp_world_size", 0)
    model_files = tuple(engine._get_ckpt_name(load_dir, tag, pp_placeholder=str(i)) for i in range(count))
    optimizer_files = tuple(_optimizer_file(engine, load_dir, tag, i) for i in range(count))
    own_share = (model_files + optimizer_files)[rank::num_ranks]
    faults = set[str]().union(*on_all_ranks(lambda: faults_of_first | _faults_of(own_share)))
    if faults:
        raise CheckpointError(
            f"the checkpoint {os.path.join(load_dir, tag)} is incomplete: {'; '.join(sorted(faults))}. "
            "Load an earlier one."
        )
    places, shapes = {}, {}
    for sub_group, of_group in enumerate(head[PARAM_SHAPES]):
        shards = [cut_as_deepspeed(prod(shape), count).sizes[0] for shape in of_group.values()]
        for (name, shape), offset in zip(of_group.items(), accumulate(shards, initial=0), strict=False):
            places[name] = _Place(sub_group, offset)
            shapes[name] = tuple(shape)
    shapes |= {name: tuple(shape) for name, shape in (head.get(FROZEN_PARAM_SHAPES) or {}).items()}
    return Saved(model_files, optimizer_files, places, shapes)


def _optimizer_file(engine: Engine, load_dir: str, tag: str, rank: int) -> str:
    """Return a rank's file of optimizer state; the name's prefix depends on the type that was trained in."""
    names = [
        str(engine._get_rank_zero_ckpt_name(load_dir, tag, 0, rank, bf16_mode=bf16))
        for bf16 in (engine.bfloat16_enabled(), not engine.bfloat16_enabled())
    ]
    return next((name for name in names if os.path.exists(name)), names[0])


def _faults_of(files: Iterable[str]) -> set[str]:
    """Say which files are missing or damaged."""
    return {fault for file in files if (fault := _fault_of(file))}


def _fault_of(file: str) -> str:
    try:
        read_part(file)
    except CheckpointError as error:
        return str(error)
    return ""


def expect_same_parameters(saved: Saved, engine: Engine) -> None:
    """Refuse a checkpoint of other parameters than the engine trains. Raises `CheckpointError` on every rank."""
    wanted = {name: tuple(shape) for group in engine._get_zero_param_shapes() for name, shape in group.items()}
    faults = {
        "missing": sorted(wanted.keys() - saved.places.keys()),
        "not in this model": sorted(saved.places.keys() - wanted.keys()),
        "of another shape": [
            f"{name} {saved.shapes[name]} instead of {shape}"
            for name, shape in wanted.items()
            if saved.shapes.get(name, shape) != shape
        ],
    }
    if any(faults.values()):
        listed = "; ".join(f"{what}: {', '.join(names[:5])}" for what, names in faults.items() if names)
        raise CheckpointError(
            f"the checkpoint is of another model, or of one with other trained parameters. {listed}. "
            "Load it into the model that it was saved from."
        )


def own_state(saved: Saved, optimizer: Any) -> State:
    """Return the state dict that this rank would have saved with the shards that it has now."""
    weights = [torch.zeros(flat.shape, dtype=flat.dtype) for flat in optimizer.fp32_partitioned_groups_flat]
    states: list[State] = [{} for _ in weights]
    by_source: dict[int, list[tuple[int, int, _Place, Move]]] = {}
    for i, group in enumerate(optimizer.fp16_groups):
        offset = 0
        for param in group:
            place = saved.places[optimizer.param_names[param]]
            for move in saved.moves(param):
                by_source.setdefault(move.source, []).append((i, offset, place, move))
            offset += param.ds_tensor.ds_numel

    file: State = {}
    for source, moves in sorted(by_source.items()):
        file = read_part(saved.optimizer_files[source])[OPTIMIZER_STATE_DICT]
        for i, offset, place, move in moves:
            _copy(file, place, move, offset, weights[i], states[i])
    inner = _inner_state_dict(optimizer)
    of_groups = file[OPTIMIZER_STATE_DICT]["param_groups"]
    if len(of_groups) != len(inner["param_groups"]):
        raise CheckpointError(
            f"the checkpoint has {len(of_groups)} groups of parameters, this optimizer has "
            f"{len(inner['param_groups'])}. Make the optimizer as it was when the checkpoint was saved."
        )
    param_groups = [
        {**theirs, "params": ours["params"]} for theirs, ours in zip(of_groups, inner["param_groups"], strict=True)
    ]
    order = [index for group in param_groups for index in group["params"]]
    return {
        **file,
        FP32_FLAT_GROUPS: weights,
        OPTIMIZER_STATE_DICT: {
            "state": {index: state for index, state in zip(order, states, strict=True) if state},
            "param_groups": param_groups,
        },
    }


def _copy(file: Content, place: _Place, move: Move, offset: int, weights: Tensor, state: State) -> None:
    """Copy some of one parameter, from one file, into this rank's weights and optimizer state."""
    flat = file[FP32_FLAT_GROUPS][place.sub_group]
    source = slice(place.offset + move.in_source, place.offset + move.in_source + move.count)
    target = slice(offset + move.in_target, offset + move.in_target + move.count)
    weights[target] = flat.detach()[source]
    of_optimizer = file[OPTIMIZER_STATE_DICT]
    order = [index for group in of_optimizer["param_groups"] for index in group["params"]]
    for name, value in of_optimizer["state"].get(order[place.sub_group], {}).items():
        if not torch.is_tensor(value) or not value.dim():
            state.setdefault(name, copy.deepcopy(value))  # optimizers count steps in place, sub-group by sub-group
            continue
        if value.numel() != flat.numel():
            raise CheckpointError(
                f'the optimizer\'s "{name}" has {value.numel()} values for {flat.numel()} elements of parameters, so '
                "it can be loaded by DeepSpeed alone, on ranks as they were."
            )
        if name not in state:
            state[name] = torch.zeros(weights.shape, dtype=value.dtype)
        state[name][target] = value.reshape(-1)[source]


def _inner_state_dict(optimizer: Any) -> State:
    """Return the state dict of the user's optimizer, which holds parameters only while it is read."""
    optimizer._set_fp32_optimizer_param_groups()
    state_dict: State = optimizer.optimizer.state_dict()
    optimizer._clear_fp32_optimizer_param_groups()
    return state_dict


def own_frozen_shards(saved: Saved, engine: Engine, names: set[str]) -> dict[str, Tensor]:
    """Return this rank's frozen shards, by name. Raises `CheckpointError`: some are missing, or have other shapes.

    Args:
        names: of what the checkpoint holds as frozen, which includes parameters without elements.
    """
    named: State = {engine.param_names[param]: param for param in engine.module.parameters()}
    frozen = {name: param for name, param in named.items() if name in names or not param.requires_grad}
    for name, param in frozen.items():
        if saved.shapes.get(name) != tuple(param.ds_shape):
            raise CheckpointError(
                f"the checkpoint has the frozen parameter {name} with shape {saved.shapes.get(name)}, this model with "
                f"{tuple(param.ds_shape)}. Load it into the model that it was saved from."
            )
    shards = {name: torch.zeros(p.ds_tensor.shape, dtype=p.ds_tensor.dtype) for name, p in frozen.items()}
    by_source: dict[int, list[tuple[str, Move]]] = {}
    for name, param in frozen.items():
        for move in saved.moves(param):
            by_source.setdefault(move.source, []).append((name, move))
    for source, moves in sorted(by_source.items()):
        fragments = read_part(saved.model_files[source])[FROZEN_PARAM_FRAGMENTS]
        for name, move in moves:
            part = fragments[name][move.in_source : move.in_source + move.count]
            shards[name][move.in_target : move.in_target + move.count] = part
    return shards
