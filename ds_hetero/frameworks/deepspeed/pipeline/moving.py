"""Layers move between the stages of a running job: parameters and optimizer state go to their new owners.

Only numbers of layers change: ranks, schedules, batches and micro-batches in flight stay, and with them the hops and
their process groups. Nothing is computed with, so values and optimizer state have the bits that they had.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.pipeline.hooked_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.pipeline.optimizer import PipelineOptimizer, synchronizer_of
from ds_hetero.frameworks.deepspeed.protocols import Content, State
from ds_hetero.gradient_sync.moving import move_owned
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.waiting import waiting_for_peers
from ds_hetero.sharding.gradient_chunks import Box
from ds_hetero.values.plans import Plan

_VALUE = "value"  # of the parameter, beside the names of the optimizer's state


@dataclass(frozen=True, slots=True)
class _Holding:
    """Parameters that a rank owns and holds, before and after.

    Args:
        old: boxes of what it owned, by parameter.
        new: boxes of what it owns.
        state: by parameter it owned: the dtype of its value and of what the optimizer keeps by element, and anything
            else that the optimizer keeps as it is.
        frozen_before: shapes of parameters that are not trained and that it held.
        frozen_after: likewise, that it holds now.
    """

    old: Mapping[str, tuple[Box, ...]]
    new: Mapping[str, tuple[Box, ...]]
    state: Mapping[str, Content]
    frozen_before: Mapping[str, tuple[int, ...]]
    frozen_after: Mapping[str, tuple[int, ...]]


def expect_movable(stage_model: nn.Module) -> None:
    """Refuse re-planning of a model whose layers cannot be moved.

    Args:
        stage_model: whole, as the user gave it.

    Raises:
        ConfigError: its layers have buffers.
    """
    in_layers = [name for name, _ in stage_model.named_buffers() if ".layers." in f".{name}"]
    if in_layers:
        raise ConfigError(
            f'"replan.enabled" cannot move the layers of this model, which have buffers ({", ".join(in_layers[:3])}). '
            "Leave it out."
        )


@torch.no_grad()
@waiting_for_peers("moving layers between stages")
def move_layers(pipelined: PipelinedEngine, plan: Plan) -> None:
    """Go on with other numbers of layers.

    Args:
        pipelined: the engine.
        plan: the new one.

    Caller: every rank of the world, between two steps.
    Collectives: those of making an `AsymmetricGradientSync`; one `on_all_ranks`; messages of every parameter that
    changes its owner; ``gather``.
    """
    optimizer: PipelineOptimizer = pipelined.engine.optimizer
    stage, old, device = pipelined.stage, optimizer.sync, default_device()
    old.close()
    before = _frozen(stage.parameters())
    stage.change_layers(plan, device)
    after = _frozen(stage.parameters())
    new = synchronizer_of(stage, plan, pipelined.groups)
    holding = _Holding(
        old=old.owned_boxes,
        new=new.owned_boxes,
        state={name: _described(optimizer.inner.state.get(value, {}), value) for name, value in old.owned.items()},
        frozen_before={name: tuple(tensor.shape) for name, tensor in before.items()},
        frozen_after={name: tuple(tensor.shape) for name, tensor in after.items()},
    )
    by_rank = on_all_ranks(lambda: holding)
    old_boxes, new_boxes = [rank.old for rank in by_rank], [rank.new for rank in by_rank]
    states: dict[str, State] = {}
    for name in new.shapes:
        values = _taken(old.owned.pop(name, None), optimizer.inner.state)
        described = next(rank.state[name] for rank in by_rank if name in rank.old)
        by_element = {key: dtype for key, dtype in described.items() if isinstance(dtype, torch.dtype)}
        like = {key: torch.empty(0, dtype=dtype, device=device) for key, dtype in by_element.items()}
        had, has = ([boxes.get(name, ()) for boxes in each] for each in (old_boxes, new_boxes))
        moved = move_owned(values, had, has, like)
        if name in new.owned:
            new.owned[name].copy_(moved[_VALUE])
            states[name] = {key: moved.get(key, value) for key, value in described.items() if key != _VALUE}
    _move_frozen(before, after, by_rank, device)
    optimizer.take_over(new, states)
    new.gather()
    pipelined.plan = plan
    pipelined.engine.param_names = {parameter: name for name, parameter in stage.model.named_parameters()}


def _frozen(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in parameters.items() if not parameter.requires_grad}


def _taken(owned: nn.Parameter | None, state: MutableMapping[Any, Any]) -> State:
    """The value of an owned parameter and the optimizer's state of it, which are taken away from the optimizer."""
    return {} if owned is None else {_VALUE: owned.detach(), **state.pop(owned, {})}


def _described(state: Content, value: Tensor) -> State:
    """The value of a parameter and the optimizer's state: dtypes of what has its shape, anything else as it is."""
    of_shape = {key: isinstance(entry, Tensor) and entry.shape == value.shape for key, entry in state.items()}
    return {_VALUE: value.dtype, **{key: entry.dtype if of_shape[key] else entry for key, entry in state.items()}}


def _move_frozen(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], by_rank: list[_Holding], device: torch.device
) -> None:
    """Give every rank the parameters that are not trained and new on it, from the first rank that held them."""
    names = dict.fromkeys(name for rank in by_rank for name in rank.frozen_before)
    for name in names:
        holders = [i for i, rank in enumerate(by_rank) if name in rank.frozen_before]
        whole: Box = tuple((0, size) for size in by_rank[holders[0]].frozen_before[name])
        lacking = [i for i, rank in enumerate(by_rank) if name in rank.frozen_after and i not in holders]
        if not lacking:
            continue
        ranks = range(len(by_rank))
        held = [[whole] if i == holders[0] else [] for i in ranks]
        wanted = [[whole] if i in lacking else [] for i in ranks]
        dtype = (before.get(name, after.get(name, torch.empty(0)))).dtype
        values = {_VALUE: before[name].reshape(-1)} if dist.get_rank() == holders[0] else {}
        moved = move_owned(values, held, wanted, {_VALUE: torch.empty(0, dtype=dtype, device=device)})
        if dist.get_rank() in lacking:
            after[name].copy_(moved[_VALUE].view(after[name].shape))
