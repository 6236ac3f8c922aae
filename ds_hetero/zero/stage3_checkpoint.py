"""Checkpoints of ZeRO-3 that outlive the cut: any number of ranks may load them, with any weights or none.

On disk they are always DeepSpeed's own, of as many ranks as saved them, with shards of one size. So DeepSpeed itself
resumes from them on that many ranks, and its ``zero_to_fp32.py`` and ``ds_to_universal`` convert them. Weighted shards
are exchanged for equal ones while saving, `equal_shards`; a rank that loads reads the ranges that it owns from the
files of the ranks that had them.
"""

from __future__ import annotations

import copy
import functools
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    OPTIMIZER_STATE_DICT,
    PARAM_SHAPES,
)
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from ds_hetero.errors import CheckpointError
from ds_hetero.splits import Split
from ds_hetero.zero.layout import cut_as_deepspeed
from ds_hetero.zero.stage3_shards import cut_of, is_weighted

__all__ = ["equal_shards", "install_checkpoints", "read_file"]

CHUNK_ELEMENTS = 1 << 26  # of all ranks together, per exchange: bounds the buffers on the device


# --- saving --------------------------------------------------------------------------------------------


def equal_shards(flat: Tensor, params: Sequence[Any], name: str = "weights") -> Tensor:
    """Exchange weighted shards of parameters, lying side by side, for shards of one size, on the CPU.

        flat     [sum of s]
        result   [sum of ceil(n / ranks)], the ends padded with zeros

    Caller: every rank, with the same parameters.
    Collectives: one all_to_all per `CHUNK_ELEMENTS` elements of parameters, or per larger parameter.

    Args:
        flat: a value for each element of the shards.
        params: weighted parameters.
        name: of what is exchanged, for the error.

    Raises:
        CheckpointError: ``flat`` is no such thing, as with optimizers that quantize their state by blocks.
    """
    group = params[0].ds_process_group
    rank = dist.get_rank(group=group)
    sizes = [cut_of(param).sizes[rank] for param in params]
    if flat.numel() != sum(sizes):
        raise CheckpointError(
            f'the optimizer\'s "{name}" has {flat.numel()} values for {sum(sizes)} elements of parameters, so its '
            'shards cannot be exchanged. Use another optimizer, or set "zero_partition": "uniform".'
        )
    shards = list(torch.split(flat.reshape(-1), sizes))
    done, first, elements = [], 0, 0
    for i, param in enumerate(params):
        elements += param.ds_numel
        if elements >= CHUNK_ELEMENTS or i == len(params) - 1:
            done += _exchange(shards[first : i + 1], params[first : i + 1], group)
            first, elements = i + 1, 0
    return torch.cat(done)


def _exchange(shards: Sequence[Tensor], params: Sequence[Any], group: Any) -> list[Tensor]:
    rank, num_ranks = dist.get_rank(group=group), dist.get_world_size(group=group)
    device = get_accelerator().current_device_name()
    cuts = [(cut_of(param), cut_as_deepspeed(param.ds_numel, num_ranks), param.ds_numel) for param in params]

    send = [
        shard[start - cut.cuts[rank] : stop - cut.cuts[rank]]
        for owner in range(num_ranks)
        for shard, (cut, equal, numel) in zip(shards, cuts, strict=True)
        for start, stop in [_common(cut.ranges[rank], equal.ranges[owner], numel)]
    ]
    to_rank = [sum(part.numel() for part in send[i : i + len(cuts)]) for i in range(0, len(send), len(cuts))]
    pieces = [
        (i, start - equal.cuts[rank], stop - start)
        for source in range(num_ranks)
        for i, (cut, equal, numel) in enumerate(cuts)
        for start, stop in [_common(cut.ranges[source], equal.ranges[rank], numel)]
    ]
    from_rank = [sum(count for *_, count in pieces[i : i + len(cuts)]) for i in range(0, len(pieces), len(cuts))]

    outgoing = torch.cat(send).to(device)
    incoming = outgoing.new_empty(sum(from_rank))
    dist.all_to_all_single(incoming, outgoing, from_rank, to_rank, group=group)
    done = [torch.zeros(equal.sizes[rank], dtype=incoming.dtype) for _, equal, _ in cuts]
    for (i, at, count), part in zip(pieces, torch.split(incoming, [count for *_, count in pieces]), strict=True):
        done[i][at : at + count] = part
    return done


