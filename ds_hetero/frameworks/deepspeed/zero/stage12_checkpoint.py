"""Loading of checkpoints of ZeRO stages 1 and 2 that were saved under any weights and any number of ranks.

Every rank saves the part that it owns, as in stock DeepSpeed, so a checkpoint has the layout of the job that wrote it.
Loading finds each of this rank's elements by its parameter, and the place of that parameter in the saved layout. It
reads the shards that hold some of these elements, one at a time. Checkpoints of stock DeepSpeed, `BF16_Optimizer`
included, are read in the same way.

Example: 10 elements, saved by 2 ranks as 5 and 5, loaded by weights 3 and 1, which own 8 and 2. Rank 0 takes all 5 of
shard 0 and the first 3 of shard 1; rank 1 reads the last 2 of shard 1, and shard 0 for values that are not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    ZERO_STAGE,
)
from torch import Tensor

from ds_hetero.engine.patching import Function
from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.protocols import Content, State
from ds_hetero.sharding.zero_partition import FlatGroup, Move, moves, round_robin_order
from ds_hetero.values.splits import Split

LAYOUT = "ds_hetero_layout"  # in every shard's state
PARAM_ALIGNMENT_PADDINGS = "param_alignment_paddings"  # DeepSpeed's, in its shards


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group as it was laid out when it was saved."""

    names: tuple[str, ...]
    layout: FlatGroup


@dataclass
class RestoredGroup:
    """This rank's part of a parameter group, put together from the shards; on the CPU."""

    fp32: Tensor  # master weights, ``[own elements]``
    state: State = field(default_factory=dict)  # of the base optimizer: tensors ``[own elements]``, and other values
    options: State = field(default_factory=dict)  # of the group, such as the learning rate


def layout_to_save(names: Sequence[Sequence[str]], layouts: Sequence[FlatGroup]) -> list[dict[str, list[Any]]]:
    """Describe the layout of all shards, by parameter group: plain lists, which pickle anywhere."""
    groups: list[dict[str, list[Any]]] = []
    for names_of_group, layout in zip(names, layouts, strict=True):
        groups.append(
            {
                "names": list(names_of_group),
                "starts": list(layout.starts),
                "sizes": list(layout.sizes),
                "parts": list(layout.cut.sizes),
            }
        )
    return groups


def read_shard(load: Function, path: str) -> State:
    """Read the state in a shard's file, to the CPU. Raises `CheckpointError`: the file is missing or damaged."""
    if not Path(path).is_file():
        raise CheckpointError(
            f"{path} is missing. The checkpoint is incomplete, as if ranks had died while saving it, or this rank does "
            "not see the files of the others. Load an earlier one, or put the file there."
        )
    try:
        shard: State = load(path, map_location="cpu")
    except Exception as error:  # torch and pickle raise almost anything here
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}), as if a rank had died while writing it. "
            "Load an earlier checkpoint."
        ) from error
    return shard


def read_groups(
    read: Callable[[int], State],
    num_shards: int,
    names: Sequence[Sequence[str]],
    layouts: Sequence[FlatGroup],
    rank: int,
    *,
    round_robin: bool,
) -> tuple[list[RestoredGroup], State]:
    """Return this rank's part of every group, and the state of one shard.

    Args:
        read: returns the content of a shard's file, by its number; called once for each shard that is needed, with this
            rank's own number first.
        names: of the parameters, by group, as they are now.
        layouts: of the groups, as they are now.
        round_robin: how stock DeepSpeed laid the groups out, where the checkpoint does not say it.

    Raises:
        CheckpointError: the checkpoint has other parameters or groups.
    """
    first_shard = min(rank, num_shards - 1)
    content = read(first_shard)
    state = content[OPTIMIZER_STATE_DICT]
    saved_groups = _saved_groups(content, num_shards, names, layouts, round_robin)
    options = state[BASE_OPTIMIZER_STATE]["param_groups"]
    restored = []
    moves_of_groups = []
    for number, (saved, layout) in enumerate(zip(saved_groups, layouts, strict=True)):
        part_size = saved.layout.cut.sizes[first_shard]
        group = _empty_group(state, number, part_size, layout.cut.sizes[rank])
        group.options = {name: value for name, value in options[number].items() if name != "params"}
        restored.append(group)
        moves_of_groups.append(moves(_in_order(names[number], saved), layout, rank))

    needed = {move.source for of_group in moves_of_groups for move in of_group}
    for source in sorted(needed, key=lambda source: (source != first_shard, source)):
        shard = state if source == first_shard else read(source)[OPTIMIZER_STATE_DICT]
        for number, (group, of_group) in enumerate(zip(restored, moves_of_groups, strict=True)):
            _copy_from(shard, number, group, [move for move in of_group if move.source == source])
    return restored, state


