"""Detect whether a model without dropout and noise computes the same in training mode as in evaluation mode.

The self-check compares the runs of a piece in evaluation mode, in which nothing is random. That misses a layer that
acts in training mode only, such as one that mixes tokens then. So the unsharded piece also runs in training mode:

    the same as in evaluation           `InTraining.SAME`     nothing more to compare
    differs, and repeats exactly        `InTraining.OTHER`    compare whole and sharded runs in training mode, too
    differs, and differs every time     `InTraining.RANDOM`   cannot be compared: warn
    raises                              `InTraining.FAILS`    cannot be compared: warn
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ds_hetero.frameworks.transformers.self_check.recorded_run import RecordedRun

# Relative norm up to which two unsharded runs count as equal: chosen, never measured. Two runs on a GPU differ by
# rounding, because atomic additions of a backward happen in any order.
_RTOL_FP32 = 1e-4
_RTOL_HALF = 2e-2
_Key = TypeVar("_Key")
# Parts of the names of rates that make a forward random: attention_dropout, layerdrop, drop_path_rate, hidden_dropout,
# neftune_noise_alpha, router_jitter_noise.
_RATE_NAMES = ("drop", "noise", "jitter")
_DROPOUT_CLASSES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class InTraining(Enum):
    """How the result of an unsharded run in training mode compares with the result in evaluation mode."""

    SAME = "the same"
    OTHER = "another one, and always the same"
    RANDOM = "another one every time"
    FAILS = "an error"


def is_same_run(reference: RecordedRun | None, run: RecordedRun) -> bool:
    """Return True if two unsharded runs of a piece agree up to rounding. A ``reference`` of None agrees with none."""
    if reference is None:
        return False
    return (
        _are_close(reference.outputs, run.outputs)
        and _are_close(reference.gradients, run.gradients)
        and _are_close(reference.projections, run.projections)
    )


def _are_close(expected: Mapping[_Key, Tensor], actual: Mapping[_Key, Tensor]) -> bool:
    """Return True if two runs recorded the same modules (or parameters) with the same tensors, up to rounding."""
    if expected.keys() != actual.keys():
        return False
    largest = max((_rms(tensor) for tensor in expected.values()), default=0.0)
    return all(_is_close(tensor, actual[key], largest) for key, tensor in expected.items())


def _is_close(expected: Tensor, actual: Tensor, largest: float) -> bool:
    """Return True if a tensor of two runs differs only by rounding.

    The allowed difference is relative to the size of the tensor, or to ``rtol * largest`` if that is more. A gradient
    that is zero in exact arithmetic, such as that of a bias of keys, is nothing but rounding, and differs in every run
    on GPUs; its own size would allow no difference.

    Args:
        largest: the largest size (root mean square) among the tensors of the same kind.
    """
    if expected.shape != actual.shape:
        return False
    rtol = _RTOL_FP32 if expected.element_size() >= 4 else _RTOL_HALF
    allowed = rtol * max(_rms(expected), rtol * largest)
    return _rms(expected.double() - actual.double()) <= allowed or torch.equal(expected, actual)


def _rms(tensor: Tensor) -> float:
    """Return the root mean square of all elements; 0 if there are none."""
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


@contextlib.contextmanager
def without_randomness(model: nn.Module) -> Iterator[None]:
    """Inside the context, set every rate of dropout and noise to zero, in modules and in their configurations."""
    owners: dict[int, Any] = {}  # by id: many modules share one configuration
    for module in model.modules():
        owners[id(module)] = module
        for config in _configs_of(module):
            owners[id(config)] = config
    rates: list[tuple[Any, str, int | float]] = []
    for owner in owners.values():
        rates.extend((owner, name, rate) for name, rate in _rates_of(owner))
    try:
        for owner, name, _ in rates:
            owner.__dict__[name] = 0.0
        yield
    finally:
        for owner, name, rate in rates:
            owner.__dict__[name] = rate


def _configs_of(module: nn.Module) -> Iterator[Any]:
    """Yield a module's configuration and those inside it, such as text_config and vision_config."""
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "__dict__"):
        return
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield value


def _rates_of(owner: Any) -> list[tuple[str, int | float]]:
    """Return (name, value) of the attributes of a module or configuration that make a forward random."""
    rates = []
    for name, value in vars(owner).items():
        is_dropout_rate = isinstance(owner, _DROPOUT_CLASSES) and name == "p"
        has_rate_name = any(part in name for part in _RATE_NAMES)
        if _is_number(value) and (is_dropout_rate or has_rate_name):
            rates.append((name, value))
    return rates


def _is_number(value: object) -> bool:
    """Return True for a float or integer, as in ``neftune_noise_alpha=5``; False for a bool, which is no rate."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
