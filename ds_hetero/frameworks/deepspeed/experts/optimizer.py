"""Update this rank's experts in the steps of DeepSpeed's engine, with the norm and the clipping of the whole model.

DeepSpeed averages gradients over all ranks, and partitions what all ranks hold. Experts that are divided among ranks
are held once in each replica, and their gradients are sums over the tokens of the replica already. So DeepSpeed's
engine is built without them (`ExpertParts.hidden`), and this object updates them, by an optimizer of the same class and
settings:

    in a backward          a hook adds each gradient to a sum, in fp32 if the weights have 16 bits
    before the step        `take`: add up the sums of the replicas, and divide them as DeepSpeed divides by the number
                           of ranks; one all-reduce of their squares, so that every rank knows the norm, and of which
                           parameters any rank has used
    in DeepSpeed's step    the norm of the other parameters, and with it that of the model; clip the other parameters
    after the step         `update`: clip, step, and copy masters to weights of 16 bits

The state of an expert is on the rank that holds it, in each replica. If DeepSpeed skips a step, so does this optimizer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.pipeline.optimizer import Groups, expect_elementwise, optimizer_of_section
from ds_hetero.frameworks.deepspeed.protocols import Content, Engine, State
from ds_hetero.frameworks.deepspeed.zero.stage3 import add_squares_elsewhere
from ds_hetero.frameworks.deepspeed.zero.stage12 import WeightedZeroOptimizer
from ds_hetero.runtime.experts.parts import ExpertParts
from ds_hetero.values.section import SECTION

MakeInner = Callable[[Groups], Optimizer]
"""Makes the experts' optimizer from parameter groups."""

_EPSILON = 1e-6  # that DeepSpeed adds to the norm before it divides by it


