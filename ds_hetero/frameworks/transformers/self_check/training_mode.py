"""Detect whether a model computes the same in training as in evaluation when dropout and noise are switched off.

The self-check compares a piece of a batch in evaluation mode, where nothing is random. That misses a layer which acts
in training mode only, such as one that mixes tokens. So the unsharded piece also runs in training mode:

    equal to evaluation                 `InTraining.SAME`     evaluation stands for training
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

# Relative norm of a difference of two unsharded runs that counts as rounding: chosen, never measured. Two runs on a GPU
# differ by rounding, because atomic additions of a backward come in any order.
_RTOL_FP32 = 1e-4
_RTOL_HALF = 2e-2
_Key = TypeVar("_Key")
# Parts of the names of rates that make a forward random: attention_dropout, layerdrop, drop_path_rate, hidden_dropout,
# neftune_noise_alpha, router_jitter_noise.
_RANDOM = ("drop", "noise", "jitter")
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class InTraining(Enum):
    """Relation of an unsharded run in training mode to the one in evaluation mode."""

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


def _are_close(expected: Mapping[_Key, Tensor], seen: Mapping[_Key, Tensor]) -> bool:
    """Return True if two runs recorded the same modules (or parameters) with the same tensors, up to rounding."""
    if expected.keys() != seen.keys():
        return False
    largest = max((_rms(tensor) for tensor in expected.values()), default=0.0)
    return all(_is_close(tensor, seen[key], largest) for key, tensor in expected.items())


def _is_close(expected: Tensor, seen: Tensor, largest: float) -> bool:
    """Return True if a tensor differs by rounding of its own size, or of ``largest``, the largest size of its kind.

    A gradient that is zero in exact arithmetic, such as that of a bias of keys, is rounding alone and differs in every
    run on GPUs. Its own size allows nothing; that of its kind does.
    """
    if expected.shape != seen.shape:
        return False
    rtol = _RTOL_FP32 if expected.element_size() >= 4 else _RTOL_HALF
    allowed = rtol * max(_rms(expected), rtol * largest)
    return _rms(expected.double() - seen.double()) <= allowed or torch.equal(expected, seen)


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


@contextlib.contextmanager
def without_randomness(model: nn.Module) -> Iterator[None]:
    """Set every rate of dropout and noise to zero inside, in modules and in the configurations that they read."""
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
    """Return names and values of a module's or configuration's attributes that make a forward random."""
    rates = []
    for name, value in vars(owner).items():
        is_dropout_rate = isinstance(owner, _DROPOUT) and name == "p"
        has_random_name = any(part in name for part in _RANDOM)
        if _is_number(value) and (is_dropout_rate or has_random_name):
            rates.append((name, value))
    return rates


def _is_number(value: object) -> bool:
    """Return True for floats and integers, as in ``neftune_noise_alpha=5``; bools are switches, not rates."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
