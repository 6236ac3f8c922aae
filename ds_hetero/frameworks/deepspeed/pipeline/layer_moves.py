"""Move layers between the stages of a running job: send parameters and optimizer state to their new owners.

Only the number of layers of each stage changes. Ranks, schedules, batches and micro-batches in flight stay the same,
and so do the sends between stages and their process groups. Nothing is computed, so values and optimizer state keep
their bits.

    1  every rank makes its stage of the new plan, and a new synchronizer, which decides the elements that the rank owns
    2  the ranks exchange which elements they own and hold, before and after the move
    3  for each parameter, old owners send values and state to the new owners, in the same order on all ranks
    4  frozen parameters are sent by the first stage that holds them to ranks that lack them
    5  the new owners send the values to all holders: every rank of the stages that have the parameter
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
from ds_hetero.frameworks.deepspeed.pipeline.optimizer import PipelineOptimizer, make_synchronizer
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.protocols import Content, State
from ds_hetero.gradient_sync.relayout import move_owned
from ds_hetero.gradient_sync.shards import local_box, local_tensor
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.packed_weights import packed_names
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.sharding.gradient_chunks import Box
from ds_hetero.values.plans import Plan

_VALUE = "value"  # key of a parameter's value in dictionaries whose other keys are names of optimizer states


@dataclass(frozen=True, slots=True)
class _Holding:
    """By name: trained elements that a rank owns, and frozen parameters that it holds, before and after the move."""

    owned_before: Mapping[str, tuple[Box, ...]]  # boxes of trained parameters that the rank owns
    owned_after: Mapping[str, tuple[Box, ...]]
    state: Mapping[str, Content]  # descriptions of the states that the rank owns before the move, see `_describe`
    frozen_before: Mapping[str, Box]  # box of each frozen parameter that the rank holds
    frozen_after: Mapping[str, Box]


def expect_movable(stage_model: nn.Module, plan: Plan) -> None:
    """Check that a model's layers can be moved, as ``"replan"`` asks.

    Raises:
        ConfigError: they have buffers, or weights of 4 bits, whose constants are no parameters.
    """
    if packed := next(packed_names(stage_model), None):
        raise ConfigError(
            f'"replan.enabled" cannot move the layers of this model, which have weights of 4 bits ({packed}). Leave '
            '"replan" out, or start the job again with another plan: checkpoints load under any plan.'
        )
    buffers = [name for name, _ in stage_model.named_buffers() if ".layers." in f".{name}"]
    if buffers:
        raise ConfigError(
            f'"replan.enabled" cannot move the layers of this model, which have buffers ({", ".join(buffers[:3])}). '
            'Leave "replan" out.'
        )


@torch.no_grad()
@waiting_for_peers("moving layers between stages")
def move_layers(pipelined: PipelinedEngine, plan: Plan) -> None:
    """Change a running job to a plan with other numbers of layers.

    Args:
        plan: the new plan.

    Caller: every rank of the world, between two steps.
    Collectives: those of making an `AsymmetricGradientSync`, one `on_all_ranks`, and those of
        `AsymmetricGradientSync.gather`; besides, point-to-point messages of parameters that change their owner.
    """
    optimizer: PipelineOptimizer = pipelined.engine.optimizer
    stage, old_sync, device = pipelined.stage, optimizer.sync, default_device()
    old_sync.close()
    frozen_before = _frozen(stage.parameters())
    stage.change_layers(plan, device)
    frozen_after = _frozen(stage.parameters())
    new_sync = make_synchronizer(stage, plan, pipelined.groups, old_sync.bucket_bytes)
    descriptions = {}
    for name, value in old_sync.owned.items():
        descriptions[name] = _describe(optimizer.inner.state.get(value, {}), value)
    holding = _Holding(
        owned_before=old_sync.owned_boxes,
        owned_after=new_sync.owned_boxes,
        state=descriptions,
        frozen_before={name: local_box(parameter) for name, parameter in frozen_before.items()},
        frozen_after={name: local_box(parameter) for name, parameter in frozen_after.items()},
    )
    holding_by_rank = on_all_ranks(lambda: holding)
    states: dict[str, State] = {}
    for name in new_sync.shapes:
        description = next(rank.state[name] for rank in holding_by_rank if name in rank.owned_before)
        examples = {}  # an empty tensor of its dtype for each value that has an entry per element
        for key, entry in description.items():
            if isinstance(entry, torch.dtype):
                examples[key] = torch.empty(0, dtype=entry, device=device)
        # Removed from the old synchronizer and the optimizer, so that memory is freed as parameters move.
        values = _pop_values(old_sync.owned.pop(name, None), optimizer.inner.state)
        boxes_before = [rank.owned_before.get(name, ()) for rank in holding_by_rank]
        boxes_after = [rank.owned_after.get(name, ()) for rank in holding_by_rank]
        received = move_owned(values, boxes_before, boxes_after, examples)
        if name in new_sync.owned:
            new_sync.owned[name].copy_(received[_VALUE])
            states[name] = {key: received.get(key, entry) for key, entry in description.items() if key != _VALUE}
    _move_frozen(frozen_before, frozen_after, holding_by_rank, pipelined.plan)
    optimizer.take_over(new_sync, states)
    new_sync.gather()
    pipelined.plan = plan
    pipelined.engine.param_names = {parameter: name for name, parameter in stage.model.named_parameters()}


def _frozen(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that are frozen, by name."""
    return {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}


