"""Optimizers, groups of parameters and schedules of learning rates, drawn and made."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.integration.combinations.compare import RTOL_8BIT, Tolerance

# A denominator near zero would make the rounding of a gradient near zero a step of full size.
EPS = 1e-3
_EXACT = Tolerance()
_8_BITS = Tolerance(RTOL_8BIT, series=1e-2)


@dataclass(frozen=True)
class Recipe:
    """One optimizer.

    Args:
        module: of its class, "torch.optim" or "bitsandbytes.optim"; "deepspeed" is made by ds_config.json.
        name: of its class, or of ds_config.json.
        options: its own; "lr" among them.
        tolerance: see there.
        weight: how often it is drawn.
    """

    module: str
    name: str
    options: tuple[tuple[str, Any], ...]
    tolerance: Tolerance = _EXACT
    weight: float = 1.0


def _torch(name: str, weight: float = 1.0, tolerance: Tolerance = _EXACT, **options: Any) -> Recipe:
    return Recipe("torch.optim", name, tuple(options.items()), tolerance, weight)


def _of_8_bits(name: str, tolerance: Tolerance, **options: Any) -> Recipe:
    return Recipe("bitsandbytes.optim", name, tuple(options.items()), tolerance, 0.3)


def _by_configuration(name: str, **options: Any) -> Recipe:
    return Recipe("deepspeed", name, tuple(options.items()), Tolerance(), 0.4)


RECIPES = {
    "SGD": _torch("SGD", 3, lr=0.3),
    "SGD, momentum": _torch("SGD", 2, lr=0.1, momentum=0.9),
    "SGD, Nesterov, decay": _torch("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": _torch("Adam", lr=1e-2, eps=EPS),
    "AdamW": _torch("AdamW", 2, lr=1e-2, eps=EPS, weight_decay=0.1),
    "AdamW, amsgrad": _torch("AdamW", lr=1e-2, eps=EPS, amsgrad=True),
    "AdamW, fused": _torch("AdamW", lr=1e-2, eps=EPS, fused=True),
    "Adamax": _torch("Adamax", lr=1e-2, eps=EPS),
    "NAdam": _torch("NAdam", lr=1e-2, eps=EPS),
    "RAdam": _torch("RAdam", lr=1e-2, eps=EPS),
    "Adagrad": _torch("Adagrad", 2, lr=3e-2, eps=EPS),
    "Adagrad, decay": _torch("Adagrad", lr=3e-2, eps=EPS, lr_decay=0.1, weight_decay=0.1),
    "Adadelta": _torch("Adadelta", lr=1.0, eps=EPS),
    "RMSprop": _torch("RMSprop", lr=1e-2, eps=EPS),
    "RMSprop, centered, momentum": _torch("RMSprop", lr=3e-3, eps=EPS, momentum=0.9, centered=True),
    "Rprop": _torch("Rprop", 0.5, lr=1e-3),
    "ASGD": _torch("ASGD", lr=0.3),
    "Adafactor": _torch("Adafactor", 0.3, lr=1e-2),
    "Adam8bit": _of_8_bits("Adam8bit", _8_BITS, lr=1e-2, eps=EPS),
    "AdamW8bit": _of_8_bits("AdamW8bit", _8_BITS, lr=1e-2, eps=EPS),
    "RMSprop8bit": _of_8_bits("RMSprop8bit", _8_BITS, lr=1e-2, eps=EPS),
    "AdamW32bit": _of_8_bits("AdamW32bit", Tolerance(), lr=1e-2, eps=EPS),
    "Adam by ds_config": _by_configuration("Adam", lr=1e-2, eps=EPS, torch_adam=True, adam_w_mode=False),
    "AdamW by ds_config": _by_configuration("AdamW", lr=1e-2, eps=EPS, torch_adam=True, weight_decay=0.1),
    "SGD by ds_config": _by_configuration("SGD", lr=0.3, momentum=0.5),
    "Adagrad by ds_config": _by_configuration("Adagrad", lr=3e-2, eps=EPS),
    "RAdam by ds_config": _by_configuration("RAdam", lr=1e-2, eps=EPS),
    "Lion by ds_config": _by_configuration("Lion", lr=1e-3),
}
# Of the sign of a gradient alone: in fp64, where it is rounding in no element.
BY_SIGN = ("Rprop",)
# Of a matrix as a whole, of which ZeRO's shards make something else, as rank 0 says at the start.
OF_WHOLE_PARAMETERS = ("Adafactor",)
# Of no state: a parameter without a gradient stays as it is, whether its gradient is None or zero.
STATELESS = ("SGD",)
SCHEDULES = ("", "", "LambdaLR", "OneCycleLR stepped by the script", "callable", "WarmupLR", "WarmupDecayLR")


@dataclass(frozen=True)
class Optimizing:
    """How gradients become steps.

    Args:
        recipe: of `RECIPES`.
        groups: two groups, of which that of vectors has three times the rate and no decay.
        schedule: of `SCHEDULES`.
        clip: the largest norm; 0 for any.
    """

    recipe: str
    groups: bool
    schedule: str
    clip: float

    @property
    def tolerance(self) -> Tolerance:
        """How far it may be off."""
        return RECIPES[self.recipe].tolerance

    @property
    def is_of_configuration(self) -> bool:
        """Whether DeepSpeed makes the optimizer."""
        return RECIPES[self.recipe].module == "deepspeed"

    def describe(self) -> str:
        """For people."""
        parts = [self.recipe, "two groups" if self.groups else "", self.schedule]
        return ", ".join(filter(None, [*parts, f"clipped to {self.clip}" if self.clip else ""]))


IN_FP32 = tuple(name for name in RECIPES if name not in BY_SIGN)


def draw(rng: random.Random, names: Sequence[str] = IN_FP32) -> Optimizing:
    """Any of them."""
    recipe = rng.choices(names, [RECIPES[name].weight for name in names])[0]
    schedule = rng.choice(SCHEDULES)
    if RECIPES[recipe].module == "deepspeed" and schedule not in ("WarmupLR", "WarmupDecayLR"):
        schedule = rng.choice(["", "callable"])
    return Optimizing(
        recipe=recipe,
        groups=rng.random() < 0.35 and RECIPES[recipe].module != "deepspeed",
        schedule=schedule,
        clip=rng.choice([0.0, 0.0, 0.5]),
    )


def stage_for(optimizing: Optimizing, stage: int) -> int:
    """A stage of ZeRO on which an optimizer trains as on one process."""
    return 0 if optimizing.recipe in OF_WHOLE_PARAMETERS else stage


def make(optimizing: Optimizing, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the script; of one that DeepSpeed makes, torch's of the same name."""
    import importlib

    recipe = RECIPES[optimizing.recipe]
    options = dict(recipe.options)
    module, name = recipe.module, recipe.name
    if module == "deepspeed":
        module = "torch.optim"
        options.pop("torch_adam", None)
        options.pop("adam_w_mode", None)
    if name == "Lion":  # which torch does not have
        return _Lion(trained(model), **options)
    kind = getattr(importlib.import_module(module), name)
    made: torch.optim.Optimizer = kind(_groups(optimizing, model, options), **options)
    return made


