"""What a job came to, and whether ranks came to the same as one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import nn

# Relative to the change of a parameter, a norm or a loss. Sums of fp32 in another order differ by some 1e-6 of a
# gradient after a step; four steps and a small denominator of an Adam-like optimizer make that some 1e-5.
RTOL_FP32 = 1e-4
# The same of fp64, in which pipelines are compared.
RTOL_FP64 = 1e-9
# States of 8 bits are rounded by blocks of 256 elements. ZeRO lays its blocks over flat partitions and not over
# parameters, so that they are rounded by other scales: an element of a moment by up to 1/127 of its block's largest.
RTOL_8BIT = 0.2
# A parameter that hardly changes is compared with the parameter that changes most.
FLOOR = 1e-3
_LEAST = 1e-30  # below any change of fp32 that is no rounding
# Of a parameter's own value: four steps, each rounded to half of a last bit.
ROUNDING_FP32, ROUNDING_FP64 = 4 * 2.0**-24, 4 * 2.0**-53


@dataclass(frozen=True)
class Tolerance:
    """How far a job may be off.

    Args:
        relative: to a parameter's change.
        series: to a loss, a norm, or another number of a step.
        ignored: share of a parameter's elements that is not compared: where an optimizer steps by the sign of the
            gradient, the rounding of a gradient near zero is a step of full size.
        rounding: of a parameter's own value.
    """

    relative: float = RTOL_FP32
    series: float = RTOL_FP32
    ignored: float = 0.0
    rounding: float = ROUNDING_FP32


@dataclass(frozen=True)
class Trained:
    """What one process, or one rank, came to.

    Args:
        losses: of every micro-batch, each with its weight in the mean over the ranks; empty where not compared.
        norms: of the gradient at every optimizer step; empty where nobody keeps them.
        parameters: after the last step, whole.
        start: before the first.
        numbers: whatever else must be the same, by name.
    """

    losses: Sequence[tuple[float, float]]
    norms: Sequence[float]
    parameters: Mapping[str, np.ndarray]
    start: Mapping[str, np.ndarray] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Args:
        kind: "bare" is an error without a name, or on some ranks alone; "no reference" a fault of the tester.
        why: what was said, or by how much it is off.
    """

    kind: Literal["exact", "refused", "wrong", "hang", "bare", "no reference"]
    why: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the job was neither exact nor refused by name."""
        return self.kind not in ("exact", "refused")


def snapshot(model: nn.Module) -> dict[str, np.ndarray]:
    """Trained parameters of a module that holds them whole."""
    return {
        name: parameter.detach().cpu().numpy().copy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def whole_parameters(model: nn.Module, stage: int) -> dict[str, np.ndarray]:
    """Trained parameters, gathered where ZeRO partitions them."""
    from deepspeed.utils import safe_get_full_fp32_param

    if not stage:
        return snapshot(model)
    return {
        name: safe_get_full_fp32_param(parameter).detach().cpu().numpy().copy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def compared(ranks: Sequence[Trained], expected: Trained, tolerance: Tolerance) -> Outcome:
    """Exact, or wrong with what is furthest off."""
    errors = [(error / tolerance.series, error, name) for error, name in _errors_of_steps(ranks, expected)]
    of_parameters = _errors_of_parameters(ranks, expected, tolerance)
    errors += [(error / tolerance.relative, error, name) for error, name in of_parameters]
    worst, error, name = max(errors, key=lambda triple: triple[0] if triple[0] == triple[0] else np.inf)
    if worst <= 1:
        return Outcome("exact")
    others = sorted({name for share, _, name in errors if not share <= 1})
    shown = ", ".join(others[:6]) + (f" and {len(others) - 6} more" if len(others) > 6 else "")
    return Outcome("wrong", f"{name} is off by {error:.1e}; off are {shown}")


def _errors_of_steps(ranks: Sequence[Trained], expected: Trained) -> Any:
    """Pairs of error and name: losses, norms and other numbers."""
    yield from _errors_of_losses(ranks, expected)
    for rank, trained in enumerate(ranks):
        yield from _errors_of_numbers(rank, trained, expected)
        if trained.norms and expected.norms:
            yield from _errors_of_series(f"norm on rank {rank}", trained.norms, expected.norms)


def _errors_of_parameters(ranks: Sequence[Trained], expected: Trained, tolerance: Tolerance) -> Any:
    """Pairs of error and name, relative to the change."""
    changes = {name: np.linalg.norm(value - expected.start[name]) for name, value in expected.parameters.items()}
    largest = float(max(changes.values()))
    for trained in ranks:
        for name, value in trained.parameters.items():
            if name not in expected.parameters:
                yield np.inf, f"{name}, which one process does not train,"
                continue
            rounding = tolerance.rounding * float(np.linalg.norm(expected.parameters[name])) / tolerance.relative
            off = _norm_without_largest(value - expected.parameters[name], tolerance.ignored)
            scale = float(changes[name]) + FLOOR * largest + rounding
            yield off / max(scale, _LEAST), name  # of zeros that no step has changed the scale is zero


def _errors_of_losses(ranks: Sequence[Trained], expected: Trained) -> Any:
    """By micro-batch, the weighted mean over the ranks."""
    if not expected.losses or not ranks[0].losses:
        return
    if any(len(trained.losses) != len(expected.losses) for trained in ranks):
        yield np.inf, f"number of losses ({[len(trained.losses) for trained in ranks]}, {len(expected.losses)})"
        return
    for step, (loss, _) in enumerate(expected.losses):
        pairs = [trained.losses[step] for trained in ranks]
        weight = sum(weight for _, weight in pairs)
        mean = sum(value * weight for value, weight in pairs if weight) / weight if weight else 0.0
        yield abs(mean - loss) / abs(loss), f"loss {step}"


def _errors_of_numbers(rank: int, trained: Trained, expected: Trained) -> Any:
    for name, values in expected.numbers.items():
        yield from _errors_of_series(f"{name} on rank {rank}", trained.numbers[name], values)


def _errors_of_series(name: str, ours: Sequence[float], expected: Sequence[float]) -> Any:
    if len(ours) != len(expected):
        yield np.inf, f"length of {name} ({len(ours)}, {len(expected)})"
        return
    for step, (a, b) in enumerate(zip(ours, expected, strict=True)):
        yield abs(a - b) / max(abs(b), 1e-12), f"{name}, {step}, {a:.6g}/{b:.6g}"


def _norm_without_largest(off: np.ndarray, ignored: float) -> float:
    """Norm of all elements but a share of the largest."""
    number = int(np.ceil(ignored * off.size)) if ignored else 0
    flat = np.sort(np.abs(off.ravel()))
    return float(np.linalg.norm(flat[: flat.size - number]))