def _pop_values(owned: nn.Parameter | None, state: MutableMapping[Any, Any]) -> State:
    """Remove an owned parameter from the optimizer's state; return its value and its states, by name."""
    return {} if owned is None else {_VALUE: owned.detach(), **state.pop(owned, {})}


def _describe(state: Content, value: Tensor) -> State:
    """Describe a parameter's value and its optimizer states, by name.

    Returns:
        By name: for a state that is a tensor of the parameter's shape, its dtype, with which ranks receive elements of
        it; for any other state, such as the count of steps, the state itself.
    """
    description: State = {_VALUE: value.dtype}
    for key, entry in state.items():
        is_by_element = isinstance(entry, Tensor) and entry.shape == value.shape
        description[key] = entry.dtype if is_by_element else entry
    return description


def _move_frozen(
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
    holding_by_rank: Sequence[_Holding],
    plan: Plan,
) -> None:
    """Send frozen parameters to the ranks that do not have them yet.

    Args:
        before: frozen parameters of this rank before the move, by name.
        after: those after the move.
        holding_by_rank: what every rank holds.
        plan: the old plan; the first of its stages that holds a parameter sends it.
    """
    this_rank, ranks = dist.get_rank(), range(len(holding_by_rank))
    names = dict.fromkeys(chain.from_iterable(holding.frozen_before for holding in holding_by_rank))
    for name in names:
        holders = [rank for rank in ranks if name in holding_by_rank[rank].frozen_before]
        receivers = [rank for rank in ranks if name in holding_by_rank[rank].frozen_after and rank not in holders]
        if not receivers:
            continue
        stage = plan.stage_of(holders[0])
        assert stage is not None
        sender_by_box: dict[Box, int] = {}  # for each shard of the parameter, the first rank of the stage that has it
        for rank in stage.ranks:
            sender_by_box.setdefault(holding_by_rank[rank].frozen_before[name], rank)
        sent_boxes: list[list[Box]] = [[] for _ in ranks]
        for box, sender in sender_by_box.items():
            sent_boxes[sender].append(box)
        wanted_boxes: list[list[Box]] = [[] for _ in ranks]
        for rank in receivers:
            wanted_boxes[rank].append(holding_by_rank[rank].frozen_after[name])
        example = local_tensor(before.get(name, after.get(name, torch.empty(0, device=default_device()))))
        values = {_VALUE: example.reshape(-1)} if sent_boxes[this_rank] else {}
        received = move_owned(values, sent_boxes, wanted_boxes, {_VALUE: example})
        if this_rank in receivers:
            example.copy_(received[_VALUE].view(example.shape))
