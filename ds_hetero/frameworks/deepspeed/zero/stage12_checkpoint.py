"""Load checkpoints of ZeRO stages 1 and 2 that any number of ranks saved, with any weights.

Every rank saves the part that it owns, as in stock DeepSpeed, so the files of a checkpoint (its shards) have the layout
of the job that saved it. A rank that loads looks up the parameters of its part in the saved layout, and reads the
shards that have elements of them, one shard at a time. Checkpoints of stock DeepSpeed, also of its ``BF16_Optimizer``,
are loaded in the same way.

Example: 10 elements, saved by 2 ranks as 5 and 5, loaded by weights 3 and 1, which own 8 and 2. Rank 0 takes all 5 of
shard 0 and the first 3 of shard 1. Rank 1 takes the last 2 of shard 1; values that are not cut over the ranks, such as
counts of steps, it also reads from shard 1.
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
from ds_hetero.sharding.zero_partition import FlatGroup, Move, repartition_moves, round_robin_order
from ds_hetero.values.splits import Split

LAYOUT = "ds_hetero_layout"  # key of our layout in the optimizer state of every shard
PARAM_ALIGNMENT_PADDINGS = "param_alignment_paddings"  # DeepSpeed's key in the same state, in newer releases


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group with the layout in which it was saved."""

    names: tuple[str, ...]  # of the parameters, in the order of ``layout``
    layout: FlatGroup


@dataclass
class RestoredGroup:
    """This rank's part of a parameter group, read from the shards; on the CPU."""

    fp32: Tensor  # master weights of the elements that this rank owns, 1-D
    state: State = field(default_factory=dict)  # of the base optimizer: tensors as long as ``fp32``, and other values
    options: State = field(default_factory=dict)  # of the group, such as the learning rate


