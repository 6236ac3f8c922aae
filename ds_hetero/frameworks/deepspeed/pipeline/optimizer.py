"""The user's optimizer over what this rank owns; a step is exchange, norm, clipping, update, return.

Gradients of a stage's parameters add up at their owners (`AsymmetricGradientSync`), so optimizer state is partitioned
over the ranks that hold a parameter, as under ZeRO-1, and gradients are freed as they leave, as under ZeRO-2. Owned
values are one-dimensional parts of parameters: only optimizers that treat elements alone can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ds_hetero.engine.adapters import StagedModel
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.protocols import Content, State
from ds_hetero.gradient_sync import AsymmetricGradientSync, pipeline_layouts
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.step_clock import SYNC, StepClock
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
        """Parameter groups of the inner optimizer: its ``load_state_dict`` makes new ones, so none are kept here."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the inner optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> State:  # type: ignore[override]
        """Default options of the inner optimizer."""
        return self.inner.defaults

    def state_dict(self) -> State:
        """Return what this rank owns, by parameter: boxes, values and optimizer state; and the groups' options."""
        owned = {}
        for name, value in self.sync.owned.items():
            owned[name] = {
                "shape": self.sync.shapes[name],
                "boxes": self.sync.owned_boxes[name],
                "value": value.detach(),
                "state": dict(self.inner.state.get(value, {})),
            }
        groups = []
        for group in self.param_groups:
            groups.append({key: value for key, value in group.items() if key != "params"})
        return {"owned": owned, "groups": groups}

    def load_state_dict(self, state_dict: State) -> None:
        """Take the groups' options; `checkpoints.load_any_plan` takes values and state from the parts of all ranks."""
        for group, saved in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(saved)

    def take_over(self, sync: AsymmetricGradientSync, states: Mapping[str, State]) -> None:
        """Go on with other owners.

        Args:
            sync: of the same parameters under another plan; it has this rank's values.
            states: of the inner optimizer, by the names of the parameters that this rank owns parts of.
        """
        self.sync = sync
        for group, names in zip(self.inner.param_groups, self._names, strict=True):
            group["params"] = owned_of_group(sync, names)
        self.inner.state.clear()
        for name, state in states.items():
            if state:
                self.inner.state[sync.owned[name]] = state

    def leave(self, unused: Set[str]) -> bool:
        """Leave parameters unchanged in the next step, as on one process where they get no gradient.

        Returns:
            False: the steps of other parameters are counted as usual, since each parameter has a count of its own.
        """
        self._unused = unused
        return False

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
    """Return this rank's parts of a group's parameters; an empty one if it owns none.

    A group without parameters would be refused by torch, and all ranks need the same groups.
    """
    owned = [sync.owned[name] for name in names if name in sync.owned]
    return owned or [nn.Parameter(torch.zeros(0, device=default_device()))]


def synchronizer_of(stage: StagedModel, plan: Plan, groups: ProcessGroups, bucket_bytes: int) -> AsymmetricGradientSync:
    """Return the synchronizer of the parameters that this rank holds.

    Args:
        bucket_bytes: of its buckets.

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
    """Return parameter groups with names in the place of parameters.

    Args:
        groups: of an optimizer, or as `deepspeed.initialize` takes ``model_parameters``.
        names: of the whole model's parameters, by ``id``.

    Raises:
        ConfigError: a parameter is not the model's.
    """
    named = []
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], nn.Parameter) else list(group["params"])
        if any(id(parameter) not in names for parameter in members):
            raise ConfigError("the optimizer has parameters that are not the model's; give it those of the model.")
        named.append({**group, "params": [names[id(parameter)] for parameter in members]})
    return named


def expect_elementwise(optimizer: type[Optimizer]) -> None:
    """Refuse an optimizer whose update of an element depends on other elements. Raises `ConfigError`."""
    if optimizer.__name__ not in _ELEMENTWISE:
        raise ConfigError(
            f"{optimizer.__name__} cannot be used with pipelines: every rank owns flat parts of parameters, so an "
            f"optimizer must treat each element alone. Use one of {', '.join(_ELEMENTWISE)}."
        )


def optimizer_of_section(section: Content, groups: Groups) -> Optimizer:
    """Make the optimizer that ds_config.json describes. Raises `ConfigError`: pipelines cannot use its type."""
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
