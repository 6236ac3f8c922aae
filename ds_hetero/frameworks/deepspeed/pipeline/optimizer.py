"""Run the user's optimizer in a job of pipelines, on the elements that this rank owns.

`AsymmetricGradientSync` adds the gradients of a stage's parameters up at their owners. So optimizer state is
partitioned over the ranks that hold a parameter, as under ZeRO-1, and gradients are freed as soon as they are sent, as
under ZeRO-2. A step is: receive gradients, compute their norm, clip, update, and send the new values to all holders.

Owned values are 1-D parts of parameters. So only optimizers can be used whose update of an element depends on no other
element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ds_hetero.engine.trained.staged_model import StagedModel
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.protocols import Content, State
from ds_hetero.gradient_sync import AsymmetricGradientSync, pipeline_layouts
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.step_clock import SYNC, StepClock
from ds_hetero.values.plans import Plan

_ELEMENTWISE = ("Adagrad", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_OPTIMIZER_TYPES = {
    "adam": torch.optim.AdamW,  # DeepSpeed's Adam decouples weight decay unless "adam_w_mode" is false
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
# Keys of "optimizer.params" that choose DeepSpeed's class or kernel; torch's optimizers do not take them.
_DEEPSPEED_PARAMS = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")

Groups = list[State]
"""Parameter groups of an optimizer. Their ``"params"`` are names of parameters until the optimizer is made."""


class PipelineOptimizer(Optimizer):
    """The optimizer that DeepSpeed's engine steps: gets gradients from all ranks, updates, and sends new values.

    Args:
        inner: the user's optimizer, over ``sync.owned``.
        sync: synchronizes the parameters that this rank holds.
        clip: norm to which the gradient of the whole model is clipped; 0 means no clipping.
        clock: measures the phases of a step.
        names: names of the whole model's parameters, by group.

    Attributes:
        overflow: whether the last step was skipped since the norm was not finite.
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
        self.overflow = False
        self._unused: Set[str] = frozenset()

    @property
    def param_groups(self) -> Groups:  # type: ignore[override]
        """Parameter groups of the inner optimizer, read each time: its ``load_state_dict`` makes new ones."""
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
        """Return the state that this rank saves.

        Returns:
            ``"owned"``: by name of a parameter, its ``"shape"``, the ``"boxes"`` that this rank owns, their elements as
            ``"value"`` [elements], and the inner optimizer's ``"state"`` of them. ``"groups"``: the options of each
            parameter group.
        """
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
        """Load the groups' options alone; `checkpoints.load_any_plan` loads values and state from all ranks' files."""
        for group, saved in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(saved)

    def take_over(self, sync: AsymmetricGradientSync, states: Mapping[str, State]) -> None:
        """Continue with the elements that this rank owns under another plan.

        Args:
            sync: synchronizer of the new plan, whose ``owned`` has the values already.
            states: the inner optimizer's states of these elements, by name of the parameter.
        """
        self.sync = sync
        for group, names in zip(self.inner.param_groups, self._names, strict=True):
            group["params"] = owned_of_group(sync, names)
        self.inner.state.clear()
        for name, state in states.items():
            if state:
                self.inner.state[sync.owned[name]] = state

    def skip_in_next_step(self, unused: Set[str]) -> bool:
        """Leave parameters unchanged in the next step, as one process does if they have no gradient.

        Returns:
            False: the inner optimizer has a count of steps for each parameter, see `UsedParameters`.
        """
        self._unused = unused
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients of the elements that this rank owns; without ``set_to_none``, set them to zero."""
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the elements that this rank owns with the gradients of all ranks; send the values to all holders.

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
        self.inner.zero_grad(set_to_none=True)  # the next backward needs the memory
        with self._clock.phase(SYNC, "gather_values"):
            self.sync.gather()


def owned_of_group(sync: AsymmetricGradientSync, names: Iterable[str]) -> list[nn.Parameter]:
    """Return this rank's parts of a group's parameters; an empty parameter if it owns no part.

    torch refuses a group without parameters, and all ranks need the same groups.
    """
    owned = [sync.owned[name] for name in names if name in sync.owned]
    return owned or [nn.Parameter(torch.zeros(0, device=default_device()))]


def make_synchronizer(
    stage: StagedModel, plan: Plan, groups: ProcessGroups, bucket_bytes: int
) -> AsymmetricGradientSync:
    """Make the synchronizer of the trained parameters that this rank holds.

    Args:
        stage: this rank's part of the model.
        groups: process groups that exist already and are used again.
        bucket_bytes: size of its buckets.

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
    """Return parameter groups whose ``"params"`` are names.

    Args:
        groups: groups of an optimizer, or those that `deepspeed.initialize` takes as ``model_parameters``.
        names: names of the whole model's parameters, by ``id``.

    Raises:
        ConfigError: a parameter is not the model's.
    """
    named_groups = []
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], nn.Parameter) else list(group["params"])
        if any(id(parameter) not in names for parameter in members):
            raise ConfigError(
                "the optimizer has parameters that are not those of the model. Make it from model.parameters()."
            )
        named_groups.append({**group, "params": [names[id(parameter)] for parameter in members]})
    return named_groups


def expect_elementwise(optimizer: type[Optimizer]) -> None:
    """Check that an optimizer's update of an element depends on no other element. Raises `ConfigError`: it may.

    Known optimizers are recognized by the name of their class.
    """
    if optimizer.__name__ not in _ELEMENTWISE:
        raise ConfigError(
            f"{optimizer.__name__} cannot be used with pipelines: every rank owns flat parts of parameters, so an "
            f"optimizer must update each element by itself. Use one of {', '.join(_ELEMENTWISE)}."
        )


def optimizer_of_section(section: Content, groups: Groups) -> Optimizer:
    """Make the optimizer that ``"optimizer"`` of ds_config.json describes.

    Args:
        section: the value of ``"optimizer"``.
        groups: its parameter groups.

    Raises:
        ConfigError: pipelines cannot use its type.
    """
    type_name = str(section.get("type", "")).lower()
    params = dict(section.get("params") or {})
    if type_name not in _OPTIMIZER_TYPES:
        raise ConfigError(
            f'"optimizer.type": "{section.get("type")}" cannot be used with pipelines. Use one of '
            f"{', '.join(sorted(_OPTIMIZER_TYPES))}, or give one of torch's optimizers to deepspeed.initialize."
        )
    optimizer_type: type[Optimizer] = _OPTIMIZER_TYPES[type_name]
    if type_name == "adam" and params.get("adam_w_mode") is False:
        optimizer_type = torch.optim.Adam
    return optimizer_type(groups, **{name: value for name, value in params.items() if name not in _DEEPSPEED_PARAMS})