def configuration(optimizing: Optimizing) -> dict[str, Any]:
    """What ds_config.json says of it."""
    said: dict[str, Any] = {"gradient_clipping": optimizing.clip}
    recipe = RECIPES[optimizing.recipe]
    if recipe.module == "deepspeed":
        said["optimizer"] = {"type": recipe.name, "params": dict(recipe.options)}
    if optimizing.schedule in ("WarmupLR", "WarmupDecayLR"):
        said["scheduler"] = {"type": optimizing.schedule, "params": _warmup(optimizing)}
    return said


def schedule_of_engine(optimizing: Optimizing, optimizer: Any) -> Any:
    """What deepspeed.initialize is given as ``lr_scheduler``."""
    if optimizing.schedule == "LambdaLR":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)
    if optimizing.schedule == "callable":
        return lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, _decay)
    return None


def schedule_of_script(optimizing: Optimizing, optimizer: Any) -> Any:
    """What the script steps itself after every optimizer step."""
    if not optimizing.schedule.endswith("stepped by the script"):
        return None
    rate = dict(RECIPES[optimizing.recipe].options)["lr"]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * rate, total_steps=9, cycle_momentum=False)


def schedule_of_one_process(optimizing: Optimizing, optimizer: torch.optim.Optimizer) -> Any:
    """The same schedule, stepped after every optimizer step."""
    if optimizing.schedule in ("LambdaLR", "callable"):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)
    if optimizing.schedule in ("WarmupLR", "WarmupDecayLR"):
        from deepspeed.runtime import lr_schedules

        return getattr(lr_schedules, optimizing.schedule)(optimizer, **_warmup(optimizing))
    return schedule_of_script(optimizing, optimizer)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def step_alone(optimizer: torch.optim.Optimizer, schedule: Any, model: nn.Module, clip: float) -> float:
    """Clip, step and forget the gradients on one process; return the norm before clipping."""
    norm = float(nn.utils.clip_grad_norm_(trained(model), clip or torch.inf))
    optimizer.step()
    optimizer.zero_grad()
    if schedule is not None:
        schedule.step()
    return norm


def _decay(step: int) -> float:
    return [1.0, 0.5, 0.2, 0.1][min(step, 3)]


def _warmup(optimizing: Optimizing) -> dict[str, Any]:
    rate = dict(RECIPES[optimizing.recipe].options)["lr"]
    ending = {"total_num_steps": 6} if optimizing.schedule == "WarmupDecayLR" else {}
    return {"warmup_min_lr": 0.1 * rate, "warmup_max_lr": rate, "warmup_num_steps": 3, **ending}


def _groups(optimizing: Optimizing, model: nn.Module, options: dict[str, Any]) -> list[Any]:
    if not optimizing.groups:
        return trained(model)
    vectors = [parameter for parameter in trained(model) if parameter.dim() < 2]
    matrices = [parameter for parameter in trained(model) if parameter.dim() >= 2]
    if not vectors or not matrices:
        return trained(model)
    decay = {"weight_decay": 0.0} if "weight_decay" in options else {}
    return [{"params": matrices}, {"params": vectors, "lr": 3 * options["lr"], **decay}]


class _Lion(torch.optim.Optimizer):
    """By its paper (arXiv:2302.06675), algorithm 2."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                parameter -= group["lr"] * moment.lerp(parameter.grad, 1 - first).sign()
                moment.lerp_(parameter.grad, 1 - second)