class ExpertOptimizer:
    """Updates the trained experts of this rank.

    Args:
        engine: DeepSpeed's engine, built without the experts.
        parts: the experts.
        make_inner: makes the optimizer.
        groups: for each parameter group of the engine's optimizer that had experts, its number and their names.

    Attributes:
        owned: fp32 values of this rank's experts that the optimizer updates, by name; of weights that have no 16 bits
            these are the weights themselves.
        squares: sum of squares of the experts' averaged gradients in the running step, over all ranks.
    """

    def __init__(
        self, engine: Engine, parts: ExpertParts, make_inner: MakeInner, groups: Sequence[tuple[int, list[str]]]
    ) -> None:
        self._engine, self._parts, self._group_numbers = engine, parts, [number for number, _ in groups]
        self.owned: dict[str, nn.Parameter] = {}
        self._sums: dict[str, Tensor] = {}
        self.squares = 0.0
        self._clip_factor: float | None = None  # of a step without ZeRO
        for name, part in parts.trained.items():
            value = part.parameter.detach()
            self.owned[name] = nn.Parameter(value.float() if value.element_size() < 4 else value)
            part.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._accumulate, name)
            )
        self.inner = make_inner(
            [
                {**_options(engine.optimizer.param_groups[number]), "params": [self.owned[name] for name in names]}
                for number, names in groups
            ]
        )
        if isinstance(engine.optimizer, WeightedZeroOptimizer):
            engine.optimizer.squares_elsewhere = lambda: self.squares
        elif isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
            add_squares_elsewhere(engine.optimizer, lambda: self.squares)

    def _accumulate(self, name: str, parameter: nn.Parameter) -> None:
        """Add a gradient of a backward to the step's sum, and free it."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if name in self._sums:
            self._sums[name] += gradient
        else:
            self._sums[name] = gradient.to(self.owned[name].dtype)

    def clear(self) -> None:
        """Drop the gradients of a step, as the engine's ``zero_grad`` does."""
        self._sums.clear()

    @torch.no_grad()
    def take(self) -> None:
        """Take the gradients of a step, average them, and compute their norm.

        Caller: every rank, before the engine's step at the end of an accumulation.
        Collectives: one all_reduce of a number and a flag for each parameter; with several replicas before it those of
            `sum_over_replicas` for each parameter.
        """
        for group, number in zip(self.inner.param_groups, self._group_numbers, strict=True):
            # The learning rates of this step: a scheduler of the engine changes them inside the step.
            settings = _options(self._engine.optimizer.param_groups[number])
            group.update({key: value for key, value in settings.items() if key in group})
        world_size = dist.get_world_size()
        device = next(iter(self.owned.values())).device
        numbers = torch.zeros(1 + len(self.owned), dtype=torch.float64, device=device)
        num_replicas = self._parts.num_replicas
        for index, (name, owned) in enumerate(self.owned.items()):
            numbers[1 + index] = name in self._sums
            if num_replicas > 1:
                # The other replicas may have used the experts, so this rank takes part with zeros.
                local = self._sums.pop(name, None)
                local = torch.zeros_like(owned) if local is None else local
                self._sums[name] = self._parts.sum_over_replicas(self._parts.parts[name], local)
            if name in self._sums:
                self._sums[name] /= world_size
                numbers[0] += torch.linalg.vector_norm(self._sums[name]).double().square()
        # Over all replicas, which have the same gradients, so that their norms have the same bits.
        dist.all_reduce(numbers)
        squares, *used = numbers.tolist()
        self.squares = squares / num_replicas
        for (name, owned), is_used in zip(self.owned.items(), used, strict=True):
            # One process has zeros for experts without a token, if any expert of the layer has one.
            owned.grad = self._sums.get(name, torch.zeros_like(owned)) if is_used else None
        self._sums.clear()
        self._clip_factor = None

    @torch.no_grad()
    def clip_without_zero(self, clip_others: Callable[[], None]) -> None:
        """Replace ``clip_fp32_gradients``, which clips without ZeRO: clip by the norm of the whole model."""
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        squares = [torch.linalg.vector_norm(p.grad).double().square() for p in parameters if p.grad is not None]
        norm = (torch.stack(squares).sum().item() + self.squares) ** 0.5 if squares else self.squares**0.5
        self._clip_factor = min(1.0, self._engine.gradient_clipping() / (norm + _EPSILON))
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(self._clip_factor)

    @torch.no_grad()
    def update(self, is_applied: bool) -> None:
        """Clip the gradients of `take` as DeepSpeed has clipped the others, and step.

        Args:
            is_applied: whether DeepSpeed has taken its step; if not, the gradients are dropped.
        """
        if is_applied:
            factor = self._factor()
            for owned in self.owned.values():
                if owned.grad is not None and factor < 1:
                    owned.grad.mul_(factor)
            self.inner.step()
            self.copy_to_model()
        self.inner.zero_grad(set_to_none=True)

    def _factor(self) -> float:
        """Return the number by which gradients are multiplied, at most 1."""
        if self._clip_factor is not None:
            return self._clip_factor
        max_norm, norm = self._engine.gradient_clipping(), getattr(self._engine.optimizer, "_global_grad_norm", None)
        return 1.0 if not max_norm or norm is None else max_norm / max(float(norm) + _EPSILON, max_norm)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the owned values to weights of 16 bits."""
        for name, part in self._parts.trained.items():
            if part.parameter.dtype != self.owned[name].dtype:
                part.parameter.copy_(self.owned[name])

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Copy weights of 16 bits to the owned values, after only weights were loaded."""
        for name, part in self._parts.trained.items():
            if part.parameter.dtype != self.owned[name].dtype:
                self.owned[name].copy_(part.parameter)

    def load_inner(self, states: Mapping[str, State]) -> None:
        """Load the optimizer's state of every parameter, by name; empty before the first step."""
        names = {id(owned): name for name, owned in self.owned.items()}
        in_order = [names[id(owned)] for group in self.inner.param_groups for owned in group["params"]]
        state_by_number = {number: states[name] for number, name in enumerate(in_order) if states[name]}
        # torch moves entries to where the optimizer needs them.
        self.inner.load_state_dict({**self.inner.state_dict(), "state": state_by_number})


