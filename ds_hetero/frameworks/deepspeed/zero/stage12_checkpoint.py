"""Loading what ZeRO stages 1 and 2 have saved under any weights and any number of ranks.

Every rank saves the part it owns, as in stock DeepSpeed, so a checkpoint's layout is that of the job that wrote it.
Loading works out what each of this rank's elements is in the files: which parameter of which group, and where the
saved layout has that. It reads the shards that hold some of it, one at a time. Checkpoints of stock DeepSpeed,
`BF16_Optimizer` included, are read alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from ds_hetero.sharding.zero_partition import FlatGroup, moves, round_robin_order
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
    return [
        {
            "names": list(of_group),
            "starts": list(layout.starts),
            "sizes": list(layout.sizes),
            "parts": list(layout.cut.sizes),
        }
        for of_group, layout in zip(names, layouts, strict=True)
    ]


def read_shard(load: Function, path: str) -> State:
    """A shard's state, on the CPU. Raises `CheckpointError`: the file is missing or damaged."""
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
    """This rank's part of every group, and one shard's state. Raises `CheckpointError`: other parameters.

    Args:
        read: the content of the i-th shard's file; called once for each shard that is needed, this rank's own first.
        names: of the parameters, by group, as they are now.
        layouts: of the groups, as they are now.
        round_robin: how stock DeepSpeed laid the groups out, where the checkpoint does not say it.
    """
    first = min(rank, num_shards - 1)
    content = read(first)
    state = content[OPTIMIZER_STATE_DICT]
    saved = _saved_groups(content, num_shards, names, layouts, round_robin)
    todo = [moves(_in_order(names[i], group), layouts[i], rank) for i, group in enumerate(saved)]
    restored = [_empty_group(state, i, group, first, layouts[i], rank) for i, group in enumerate(saved)]
    options = state[BASE_OPTIMIZER_STATE]["param_groups"]
    for i, group in enumerate(restored):
        group.options = {name: value for name, value in options[i].items() if name != "params"}
    needed = {move.source for of_group in todo for move in of_group}
    for source in sorted(needed, key=lambda source: (source != first, source)):
        shard = state if source == first else read(source)[OPTIMIZER_STATE_DICT]
        for i, of_group in enumerate(todo):
            flat = {"fp32": shard[SINGLE_PARTITION_OF_FP32_GROUPS][i]}
            flat |= {name: shard[BASE_OPTIMIZER_STATE]["state"][i][name] for name in _partitioned(restored[i])}
            targets = {"fp32": restored[i].fp32, **_partitioned(restored[i])}
            for move in of_group:
                if move.source == source:
                    for name, target in targets.items():
                        piece = flat[name].view(-1).narrow(0, move.in_source, move.count)
                        target.narrow(0, move.in_target, move.count).copy_(piece)
    return restored, state


def _empty_group(state: Content, i: int, saved: SavedGroup, shard: int, layout: FlatGroup, rank: int) -> RestoredGroup:
    """Zeros in the place of whatever is partitioned, which is what padding shall be; the rest as saved."""
    own, part = layout.cut.sizes[rank], saved.layout.cut.sizes[shard]
    group = RestoredGroup(torch.zeros(own, dtype=state[SINGLE_PARTITION_OF_FP32_GROUPS][i].dtype))
    for name, value in state[BASE_OPTIMIZER_STATE]["state"].get(i, {}).items():
        partitioned = torch.is_tensor(value) and value.dim() > 0 and value.numel() == part
        group.state[name] = torch.zeros(own, dtype=value.dtype) if partitioned else value
    return group


def _partitioned(group: RestoredGroup) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in group.state.items()
        if torch.is_tensor(value) and value.dim() > 0 and value.shape == group.fp32.shape
    }