def _copy_from(shard: Content, number: int, group: RestoredGroup, moves_of_shard: Sequence[Move]) -> None:
    """Copy this rank's elements of the group with this number from the state of one shard."""
    for name, target in {"fp32": group.fp32, **_partitioned(group)}.items():
        if name == "fp32":
            flat = shard[SINGLE_PARTITION_OF_FP32_GROUPS][number]
        else:
            flat = shard[BASE_OPTIMIZER_STATE]["state"][number][name]
        for move in moves_of_shard:
            piece = flat.view(-1).narrow(0, move.in_source, move.count)
            target.narrow(0, move.in_target, move.count).copy_(piece)


def _empty_group(state: Content, number: int, part_size: int, own_size: int) -> RestoredGroup:
    """Return a group with zeros for everything that is cut over the ranks, and other values as they were saved.

    Zeros, since padding is in no shard and has to be zero.

    Args:
        state: of a shard.
        number: of the group.
        part_size: elements of the shard's part of it.
        own_size: elements of this rank's part of it.
    """
    group = RestoredGroup(torch.zeros(own_size, dtype=state[SINGLE_PARTITION_OF_FP32_GROUPS][number].dtype))
    for name, value in state[BASE_OPTIMIZER_STATE]["state"].get(number, {}).items():
        is_cut = torch.is_tensor(value) and value.dim() > 0 and value.numel() == part_size
        group.state[name] = torch.zeros(own_size, dtype=value.dtype) if is_cut else value
    return group


def _partitioned(group: RestoredGroup) -> dict[str, Tensor]:
    """Return the states of the base optimizer that are cut over the ranks."""
    tensors = {name: value for name, value in group.state.items() if torch.is_tensor(value)}
    return {name: value for name, value in tensors.items() if value.dim() > 0 and value.shape == group.fp32.shape}


def _saved_groups(
    content: Content, num_shards: int, names: Sequence[Sequence[str]], layouts: Sequence[FlatGroup], round_robin: bool
) -> list[SavedGroup]:
    """Return the groups as they were saved; the arguments are those of `read_groups`. Raises `CheckpointError`."""
    state = content[OPTIMIZER_STATE_DICT]
    if not isinstance(state[BASE_OPTIMIZER_STATE], Mapping):
        raise CheckpointError(
            'the checkpoint was saved with "elastic_checkpoint": true, which ds_hetero does not read. Convert it to '
            "DeepSpeed's universal checkpoint (python -m deepspeed.checkpoint.ds_to_universal) and load that."
        )
    if LAYOUT in state:
        groups = []
        for group in state[LAYOUT]:
            cut = Split(tuple(group["parts"]))
            layout = FlatGroup(tuple(group["starts"]), tuple(group["sizes"]), cut)
            groups.append(SavedGroup(tuple(group["names"]), layout))
        _expect_parameters([_sizes(group.names, group.layout) for group in groups], names, layouts)
        return groups
    return _stock_groups(content, num_shards, names, layouts, round_robin)


