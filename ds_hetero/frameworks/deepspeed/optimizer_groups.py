"""Check in every step that the optimizer's groups have the same settings on all ranks, and those of the script.

Every rank updates its part of the parameters with the learning rates and decays of its own ``param_groups``. If these
differ between ranks, parts of one model are trained at different rates.

DeepSpeed may step an optimizer that it has made itself, while the script and its scheduler change the groups of the
script's optimizer. Then such changes have no effect, which is an error, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.hooked_engine import HookedEngine
from ds_hetero.runtime.step_checks import Verdict

# Settings that a script gives to an optimizer or changes in its groups, by torch's names for them.
_COMPARED = ("lr", "weight_decay", "betas", "momentum", "eps", "lr_decay", "alpha", "dampening", "nesterov")

Groups = Sequence[Mapping[str, Any]]


class _Settings(NamedTuple):
    """The numbers that each rank sends to the others in every step, see `SameGroups.numbers`."""

    checksum: float  # of all settings of all groups, and of the norm to which gradients are clipped
    # Position in `_COMPARED`, counted from 1, of a setting that the script changed without effect; 0 if there is none.
    ignored: float


class SameGroups:
    """A check of steps, see `ds_hetero.runtime.step_checks.protocol.StepCheck`, of an engine's parameter groups."""

    width = len(_Settings._fields)

    def __init__(self, hooked: HookedEngine) -> None:
        self._hooked = hooked
        self._script_settings: list[dict[str, Any]] = []  # of the script's groups, at the step before

    def numbers(self) -> Sequence[float]:
        """Return a checksum of this rank's settings, and the setting that the script changed in vain (`_Settings`)."""
        optimizer = self._hooked.engine.optimizer
        groups: Groups = getattr(optimizer, "param_groups", ())
        clip = getattr(optimizer, "clip_grad", None), self._hooked.engine.gradient_clipping()
        checksum = crc32(repr(([_setting_texts(group) for group in groups], clip)).encode())
        return _Settings(float(checksum), float(self._find_ignored(groups)))

    def _find_ignored(self, groups: Groups) -> int:
        """Find a setting that the script has changed in its own optimizer only; return `_Settings.ignored`.

        A change in ``groups`` alone is correct: the script has changed the optimizer that DeepSpeed steps.

        Args:
            groups: the groups that DeepSpeed steps on.
        """
        before = self._script_settings
        self._script_settings = [_compared_settings(group) for group in _find_script_groups(self._hooked.engine)]
        if len(self._script_settings) != len(groups):  # DeepSpeed has split them by kinds of parameters, as for experts
            return 0
        for number, settings in enumerate(self._script_settings):
            used = _compared_settings(groups[number])
            former = before[number] if number < len(before) else {}
            for name, value in settings.items():
                is_changed = name not in former or former[name] != value
                if is_changed and name in used and used[name] != value:
                    return 1 + _COMPARED.index(name)
        return 0

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`: an error if settings are ignored or differ."""
        settings_by_rank = [_Settings(*row) for row in rows]
        ignored: dict[int, str] = {}  # names of ignored settings, by rank
        for rank, settings in enumerate(settings_by_rank):
            if settings.ignored:
                ignored[rank] = _COMPARED[int(settings.ignored) - 1]
        if ignored:
            return ConfigError(
                f"the script's optimizer has another {', '.join(sorted(set(ignored.values())))} than the optimizer "
                f"that DeepSpeed steps (ranks {list(ignored)}). DeepSpeed has made an optimizer itself, which does not "
                "follow the script's groups or its scheduler. Change engine.optimizer.param_groups instead, and make "
                "the scheduler for engine.optimizer."
            )
        checksums = [f"{int(settings.checksum):08x}" for settings in settings_by_rank]
        if len(set(checksums)) == 1:
            return None
        return ConfigError(
            "the settings of the optimizer's groups (lr, weight_decay, betas, ...) or of clipping differ between ranks "
            f"(checksums by rank are {checksums}). Parts of one model would be trained at different rates. Change "
            "settings and step schedulers in the same way on every rank."
        )


def _setting_texts(group: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values of a group's settings, as texts: everything but parameters and tensors."""
    simple = (int, float, bool, str, tuple, list, type(None))
    return sorted(
        (name, repr(value)) for name, value in group.items() if name != "params" and isinstance(value, simple)
    )


def _find_script_groups(engine: Any) -> Groups:
    """Return the groups of the script's scheduler or optimizer, unless DeepSpeed steps on these groups themselves."""
    used_groups = getattr(engine.optimizer, "param_groups", ())
    scheduler = getattr(engine, "client_lr_scheduler", None)
    for optimizer in (getattr(scheduler, "optimizer", None), getattr(engine, "client_optimizer", None)):
        groups = getattr(optimizer, "param_groups", ())
        if groups and not any(group is used for group in groups for used in used_groups):
            return list(groups)
    return ()


def _compared_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings of `_COMPARED`, without tensors, which may be on a device."""
    simple = (int, float, bool, tuple, list)
    return {
        name: tuple(group[name]) if isinstance(group[name], list) else group[name]
        for name in _COMPARED
        if isinstance(group.get(name), simple)
    }
