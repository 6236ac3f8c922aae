"""The user's optimizer over what this rank owns; a step is exchange, norm, clipping, update, return.

Gradients of a stage's parameters add up at their owners (`AsymmetricGradientSync`), so optimizer state is partitioned
over the ranks that hold a parameter, as under ZeRO-1, and gradients are freed as they leave, as under ZeRO-2. Owned
values are one-dimensional parts of parameters: only optimizers that treat elements alone can be used.

Layers move between the stages of a running job: parameters and optimizer state go to their new owners.

Only numbers of layers change: ranks, schedules, batches and micro-batches in flight stay, and with them the hops and
their process groups. Nothing is computed with, so values and optimizer state have the bits that they had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hetero.engine.adapters import StagedModel
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.protocols import Content, State
from ds_hetero.gradient_sync import AsymmetricGradientSync, pipeline_layouts
from ds_hetero.gradient_sync.relayout import move_owned
from ds_hetero.gradient_sync.shards import held_box, local_tensor
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.step_clock import SYNC, StepClock
from ds_hetero.sharding.gradient_chunks import Box
from ds_hetero.values.plans import Plan

_ELEMENTWISE = ("Adagrad", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_SECTION = {
    "adam": torch.optim.AdamW,  # DeepSpeed's Adam decouples weight decay unless "adam_w_mode" is false
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
_OF_DEEPSPEED = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")  # keys that say which kernel to use

Groups = list[State]
"""Parameter groups of an optimizer, whose ``"params"`` are names."""


class PipelineOptimizer(Optimizer):
    """An optimizer that DeepSpeed's engine steps, and that synchronizes the ranks around its step.

    Args:
        inner: over `AsymmetricGradientSync.owned`.
        clip: largest norm of the gradient of the whole model; 0 does not clip.
        names: of the whole model's parameters, by group.
    """

    def __init__(
        self,
        inner: Optimizer,
        sync: AsymmetricGradientSync,
        clip: float,
        clock: StepClock,
        names: Sequence[Sequence[str]],
    ) -> None:
        self.inner, self.sync, self._clip, self._clock, self._names = inner, sync, clip, clock, names
        self._global_grad_norm = 0.0
        self.overflow = False  # the last step was skipped, since the norm was not finite
        self._unused: Set[str] = frozenset()

    @property
    def param_groups(self) -> Groups:  # type: ignore[override]
        """Those of the inner optimizer, whose ``load_state_dict`` makes new ones."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the inner optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> State:  # type: ignore[override]
        """Those of the inner optimizer."""
        return self.inner.defaults

    def state_dict(self) -> State:
        """This rank's part, by parameter: boxes, values and optimizer state; and the groups' settings."""
        owned = {
            name: {
                "shape": self.sync.shapes[name],
                "boxes": self.sync.owned_boxes[name],
                "value": value.detach(),
                "state": dict(self.inner.state.get(value, {})),
            }
            for name, value in self.sync.owned.items()
        }
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"owned": owned, "groups": groups}

    def load_state_dict(self, state_dict: State) -> None:
        """Take the groups' settings; `checkpoints.load_any_plan` takes values and state from the parts of all ranks."""
        for group, saved in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(saved)

    def take_over(self, sync: AsymmetricGradientSync, states: Mapping[str, State]) -> None:
        """Go on with other owners.

        Args:
            sync: of the same parameters under another plan; this rank's values are in it.
            states: of the inner optimizer, by the names of what this rank owns.
        """
        self.sync = sync
        for group, names in zip(self.inner.param_groups, self._names, strict=True):
            group["params"] = owned_of_group(sync, names)
        self.inner.state.clear()
        for name, state in states.items():
            if state:
                self.inner.state[sync.owned[name]] = state

    def leave(self, unused: Set[str]) -> bool:
        """Leave parameters alone in the next step, as one process does without a gradient."""
        self._unused = unused
        return False  # steps are counted for each parameter

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the owned gradients."""
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update what this rank owns from the gradients of all ranks, and give the new values to all holders.

        Caller: every rank of the world, once after the passes of a step.
        Collectives: those of `AsymmetricGradientSync.finish`, ``grad_norm`` and ``gather``.
        """
        with self._clock.phase(SYNC, "reduce_gradients"):
            self.sync.finish()
            norm = self.sync.grad_norm()
        self._global_grad_norm = norm
        self.overflow = not torch.isfinite(torch.tensor(norm))
        if self.overflow:
            return
        factor = self._clip / (norm + 1e-6) if self._clip else 1.0
        if factor < 1:
            for owned in self.sync.owned.values():
                assert owned.grad is not None
                owned.grad.mul_(factor)
        for name in self._unused & self.sync.owned.keys():
            self.sync.owned[name].grad = None
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)  # the next backward needs the room
        with self._clock.phase(SYNC, "gather_values"):
            self.sync.gather()


def owned_of_group(sync: AsymmetricGradientSync, names: Iterable[str]) -> list[nn.Parameter]:
    """This rank's part of a group's parameters; an empty one if it owns none, so that all ranks have equal groups."""
    owned = [sync.owned[name] for name in names if name in sync.owned]
    return owned or [nn.Parameter(torch.zeros(0, device=default_device()))]


def synchronizer_of(stage: StagedModel, plan: Plan, groups: ProcessGroups, bucket_bytes: int) -> AsymmetricGradientSync:
    """Return the synchronizer of what this rank holds of a model; ``bucket_bytes`` are those of its buckets.

    Caller: every rank of the world.
    Collectives: those of `pipeline_layouts` and of making an `AsymmetricGradientSync`.
    """
    parameters = {name: p for name, p in stage.parameters().items() if p.requires_grad}
    weights = dict(plan.zero.owner_weights) if plan.zero is not None and plan.zero.owner_weights else None
    return AsymmetricGradientSync(
        parameters,
        pipeline_layouts(parameters, plan, partial=stage.partial_parameters()),
        replicas=[pipeline.ranks for pipeline in plan.pipelines],
        groups=groups,
        bucket_bytes=bucket_bytes,
        owner_weights=weights,
    )


