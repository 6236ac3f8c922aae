"""Moves of layers between the stages of a running job: parameters and optimizer state go to their new owners.

Only numbers of layers change: ranks, schedules, batches and micro-batches in flight stay, and with them the hops and
their process groups. Nothing is computed with, so values and optimizer state have the bits that they had.

    1  every rank makes the stage of the new plan, with a synchronizer that says what it will own
    2  the ranks tell each other which elements they own and hold, before and after
    3  for each parameter, owners send values and state to the new owners, in the same order on all ranks
    4  parameters that are not trained are sent from their first stage to ranks that lack them
    5  new owners give the values to all holders
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.pipeline.optimizer import PipelineOptimizer, synchronizer_of
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.protocols import Content, State
from ds_hetero.gradient_sync.relayout import move_owned
from ds_hetero.gradient_sync.shards import held_box, local_tensor
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.sharding.gradient_chunks import Box
from ds_hetero.values.plans import Plan

_VALUE = "value"  # of the parameter, beside the names of the optimizer's state


@dataclass(frozen=True, slots=True)
class _Holding:
    """Elements of parameters that a rank owns and holds, before and after, by the names of the parameters."""

    owned_before: Mapping[str, tuple[Box, ...]]
    owned_after: Mapping[str, tuple[Box, ...]]
    state: Mapping[str, Content]  # of a parameter that it owned before, see `_described`
    frozen_before: Mapping[str, Box]  # of parameters that are not trained
    frozen_after: Mapping[str, Box]


def expect_movable(stage_model: nn.Module) -> None:
    """Refuse re-planning of a model whose layers cannot be moved. Raises `ConfigError`: they have buffers."""
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

    Caller: every rank of the world, between two steps.
    Collectives: those of making an `AsymmetricGradientSync`; one `on_all_ranks`; messages of every parameter that
    changes its owner; ``gather``.
    """
    optimizer: PipelineOptimizer = pipelined.engine.optimizer
    stage, old, device = pipelined.stage, optimizer.sync, default_device()
    old.close()
    frozen_before = _frozen(stage.parameters())
    stage.change_layers(plan, device)
    frozen_after = _frozen(stage.parameters())
    new = synchronizer_of(stage, plan, pipelined.groups, old.bucket_bytes)
    holding = _Holding(
        owned_before=old.owned_boxes,
        owned_after=new.owned_boxes,
        state={name: _described(optimizer.inner.state.get(value, {}), value) for name, value in old.owned.items()},
        frozen_before={name: held_box(parameter) for name, parameter in frozen_before.items()},
        frozen_after={name: held_box(parameter) for name, parameter in frozen_after.items()},
    )
    holdings = on_all_ranks(lambda: holding)  # by rank
    states: dict[str, State] = {}
    for name in new.shapes:
        described = next(rank.state[name] for rank in holdings if name in rank.owned_before)
        examples = {}  # an empty tensor for each value by element, of its dtype
        for key, entry in described.items():
            if isinstance(entry, torch.dtype):
                examples[key] = torch.empty(0, dtype=entry, device=device)
        # Taken out of the old synchronizer and the optimizer: memory is freed as parameters move.
        values = _taken(old.owned.pop(name, None), optimizer.inner.state)
        boxes_before = [rank.owned_before.get(name, ()) for rank in holdings]
        boxes_after = [rank.owned_after.get(name, ()) for rank in holdings]
        moved = move_owned(values, boxes_before, boxes_after, examples)
        if name in new.owned:
            new.owned[name].copy_(moved[_VALUE])
            states[name] = {key: moved.get(key, entry) for key, entry in described.items() if key != _VALUE}
    _move_frozen(frozen_before, frozen_after, holdings, pipelined.plan)
    optimizer.take_over(new, states)
    new.gather()
    pipelined.plan = plan
    pipelined.engine.param_names = {parameter: name for name, parameter in stage.model.named_parameters()}


def _frozen(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}


def _taken(owned: nn.Parameter | None, state: MutableMapping[Any, Any]) -> State:
    """Take the optimizer's state of an owned parameter out of the optimizer; return it with the parameter's value."""
    return {} if owned is None else {_VALUE: owned.detach(), **state.pop(owned, {})}


def _described(state: Content, value: Tensor) -> State:
    """Describe a parameter's value and the optimizer's state of it.

    Returns:
        The dtypes of the value and of states by element, which travel; other states, such as counts of steps, as they
        are.
    """
    described: State = {_VALUE: value.dtype}
    for key, entry in state.items():
        is_by_element = isinstance(entry, Tensor) and entry.shape == value.shape
        described[key] = entry.dtype if is_by_element else entry
    return described


def _move_frozen(
    before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter], holdings: Sequence[_Holding], plan: Plan
) -> None:
    """Give every rank the parameters that are not trained and that are new on it.

    Args:
        before: this rank's, by name, before the move.
        after: likewise, after it.
        holdings: by rank.
        plan: the old one; the first of its stages with a parameter sends it.
    """
    own_rank, ranks = dist.get_rank(), range(len(holdings))
    names = dict.fromkeys(chain.from_iterable(holding.frozen_before for holding in holdings))
    for name in names:
        holders = [rank for rank in ranks if name in holdings[rank].frozen_before]
        lacking = [rank for rank in ranks if name in holdings[rank].frozen_after and rank not in holders]
        if not lacking:
            continue
        stage = plan.stage_of(holders[0])
        assert stage is not None
        senders: dict[Box, int] = {}  # of each part of the parameter: the first rank of the stage that holds it
        for rank in stage.ranks:
            senders.setdefault(holdings[rank].frozen_before[name], rank)
        sent_boxes: list[list[Box]] = [[] for _ in ranks]
        for box, sender in senders.items():
            sent_boxes[sender].append(box)
        wanted_boxes = [[holdings[rank].frozen_after[name]] if rank in lacking else [] for rank in ranks]
        example = local_tensor(before.get(name, after.get(name, torch.empty(0, device=default_device()))))
        values = {_VALUE: example.reshape(-1)} if sent_boxes[own_rank] else {}
        moved = move_owned(values, sent_boxes, wanted_boxes, {_VALUE: example})
        if own_rank in lacking:
            example.copy_(moved[_VALUE].view(example.shape))