def take_experts_out(groups: Sequence[Any], parts: ExpertParts) -> tuple[list[Any], list[tuple[int, list[str]]]]:
    """Take the experts out of parameters or parameter groups.

    Args:
        groups: parameters, or groups of an optimizer, which are changed in place.

    Returns:
        The same without experts; and for each group that had some, its number and their names.

    Raises:
        ConfigError: a group has experts only, so that DeepSpeed would drop it and a scheduler would lose count.
    """
    ids = {id(part.parameter) for part in parts.parts.values()}
    name_by_id = {id(part.parameter): name for name, part in parts.trained.items()}
    if not groups or not isinstance(groups[0], Mapping):
        trained = [name_by_id[id(parameter)] for parameter in groups if id(parameter) in name_by_id]
        others = [parameter for parameter in groups if id(parameter) not in ids]
        if trained:
            _expect_trained(others, 0)
        return others, [(0, trained)] if trained else []
    found = []
    number = 0  # of the group for DeepSpeed, which drops empty ones
    for group in groups:
        members = list(group["params"])
        trained = [name_by_id[id(parameter)] for parameter in members if id(parameter) in name_by_id]
        others = [parameter for parameter in members if id(parameter) not in ids]
        if trained or (members and not others):
            _expect_trained(others, number)
        if trained:
            found.append((number, trained))
        group["params"] = others
        number += bool(others)
    return list(groups), found


def _expect_trained(others: Sequence[nn.Parameter], number: int) -> None:
    """Check that DeepSpeed has something to train in a group without experts. Raises `ConfigError`: it has not."""
    if not any(parameter.requires_grad for parameter in others):
        raise ConfigError(
            f'"{SECTION}.experts": parameter group {number} of the optimizer trains experts only, or adapters on them. '
            "Put other parameters into it, or the experts into another group."
        )


def expect_trained_experts_in_groups(groups: Sequence[tuple[int, list[str]]], parts: ExpertParts) -> None:
    """Check that an optimizer has all experts that need gradients; the others would count in the norm of all.

    Args:
        groups: number and names of the experts in each group, of `take_experts_out`.

    Raises:
        ConfigError: names the first that is in no group.
    """
    in_groups = {name for _, names in groups for name in names}
    for name in parts.trained:
        if name not in in_groups:
            raise ConfigError(
                f'"{SECTION}.experts": {name} needs gradients, but is in no parameter group of the optimizer. Put it '
                "into one, or call requires_grad_(False)."
            )


def inner_maker(optimizer: object, ds_config: Content) -> MakeInner:
    """Return the function that makes the experts' optimizer, like the one that the engine steps.

    Args:
        optimizer: the script's, or None if ds_config.json describes one.

    Raises:
        ConfigError: its update of an element may depend on others, or it is made by a function of the script.
    """
    if optimizer is None:
        section: Content = ds_config.get("optimizer") or {}
        if not section:
            return _no_optimizer
        return functools.partial(optimizer_of_section, section)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f'"{SECTION}.experts" needs the optimizer itself: give deepspeed.initialize a torch optimizer, or set '
            '"optimizer" in ds_config.json, in place of a function that makes one.'
        )
    if type(optimizer).__module__.partition(".")[0] != "torch":
        raise ConfigError(
            f'"{SECTION}.experts" makes a second optimizer for the experts, which it can for those of torch. Use one '
            f'of them in place of {type(optimizer).__module__}.{type(optimizer).__name__}, or "optimizer" of '
            "ds_config.json."
        )
    expect_elementwise(type(optimizer))
    defaults = optimizer.defaults
    accepted = _arguments_of(type(optimizer))
    options = {name: value for name, value in defaults.items() if name in accepted}
    return lambda groups: type(optimizer)(groups, **options)


def _arguments_of(optimizer_type: type[Optimizer]) -> set[str]:
    """Return the names of the arguments of an optimizer's constructor."""
    return set(inspect.signature(optimizer_type).parameters)


def _no_optimizer(groups: Groups) -> Optimizer:
    raise ConfigError(
        f'"{SECTION}.experts" needs an optimizer. Set "optimizer" in ds_config.json, or give one to '
        "deepspeed.initialize."
    )


def _options(group: Content) -> dict[str, Any]:
    """Return the settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}