def _saved_groups(
    content: Content, num_shards: int, names: Sequence[Sequence[str]], layouts: Sequence[FlatGroup], round_robin: bool
) -> list[SavedGroup]:
    state = content[OPTIMIZER_STATE_DICT]
    if not isinstance(state[BASE_OPTIMIZER_STATE], Mapping):
        raise CheckpointError(
            'the checkpoint was saved with "elastic_checkpoint": true, which ds_hetero does not read. Convert it to '
            "DeepSpeed's universal checkpoint (python -m deepspeed.checkpoint.ds_to_universal) and load that."
        )
    if LAYOUT in state:
        groups = [
            SavedGroup(
                tuple(group["names"]),
                FlatGroup(tuple(group["starts"]), tuple(group["sizes"]), Split(tuple(group["parts"]))),
            )
            for group in state[LAYOUT]
        ]
        _expect_parameters([_sizes(group.names, group.layout) for group in groups], names, layouts)
        return groups
    return _stock_groups(content, num_shards, names, layouts, round_robin)


def _stock_groups(
    content: Content, num_shards: int, names: Sequence[Sequence[str]], layouts: Sequence[FlatGroup], round_robin: bool
) -> list[SavedGroup]:
    """Read the equal parts of stock DeepSpeed; a shard names its own parameters only, sums are compared for others."""
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
    for i, part in enumerate(flat_parts):
        size = part.numel() + (state[GROUP_PADDINGS][i] if ZERO_STAGE in state else 0)
        order = list(range(len(names[i])))
        if round_robin:
            order = round_robin_order(len(names[i]), num_shards)
        paddings = state.get(PARAM_ALIGNMENT_PADDINGS, [[0] * len(order)] * len(names))[i]
        starts, end = _starts(order, layouts[i].sizes, paddings)
        foreign = set(state[PARAM_SLICE_MAPPINGS][i]) - set(names[i])
        if foreign or not 0 <= size * num_shards - end < 2 * num_shards:
            known = f" It has {', '.join(sorted(foreign)[:5])}, which the group has not." if foreign else ""
            raise CheckpointError(
                f"parameter group {i} of the checkpoint has {size * num_shards} elements with padding, but that of the "
                f"optimizer has {end}.{known} The checkpoint is of another model, or its groups were made otherwise."
            )
        groups.append(
            SavedGroup(tuple(names[i]), FlatGroup(tuple(starts), layouts[i].sizes, Split((size,) * num_shards)))
        )
    return groups


def _starts(order: Sequence[int], sizes: Sequence[int], paddings: Sequence[int]) -> tuple[list[int], int]:
    """Where the parameters of a group begin that lie one after another in an order; and where the last one ends."""
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
    now = [_sizes(of_group, layout) for of_group, layout in zip(names, layouts, strict=True)]
    if list(saved) == now:
        return
    all_saved = {name: size for group in saved for name, size in group.items()}
    all_now = {name: size for group in now for name, size in group.items()}
    differences = [
        f"{label} {', '.join(listed[:5])}{' and more' if len(listed) > 5 else ''}"
        for label, listed in (
            ("it lacks", [name for name in all_now if name not in all_saved]),
            ("the model has no", [name for name in all_saved if name not in all_now]),
            ("of another size are", [name for name, n in all_now.items() if all_saved.get(name, n) != n]),
        )
        if listed
    ]
    if differences:
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(differences)}.")
    raise CheckpointError(
        f"the checkpoint's {len(saved)} parameter groups hold {[len(group) for group in saved]} parameters, those of "
        f"the optimizer {[len(group) for group in now]}, or the same ones in another order of groups. Make the groups "
        "as they were when it was saved."
    )


def _in_order(names: Sequence[str], saved: SavedGroup) -> FlatGroup:
    """The saved layout with its parameters in the order that they have now."""
    index = {name: i for i, name in enumerate(saved.names)}
    order = [index[name] for name in names]
    layout = saved.layout
    return FlatGroup(tuple(layout.starts[i] for i in order), tuple(layout.sizes[i] for i in order), layout.cut)