def _stock_groups(
    content: Content, num_shards: int, names: Sequence[Sequence[str]], layouts: Sequence[FlatGroup], round_robin: bool
) -> list[SavedGroup]:
    """Return the groups of a checkpoint of stock DeepSpeed, whose parts have one size.

    A shard names the parameters of its own part only. Of all others the total of elements is compared.
    """
    state = content[OPTIMIZER_STATE_DICT]
    flat_parts = state[SINGLE_PARTITION_OF_FP32_GROUPS]
    if len(flat_parts) != len(names):
        raise CheckpointError(
            f"the checkpoint has {len(flat_parts)} parameter groups, but the optimizer has {len(names)}. Make the "
            "groups as they were when it was saved."
        )
    config = content.get("ds_config")
    if isinstance(config, Mapping) and ZERO_STAGE in state:
        round_robin = bool(config.get("zero_optimization", {}).get("round_robin_gradients", False))
    elif ZERO_STAGE not in state:  # BF16_Optimizer knows no other order than the parameters' own
        round_robin = False
    groups = []
    for number, part in enumerate(flat_parts):
        sizes = layouts[number].sizes
        num_parameters = len(names[number])
        part_size = part.numel()
        if ZERO_STAGE in state:  # DeepSpeed saves parts without the padding at the end of the last one
            part_size += state[GROUP_PADDINGS][number]
        order = round_robin_order(num_parameters, num_shards) if round_robin else list(range(num_parameters))
        paddings = state.get(PARAM_ALIGNMENT_PADDINGS, [[0] * num_parameters] * len(names))[number]
        starts, end = _starts(order, sizes, paddings)
        foreign = set(state[PARAM_SLICE_MAPPINGS][number]) - set(names[number])
        # DeepSpeed aligns a group to two elements a rank (nccl_start_alignment_factor), so it pads by fewer than that.
        if foreign or not 0 <= part_size * num_shards - end < 2 * num_shards:
            known = f" It has {', '.join(sorted(foreign)[:5])}, which the group has not." if foreign else ""
            raise CheckpointError(
                f"parameter group {number} of the checkpoint has {part_size * num_shards} elements with padding, but "
                f"that of the optimizer has {end}.{known} The checkpoint is of another model, or its groups were made "
                "otherwise."
            )
        layout = FlatGroup(tuple(starts), sizes, Split((part_size,) * num_shards))
        groups.append(SavedGroup(tuple(names[number]), layout))
    return groups


def _starts(order: Sequence[int], sizes: Sequence[int], paddings: Sequence[int]) -> tuple[list[int], int]:
    """Return where each parameter of a group begins, and where the last one ends.

    Args:
        order: of the parameters in the flat group.
        sizes: by parameter.
        paddings: behind each parameter, in ``order``.
    """
    starts, end = [0] * len(order), 0
    for parameter, padding in zip(order, paddings, strict=False):
        starts[parameter] = end
        end += sizes[parameter] + padding
    return starts, end


def _sizes(names: Sequence[str], layout: FlatGroup) -> dict[str, int]:
    return dict(zip(names, layout.sizes, strict=True))


def _expect_parameters(
    saved: Sequence[Mapping[str, int]], names: Sequence[Sequence[str]], layouts: Sequence[FlatGroup]
) -> None:
    """Refuse a checkpoint of other parameters, or other groups of them. Raises `CheckpointError`.

    Args:
        saved: sizes of the parameters by name, of every group.
    """
    now = [_sizes(names_of_group, layout) for names_of_group, layout in zip(names, layouts, strict=True)]
    if list(saved) == now:
        return
    all_saved = dict(chain.from_iterable(group.items() for group in saved))
    all_now = dict(chain.from_iterable(group.items() for group in now))
    names_by_difference = {
        "it lacks": [name for name in all_now if name not in all_saved],
        "the model has no": [name for name in all_saved if name not in all_now],
        "of another size are": [name for name, size in all_now.items() if all_saved.get(name, size) != size],
    }
    differences = []
    for difference, different in names_by_difference.items():
        if different:
            and_more = " and more" if len(different) > 5 else ""
            differences.append(f"{difference} {', '.join(different[:5])}{and_more}")
    if differences:
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(differences)}.")
    raise CheckpointError(
        f"the checkpoint's {len(saved)} parameter groups hold {[len(group) for group in saved]} parameters, those of "
        f"the optimizer {[len(group) for group in now]}, or the same ones in another order of groups. Make the groups "
        "as they were when it was saved."
    )


def _in_order(names: Sequence[str], saved: SavedGroup) -> FlatGroup:
    """Return the saved layout with its parameters listed in the order that they have now."""
    index_by_name = {name: index for index, name in enumerate(saved.names)}
    indices = [index_by_name[name] for name in names]
    starts = tuple(saved.layout.starts[index] for index in indices)
    sizes = tuple(saved.layout.sizes[index] for index in indices)
    return FlatGroup(starts, sizes, saved.layout.cut)
