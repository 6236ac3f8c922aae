"""Whether a model computes in training what it computes in evaluation, once its dropout and noise are switched off.

The piece is compared in evaluation, where nothing is random. A layer that does something in training alone, such as
mixing tokens, would never be seen there. So the piece runs whole in both modes, and where the runs differ, it is
compared in training mode as well, unless two whole runs in training differ from each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ds_hetero.frameworks.transformers.self_check.recorded_run import RecordedRun

# Relative norm of the difference of two whole runs that is taken for rounding: chosen, never measured. In a backward,
# GPUs add in any order.
_RTOL, _RTOL_HALF = 1e-4, 2e-2
# Parts of the names of rates that make a forward random: attention_dropout, layerdrop, drop_path_rate, hidden_dropout,
# neftune_noise_alpha, router_jitter_noise.
_RANDOM = ("drop", "noise", "jitter")
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class InTraining(Enum):
    """What a whole run in training is, beside one in evaluation."""

    SAME = "the same"
    OTHER = "another one, and always the same"
    RANDOM = "another one every time"
    FAILS = "an error"


def is_same_run(one: RecordedRun | None, other: RecordedRun) -> bool:
    """Whether two whole runs of a piece made the same, up to rounding. ``one``: None is another one."""
    if one is None:
        return False
    for expected, seen in (
        (one.outputs, other.outputs),
        (one.gradients, other.gradients),
        (one.projections, other.projections),
    ):
        if expected.keys() != seen.keys():
            return False
        largest = max((_rms(tensor) for tensor in expected.values()), default=0.0)
        if not all(_is_close(tensor, seen[place], largest) for place, tensor in expected.items()):  # type: ignore[index]
            return False
    return True


def _is_close(one: Tensor, other: Tensor, largest: float) -> bool:
    """Whether two tensors differ by rounding, of their own numbers or of the largest ones of their kind.

    What is zero but for rounding, as the gradient at a bias of keys, is another number in every run on GPUs.
    """
    if one.shape != other.shape:
        return False
    rtol = _RTOL if one.element_size() >= 4 else _RTOL_HALF
    allowed = rtol * max(_rms(one), rtol * largest)
    return _rms(one.double() - other.double()) <= allowed or torch.equal(one, other)


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


@contextlib.contextmanager
def without_randomness(model: nn.Module) -> Iterator[None]:
    """Let every rate of dropout, and of noise, be zero inside: those of modules, and of configurations they read."""
    objects: dict[int, Any] = {}
    for module in model.modules():
        objects[id(module)] = module
        for config in _configs_of(module):
            objects[id(config)] = config
    rates = [(owner, name, rate) for owner in objects.values() for name, rate in _rates_of(owner)]
    try:
        for owner, name, _ in rates:
            owner.__dict__[name] = 0.0
        yield
    finally:
        for owner, name, rate in rates:
            owner.__dict__[name] = rate


def _configs_of(module: nn.Module) -> Iterator[Any]:
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "__dict__"):
        return
    yield config
    yield from (inner for inner in vars(config).values() if hasattr(inner, "to_dict"))  # of text, of images


def _rates_of(owner: Any) -> list[tuple[str, int | float]]:
    is_dropout = isinstance(owner, _DROPOUT)
    return [
        (name, value)
        for name, value in vars(owner).items()
        if _is_number(value) and ((is_dropout and name == "p") or any(part in name for part in _RANDOM))
    ]


def _is_number(value: object) -> bool:
    """A rate may be a whole number: ``neftune_noise_alpha=5``."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