def groups_by_name(groups: Iterable[Content], names: Mapping[int, str]) -> Groups:
    """The whole model's parameter groups, with names. Raises `ConfigError`: a parameter is not the model's.

    Args:
        groups: of an optimizer, or as `deepspeed.initialize` takes ``model_parameters``.
    """
    named = []
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], nn.Parameter) else list(group["params"])
        if any(id(parameter) not in names for parameter in members):
            raise ConfigError("the optimizer has parameters that are not the model's; give it those of the model.")
        named.append({**group, "params": [names[id(parameter)] for parameter in members]})
    return named


def expect_elementwise(optimizer: type[Optimizer]) -> None:
    """Refuse an optimizer that does more than treat every element alone. Raises `ConfigError`: names it."""
    if optimizer.__name__ not in _ELEMENTWISE:
        raise ConfigError(
            f"{optimizer.__name__} cannot be used with pipelines: every rank owns flat parts of parameters, so an "
            f"optimizer must treat each element alone. Use one of {', '.join(_ELEMENTWISE)}."
        )


def optimizer_of_section(section: Content, groups: Groups) -> Optimizer:
    """Make the optimizer that ds_config.json describes. Raises `ConfigError`: a type not for pipelines."""
    kind = str(section.get("type", "")).lower()
    parameters = dict(section.get("params") or {})
    if kind not in _SECTION:
        raise ConfigError(
            f'"optimizer.type": "{section.get("type")}" cannot be used with pipelines; it is one of '
            f"{', '.join(sorted(_SECTION))}, or an optimizer of torch's given to deepspeed.initialize."
        )
    made: type[Optimizer] = _SECTION[kind]
    if kind == "adam" and parameters.get("adam_w_mode") is False:
        made = torch.optim.Adam
    return made(groups, **{name: value for name, value in parameters.items() if name not in _OF_DEEPSPEED})


_VALUE = "value"  # of the parameter, beside the names of the optimizer's state


@dataclass(frozen=True, slots=True)
class _Holding:
    """Parameters that a rank owns and holds, before and after.

    Args:
        state: by parameter it owned: the dtype of its value and of what the optimizer keeps by element, and anything
            else that the optimizer keeps as it is.
    """

    old: Mapping[str, tuple[Box, ...]]  # boxes of what it owned, by parameter
    new: Mapping[str, tuple[Box, ...]]  # boxes of what it owns
    state: Mapping[str, Content]
    frozen_before: Mapping[str, Box]  # of parameters that are not trained, what it held
    frozen_after: Mapping[str, Box]  # likewise, what it holds now


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
    before = _frozen(stage.parameters())
    stage.change_layers(plan, device)
    after = _frozen(stage.parameters())
    new = synchronizer_of(stage, plan, pipelined.groups, old.bucket_bytes)
    holding = _Holding(
        old=old.owned_boxes,
        new=new.owned_boxes,
        state={name: _described(optimizer.inner.state.get(value, {}), value) for name, value in old.owned.items()},
        frozen_before={name: held_box(parameter) for name, parameter in before.items()},
        frozen_after={name: held_box(parameter) for name, parameter in after.items()},
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
    _move_frozen(before, after, by_rank, pipelined.plan)
    optimizer.take_over(new, states)
    new.gather()
    pipelined.plan = plan
    pipelined.engine.param_names = {parameter: name for name, parameter in stage.model.named_parameters()}


def _frozen(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}


def _taken(owned: nn.Parameter | None, state: MutableMapping[Any, Any]) -> State:
    """The value of an owned parameter and the optimizer's state of it, which are taken away from the optimizer."""
    return {} if owned is None else {_VALUE: owned.detach(), **state.pop(owned, {})}


def _described(state: Content, value: Tensor) -> State:
    """The value of a parameter and the optimizer's state: dtypes of what has its shape, anything else as it is."""
    of_shape = {key: isinstance(entry, Tensor) and entry.shape == value.shape for key, entry in state.items()}
    return {_VALUE: value.dtype, **{key: entry.dtype if of_shape[key] else entry for key, entry in state.items()}}


def _move_frozen(
    before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter], by_rank: list[_Holding], plan: Plan
) -> None:
    """Give every rank the parameters that are not trained and new on it, from the first stage of ``plan`` with them."""
    own_rank, ranks = dist.get_rank(), range(len(by_rank))
    for name in dict.fromkeys(name for rank in by_rank for name in rank.frozen_before):
        holders = [i for i in ranks if name in by_rank[i].frozen_before]
        lacking = [i for i in ranks if name in by_rank[i].frozen_after and i not in holders]
        if not lacking:
            continue
        stage = plan.stage_of(holders[0])
        assert stage is not None
        senders = {by_rank[i].frozen_before[name]: i for i in reversed(stage.ranks)}  # of copies the first one
        held = [[box for box, sender in senders.items() if sender == i] for i in ranks]
        wanted = [[by_rank[i].frozen_after[name]] if i in lacking else [] for i in ranks]
        example = local_tensor(before.get(name, after.get(name, torch.empty(0, device=default_device()))))
        values = {_VALUE: example.reshape(-1)} if held[own_rank] else {}
        moved = move_owned(values, held, wanted, {_VALUE: example})
        if own_rank in lacking:
            example.copy_(moved[_VALUE].view(example.shape))
