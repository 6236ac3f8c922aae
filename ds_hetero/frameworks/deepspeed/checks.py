"""Checks of the steps of one engine of DeepSpeed's; how they run: `ds_hetero.runtime.step_checks`.

Optimizer groups: every rank updates its part of the parameters by the rates and decays of its own ``param_groups``. In
one process a scheduler or a script changes them once; ranks that hold others would train parts of one model by
different rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.hooks import SplitEngine
from ds_hetero.frameworks.deepspeed.installer import HookedEngine
from ds_hetero.frameworks.deepspeed.zero.used_parameters import used_parameters_of
from ds_hetero.frameworks.deepspeed.zero.user_optimizer import SameNumberOfGroups
from ds_hetero.runtime.step_checks import ClassLoss, StepCheck, TokenWeights, Verdict


def checks_of_model(hooked: SplitEngine) -> list[StepCheck]:
    """Checks of an engine whose model is split over the sequence, or runs whole on every rank; on every rank alike."""
    model, engine = hooked.model, hooked.engine
    checks: list[StepCheck] = [SameGroups(hooked), SameNumberOfGroups(engine), used_parameters_of(engine)]
    if not isinstance(model, WholeModel):
        model.token_weights = TokenWeights(model, engine.gradient_accumulation_steps(), scales=engine.fp16_enabled())
        checks += [model.token_weights, model.pace]
        if name := model.class_with_own_forward:
            model.class_loss = ClassLoss(name)
            checks.append(model.class_loss)
    return checks


class SameGroups:
    """The groups of the optimizer have the same settings on every rank."""

    width = 1

    def __init__(self, hooked: HookedEngine) -> None:
        self._hooked = hooked

    def numbers(self) -> Sequence[float]:
        """A checksum of all settings of all groups."""
        groups: Sequence[Mapping[str, Any]] = getattr(self._hooked.engine.optimizer, "param_groups", ())
        return [float(crc32(repr([_settings(group) for group in groups]).encode()))]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        if len({checksum for (checksum,) in rows}) == 1:
            return None
        return ConfigError(
            "the ranks hold different settings of the optimizer's groups (lr, weight_decay, betas, ...): checksums by "
            f"rank are {[f'{int(checksum):08x}' for (checksum,) in rows]}. Parts of one model would be trained by "
            "different rates. Change settings and step schedulers on every rank alike."
        )


def _settings(group: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Numbers and switches of a group, without its parameters."""
    simple = (int, float, bool, str, tuple, list, type(None))
    return sorted(
        (name, repr(value)) for name, value in group.items() if name != "params" and isinstance(value, simple)
    )