def layout_to_save(names: Sequence[Sequence[str]], layouts: Sequence[FlatGroup]) -> list[dict[str, list[Any]]]:
    """Return the layout of every parameter group as plain lists, which any program can unpickle.

    Args:
        names: names of the parameters, by group.
        layouts: layout of each group.
    """
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
    """Load a shard to the CPU. Raises `CheckpointError`: the file is missing or damaged.

    Args:
        load: function with the arguments of ``torch.load``.
        path: path of the shard's file.
    """
    if not Path(path).is_file():
        raise CheckpointError(
            f"{path} is missing. Either the checkpoint is incomplete, as when ranks die while saving it, or this rank "
            "does not see the files of the others. Load an earlier checkpoint, or copy the file there."
        )
    try:
        shard: State = load(path, map_location="cpu")
    except Exception as error:  # torch and pickle raise almost anything here
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}), as when a rank dies while writing it. "
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
    """Return this rank's part of every parameter group, read from all shards that have elements of the part.

    The second result is the optimizer state of one shard, for values that are the same in all shards.

    Args:
        read: returns the content of a shard, by its number. It is called once for each shard that is needed: first for
            the shard with this rank's number, or for the last shard if there are fewer.
        num_shards: shards of the checkpoint.
        names: names of the parameters in this job, by group.
        layouts: layouts of the groups in this job.
        rank: this rank's number in the data-parallel group.
        round_robin: whether stock DeepSpeed saved with ``round_robin_gradients``; used if the checkpoint does not say.

    Returns:
        The parts, and the optimizer state of one shard, for values that are the same in all shards.

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
    for number, (saved_group, layout) in enumerate(zip(saved_groups, layouts, strict=True)):
        part_size = saved_group.layout.cut.sizes[first_shard]
        group = _empty_group(state, number, part_size, layout.cut.sizes[rank])
        group.options = {name: value for name, value in options[number].items() if name != "params"}
        restored.append(group)
        moves_of_groups.append(repartition_moves(_reorder(names[number], saved_group), layout, rank))

    sources = {move.source for moves in moves_of_groups for move in moves}
    # In the order of shards, but the first shard, which is in memory already, before all others.
    for source in sorted(sources, key=lambda source: (source != first_shard, source)):
        shard = state if source == first_shard else read(source)[OPTIMIZER_STATE_DICT]
        for number, (group, moves) in enumerate(zip(restored, moves_of_groups, strict=True)):
            _copy_from(shard, number, group, [move for move in moves if move.source == source])
    return restored, state


def _copy_from(shard: Content, number: int, group: RestoredGroup, moves: Sequence[Move]) -> None:
    """Copy master weights and optimizer state of one parameter group from a shard.

    Args:
        shard: optimizer state of the shard.
        number: number of the group.
        moves: which elements of the shard are copied, and to where in this rank's part.
    """
    source_target_pairs = [(shard[SINGLE_PARTITION_OF_FP32_GROUPS][number], group.fp32)]
    for name, target in _partitioned_states(group).items():
        source_target_pairs.append((shard[BASE_OPTIMIZER_STATE]["state"][number][name], target))
    for source, target in source_target_pairs:
        for move in moves:
            elements = source.view(-1).narrow(0, move.in_source, move.count)
            target.narrow(0, move.in_target, move.count).copy_(elements)


def _empty_group(state: Content, number: int, part_size: int, local_size: int) -> RestoredGroup:
    """Return a group with zeros for tensors that are cut over the ranks, and with other values as they were saved.

    The tensors begin as zeros because the padding of the group must be zero, and no shard has values for it.

    Args:
        state: optimizer state of a shard.
        number: number of the group.
        part_size: elements of the shard's part of the group.
        local_size: elements of this rank's part of the group.
    """
    group = RestoredGroup(torch.zeros(local_size, dtype=state[SINGLE_PARTITION_OF_FP32_GROUPS][number].dtype))
    for name, value in state[BASE_OPTIMIZER_STATE]["state"].get(number, {}).items():
        is_cut = torch.is_tensor(value) and value.dim() > 0 and value.numel() == part_size
        group.state[name] = torch.zeros(local_size, dtype=value.dtype) if is_cut else value
    return group


def _partitioned_states(group: RestoredGroup) -> dict[str, Tensor]:
    """Return the states of the base optimizer that are cut over the ranks."""
    tensors = {name: value for name, value in group.state.items() if torch.is_tensor(value)}
    return {name: value for name, value in tensors.items() if value.dim() > 0 and value.shape == group.fp32.shape}


def _saved_groups(
    content: Content, num_shards: int, names: Sequence[Sequence[str]], layouts: Sequence[FlatGroup], round_robin: bool
) -> list[SavedGroup]:
    """Return the parameter groups with their saved layouts.

    Args:
        content: content of one shard. The other arguments are those of `read_groups`.

    Raises:
        CheckpointError: the checkpoint has other parameters or groups, or a format that cannot be read.
    """
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
        _expect_parameters([_size_by_name(group.names, group.layout) for group in groups], names, layouts)
        return groups
    return _stock_groups(content, num_shards, names, layouts, round_robin)


def _stock_groups(
    content: Content, num_shards: int, names: Sequence[Sequence[str]], layouts: Sequence[FlatGroup], round_robin: bool
) -> list[SavedGroup]:
    """Return the parameter groups of a checkpoint of stock DeepSpeed, in which all parts have the same size.

    A shard has the names of only the parameters in its own part. These names are compared with the job's, and so is
    the number of elements of the whole group.
    """
    state = content[OPTIMIZER_STATE_DICT]
    flat_parts = state[SINGLE_PARTITION_OF_FP32_GROUPS]
    if len(flat_parts) != len(names):
        raise CheckpointError(
            f"the checkpoint has {len(flat_parts)} parameter groups, but the optimizer has {len(names)}. Make the "
            "optimizer with the groups that it had when the checkpoint was saved."
        )
    config = content.get("ds_config")
    if isinstance(config, Mapping) and ZERO_STAGE in state:
        round_robin = bool(config.get("zero_optimization", {}).get("round_robin_gradients", False))
    elif ZERO_STAGE not in state:  # BF16_Optimizer always keeps the parameters' own order
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
        starts, end = _find_starts(order, sizes, paddings)
        unknown_names = set(state[PARAM_SLICE_MAPPINGS][number]) - set(names[number])
        # DeepSpeed aligns a group to two elements a rank (nccl_start_alignment_factor), so it pads by fewer than that.
        num_padding = part_size * num_shards - end
        if unknown_names or not 0 <= num_padding < 2 * num_shards:
            unknown_text = ""
            if unknown_names:
                unknown_text = f" It has {', '.join(sorted(unknown_names)[:5])}, which the group does not have."
            raise CheckpointError(
                f"parameter group {number} of the checkpoint has {part_size * num_shards} elements with padding, but "
                f"that of the optimizer has {end}.{unknown_text} The checkpoint is of another model, or of other "
                "parameter groups. Load it into the model and the groups that it was saved from."
            )
        layout = FlatGroup(tuple(starts), sizes, Split((part_size,) * num_shards))
        groups.append(SavedGroup(tuple(names[number]), layout))
    return groups


def _find_starts(order: Sequence[int], sizes: Sequence[int], paddings: Sequence[int]) -> tuple[list[int], int]:
    """Return where each parameter begins in the flat group, and where the last one ends.

    Args:
        order: numbers of the parameters, in their order in the flat group.
        sizes: elements of each parameter, by number.
        paddings: elements of padding after each parameter, in ``order``.
    """
    starts, end = [0] * len(order), 0
    for parameter, padding in zip(order, paddings, strict=False):
        starts[parameter] = end
        end += sizes[parameter] + padding
    return starts, end


def _size_by_name(names: Sequence[str], layout: FlatGroup) -> dict[str, int]:
    """Return the number of elements of each parameter, by name."""
    return dict(zip(names, layout.sizes, strict=True))


def _expect_parameters(
    saved: Sequence[Mapping[str, int]], names: Sequence[Sequence[str]], layouts: Sequence[FlatGroup]
) -> None:
    """Check that a checkpoint has the parameters of this job, in the same groups. Raises `CheckpointError`.

    Args:
        saved: sizes of the saved parameters by name, for every group.
        names: names of the parameters in this job, by group.
        layouts: layouts of the groups in this job.
    """
    current = []
    for names_of_group, layout in zip(names, layouts, strict=True):
        current.append(_size_by_name(names_of_group, layout))
    if list(saved) == current:
        return
    saved_sizes = dict(chain.from_iterable(group.items() for group in saved))
    current_sizes = dict(chain.from_iterable(group.items() for group in current))
    names_by_difference = {
        "it lacks": [name for name in current_sizes if name not in saved_sizes],
        "the model has no": [name for name in saved_sizes if name not in current_sizes],
        "of another size are": [name for name, size in current_sizes.items() if saved_sizes.get(name, size) != size],
    }
    differences = []
    for difference, different_names in names_by_difference.items():
        if different_names:
            and_more = " and more" if len(different_names) > 5 else ""
            differences.append(f"{difference} {', '.join(different_names[:5])}{and_more}")
    if differences:
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(differences)}.")
    raise CheckpointError(
        f"the checkpoint's {len(saved)} parameter groups hold {[len(group) for group in saved]} parameters, those of "
        f"the optimizer {[len(group) for group in current]}, or the same parameters in other groups. Make the "
        "optimizer with the groups that it had when the checkpoint was saved."
    )


def _reorder(names: Sequence[str], saved: SavedGroup) -> FlatGroup:
    """Return the saved layout with its parameters listed in the order of ``names``."""
    index_by_name = {name: index for index, name in enumerate(saved.names)}
    indices = [index_by_name[name] for name in names]
    starts = tuple(saved.layout.starts[index] for index in indices)
    sizes = tuple(saved.layout.sizes[index] for index in indices)
    return FlatGroup(starts, sizes, saved.layout.cut)