def _common(a: tuple[int, int], b: tuple[int, int], numel: int) -> tuple[int, int]:
    """``(start, stop)`` of the elements that two ranges of a parameter share, padding apart; ``stop >= start``."""
    start = min(max(a[0], b[0]), numel)
    return start, max(start, min(a[1], b[1], numel))


# --- what was saved ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where every file of a checkpoint has its shard of a parameter: from ``offset`` on in its ``sub_group``."""

    sub_group: int
    offset: int
    numel: int


@dataclass(frozen=True)
class _Piece:
    """``count`` elements of file ``source``, from ``in_source`` of its shard on, that go to ``at`` in this rank's."""

    source: int
    in_source: int
    at: int
    count: int


@dataclass(frozen=True)
class _Saved:
    """The files of a checkpoint, by the rank that saved them, and what they hold.

    Args:
        model_files: names of the files with buffers, frozen parameters and the state of training.
        optimizer_files: names of the files with master weights and optimizer state.
        places: of trained parameters.
        shapes: of trained and of frozen parameters.
    """

    model_files: tuple[str, ...]
    optimizer_files: tuple[str, ...]
    places: Mapping[str, _Place]
    shapes: Mapping[str, tuple[int, ...]]

    def pieces(self, numel: int, cut: Split, rank: int) -> list[_Piece]:
        """Of which pieces ``rank`` puts its shard of a parameter together."""
        saved = cut_as_deepspeed(numel, len(self.model_files))
        mine, size = cut.ranges[rank], saved.sizes[0]
        start, stop = min(mine[0], numel), min(mine[1], numel)
        touched = range(start // size, -(-stop // size)) if stop > start else range(0)
        found = ((source, *_common(mine, saved.ranges[source], numel)) for source in touched)
        return [_Piece(source, low - saved.cuts[source], low - mine[0], high - low) for source, low, high in found]


def _examine(engine: Any, load_dir: str, tag: str) -> _Saved:
    """Look the whole checkpoint over, the ranks sharing its files, and agree.

    Raises:
        CheckpointError: files are missing or cannot be read; the same error on every rank.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    first = engine._get_ckpt_name(load_dir, tag, pp_placeholder="0")
    problems = [_fault_of(first)]
    head = {} if problems[0] else read_file(first)
    count = head.get("dp_world_size", 0)
    model_files = tuple(engine._get_ckpt_name(load_dir, tag, pp_placeholder=str(i)) for i in range(count))
    optimizer_files = tuple(_optimizer_file(engine, load_dir, tag, i) for i in range(count))
    problems += [_fault_of(file) for file in (model_files + optimizer_files)[rank::num_ranks]]
    told: list[list[str]] = [[]] * num_ranks
    torch.distributed.all_gather_object(told, problems)
    if said := sorted({problem for problems in told for problem in problems} - {""}):
        raise CheckpointError(
            f"the checkpoint {os.path.join(load_dir, tag)} is incomplete: {'; '.join(said)}. Load an earlier one."
        )
    places, shapes = {}, {}
    for sub_group, of_group in enumerate(head[PARAM_SHAPES]):
        shards = [cut_as_deepspeed(prod(shape), count).sizes[0] for shape in of_group.values()]
        for (name, shape), offset in zip(of_group.items(), accumulate(shards, initial=0), strict=False):
            places[name] = _Place(sub_group, offset, prod(shape))
            shapes[name] = tuple(shape)
    shapes |= {name: tuple(shape) for name, shape in (head.get(FROZEN_PARAM_SHAPES) or {}).items()}
    return _Saved(model_files, optimizer_files, places, shapes)


def _optimizer_file(engine: Any, load_dir: str, tag: str, rank: int) -> str:
    """The name has a prefix by the type that the model was trained in."""
    names = [
        str(engine._get_rank_zero_ckpt_name(load_dir, tag, engine.checkpoint_mp_rank, rank, bf16_mode=bf16))
        for bf16 in (engine.bfloat16_enabled(), not engine.bfloat16_enabled())
    ]
    return next((name for name in names if os.path.exists(name)), names[0])


def read_file(file: str) -> dict[str, Any]:
    """A file of a checkpoint; of its tensors nothing is read until it is used.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        content: dict[str, Any] = torch.load(
            file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False
        )
    except FileNotFoundError:
        raise CheckpointError(f"{os.path.basename(file)} is missing") from None
    except Exception as error:  # torch.load raises what it meets in the bytes
        raise CheckpointError(f"{os.path.basename(file)} cannot be read ({type(error).__name__}: {error})") from None
    return content


def _fault_of(file: str) -> str:
    """What is wrong with a file; nothing, mostly."""
    try:
        read_file(file)
    except CheckpointError as error:
        return str(error)
    return ""


# --- loading -------------------------------------------------------------------------------------------


def _expect_same_parameters(saved: _Saved, engine: Any) -> None:
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


def _own_state(saved: _Saved, optimizer: Any) -> dict[str, Any]:
    """The state dict that this rank would have saved with the shards that it has now."""
    rank = dist.get_rank(group=optimizer.dp_process_group)
    weights = [torch.zeros(flat.shape, dtype=flat.dtype) for flat in optimizer.fp32_partitioned_groups_flat]
    states: list[dict[str, Any]] = [{} for _ in weights]
    by_source: dict[int, list[tuple[int, int, _Place, _Piece]]] = {}
    for i, group in enumerate(optimizer.fp16_groups):
        offset = 0
        for param in group:
            cut = cut_of(param)
            for piece in saved.pieces(param.ds_numel, cut, rank):
                place = saved.places[optimizer.param_names[param]]
                by_source.setdefault(piece.source, []).append((i, offset, place, piece))
            offset += cut.sizes[rank]

    file: dict[str, Any] = {}
    for source, pieces in sorted(by_source.items()):
        file = read_file(saved.optimizer_files[source])[OPTIMIZER_STATE_DICT]
        for i, offset, place, piece in pieces:
            _copy(file, place, piece, offset, weights[i], states[i])
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


def _copy(
    file: Mapping[str, Any], place: _Place, piece: _Piece, offset: int, weights: Tensor, state: dict[str, Any]
) -> None:
    """Copy one piece of one parameter, from one file, into this rank's weights and optimizer state."""
    flat = file[FP32_FLAT_GROUPS][place.sub_group]
    source = slice(place.offset + piece.in_source, place.offset + piece.in_source + piece.count)
    target = slice(offset + piece.at, offset + piece.at + piece.count)
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


def _inner_state_dict(optimizer: Any) -> dict[str, Any]:
    """Of the user's optimizer, which holds parameters only while somebody looks."""
    optimizer._set_fp32_optimizer_param_groups()
    state_dict: dict[str, Any] = optimizer.optimizer.state_dict()
    optimizer._clear_fp32_optimizer_param_groups()
    return state_dict


class _Checkpoints:
    """The methods of one engine that read and write checkpoints; each is given the one that it replaces."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._saved: _Saved | None = None  # the checkpoint that is being loaded

    def _get_param_fragment_func(self, stock: Callable[..., Any], param: Any) -> Tensor:
        """Save: this rank's shard of a frozen parameter, of one size on all ranks."""
        if not is_weighted(param):
            fragment: Tensor = stock(param)
            return fragment
        return equal_shards(param.ds_tensor.detach(), [param])

    def _load_checkpoint(self, stock: Callable[..., Any], load_dir: str, tag: str, **kwargs: Any) -> Any:
        """Load: the checkpoint is looked over before anything is taken from it."""
        if self._engine.load_universal_checkpoint():
            return stock(load_dir, tag, **kwargs)
        self._saved = _examine(self._engine, load_dir, str(tag))
        if kwargs.get("load_optimizer_states", True) and not kwargs.get("load_module_only", False):
            _expect_same_parameters(self._saved, self._engine)
        return stock(load_dir, tag, **kwargs)

    def _get_all_ckpt_names(self, stock: Callable[..., Any], load_dir: str, tag: str) -> list[str]:
        """Load: a rank that the saving job did not have reads what is the same for all from the first file."""
        names: list[str] = stock(load_dir, tag)
        return names or [self._engine._get_ckpt_name(load_dir, tag, pp_placeholder="0")]

    def load_module_state_dict(self, stock: Callable[..., Any], checkpoint: dict[str, Any], **kwargs: Any) -> Any:
        """Load: frozen parameters, of which the file of this rank need not have what this rank owns now."""
        if self._saved is not None and checkpoint.get(FROZEN_PARAM_FRAGMENTS):
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: dict(self._frozen_shards(self._saved))}
        return stock(checkpoint=checkpoint, **kwargs)

    def _frozen_shards(self, saved: _Saved) -> Iterator[tuple[str, Tensor]]:
        names = self._engine.param_names
        frozen = {names[param]: param for param in self._engine.module.parameters() if not param.requires_grad}
        for name, param in frozen.items():
            if saved.shapes.get(name) != tuple(param.ds_shape):
                raise CheckpointError(
                    f"the checkpoint has the frozen parameter {name} with shape {saved.shapes.get(name)}, this model "
                    f"with {tuple(param.ds_shape)}. Load it into the model that it was saved from."
                )
        shards = {
            name: torch.zeros(param.ds_tensor.shape, dtype=param.ds_tensor.dtype) for name, param in frozen.items()
        }
        by_source: dict[int, list[tuple[str, _Piece]]] = {}
        for name, param in frozen.items():
            rank = dist.get_rank(group=param.ds_process_group)
            for piece in saved.pieces(param.ds_numel, cut_of(param), rank):
                by_source.setdefault(piece.source, []).append((name, piece))
        for source, pieces in sorted(by_source.items()):
            fragments = read_file(saved.model_files[source])[FROZEN_PARAM_FRAGMENTS]
            for name, piece in pieces:
                part = fragments[name][piece.in_source : piece.in_source + piece.count]
                shards[name][piece.at : piece.at + piece.count] = part
        yield from shards.items()

    def _load_zero_checkpoint(
        self, stock: Callable[..., Any], load_dir: str, tag: str, load_optimizer_states: bool = True
    ) -> bool:
        """Load: master weights and optimizer state."""
        if self._saved is None or not load_optimizer_states:
            return bool(stock(load_dir, tag, load_optimizer_states=load_optimizer_states))
        optimizer, saved = self._engine.optimizer, self._saved
        self._saved = None
        rank = dist.get_rank(group=optimizer.dp_process_group)
        optimizer.load_state_dict({rank: _own_state(saved, optimizer)})
        return True


def install_checkpoints(engine: Any) -> None:
    """Have an engine of stage 3 save shards of one size, and load checkpoints of any number of ranks.

    Saved is with DeepSpeed's files and names, see the module's head. Universal checkpoints stay DeepSpeed's to load.

    Raises (when loading):
        CheckpointError: files are missing or damaged, or the checkpoint is of another model; on every rank.
    """
    if not isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):  # an engine without an optimizer saves no state
        return
    ours = _Checkpoints(engine)
    for name in (
        "_get_param_fragment_func",
        "_load_checkpoint",
        "_get_all_ckpt_names",
        "load_module_state_dict",
        "_load_zero_checkpoint",
    ):
        setattr(engine, name, functools.partial(getattr(ours, name), getattr(engine, name)))
