"""Check of the optimizer's groups: settings equal on all ranks, and those that the script gave.

Every rank updates its part of the parameters by the rates and decays of its own ``param_groups``. In one process a
scheduler or a script changes them once; ranks that hold others would train parts of one model by different rates. Where
DeepSpeed steps an optimizer that it has made itself, the groups of the script's, which its scheduler changes, have to
hold there too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.installer import HookedEngine
from ds_hetero.runtime.step_checks import Verdict

# Settings that a script gives to an optimizer or changes in its groups, by torch's names for them.
_COMPARED = ("lr", "weight_decay", "betas", "momentum", "eps", "lr_decay", "alpha", "dampening", "nesterov")

Groups = Sequence[Mapping[str, Any]]


class _Settings(NamedTuple):
    """Numbers of one rank about one step."""

    checksum: float  # of all settings of all groups, and of the norm to which gradients are clipped
    lost: float  # which of `_COMPARED`, from 1, the script's optimizer was given and the steps do not follow; or 0


class SameGroups:
    """`ds_hetero.runtime.step_checks.protocol.StepCheck` of the groups of one engine's optimizer."""

    width = len(_Settings._fields)

    def __init__(self, hooked: HookedEngine) -> None:
        self._hooked = hooked
        self._of_script: list[dict[str, Any]] = []  # compared settings of the script's groups, at the step before

    def numbers(self) -> Sequence[float]:
        """See `StepCheck`."""
        optimizer = self._hooked.engine.optimizer
        groups: Groups = getattr(optimizer, "param_groups", ())
        clip = getattr(optimizer, "clip_grad", None), self._hooked.engine.gradient_clipping()
        checksum = crc32(repr(([_settings(group) for group in groups], clip)).encode())
        return _Settings(float(checksum), float(self._lost(groups)))

    def _lost(self, groups: Groups) -> int:
        """See `_Settings.lost`.

        What is changed in the groups that are stepped on, and not in the script's, is the script's own affair.
        """
        before = self._of_script
        self._of_script = [_compared(group) for group in _groups_of_script(self._hooked.engine)]
        if len(self._of_script) != len(groups):  # split by kinds of parameters, as for experts
            return 0
        for number, of_script in enumerate(self._of_script):
            stepped, former = _compared(groups[number]), before[number] if number < len(before) else {}
            for name, value in of_script.items():
                is_new = name not in former or former[name] != value
                if is_new and name in stepped and stepped[name] != value:
                    return 1 + _COMPARED.index(name)
        return 0

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        settings = [_Settings(*row) for row in rows]
        lost = {rank: _COMPARED[int(of_rank.lost) - 1] for rank, of_rank in enumerate(settings) if of_rank.lost}
        if lost:
            return ConfigError(
                f"the script's optimizer was given another {', '.join(sorted(set(lost.values())))} than that by which "
                f"DeepSpeed steps (ranks {list(lost)}): DeepSpeed holds another optimizer, which does not follow the "
                "script's groups or its scheduler. Change engine.optimizer.param_groups, and make the scheduler of "
                "engine.optimizer."
            )
        if len({of_rank.checksum for of_rank in settings}) == 1:
            return None
        return ConfigError(
            "the ranks hold different settings of the optimizer's groups (lr, weight_decay, betas, ...) or of clipping "
            f"(checksums by rank are {[f'{int(of_rank.checksum):08x}' for of_rank in settings]}). Parts of one model "
            "would be trained by different rates. Change settings and step schedulers on every rank alike."
        )


def _settings(group: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Numbers and switches of a group, without its parameters."""
    simple = (int, float, bool, str, tuple, list, type(None))
    return sorted(
        (name, repr(value)) for name, value in group.items() if name != "params" and isinstance(value, simple)
    )


def _groups_of_script(engine: Any) -> Groups:
    """Groups of the optimizer of the script's scheduler, or of its own; none where they are those stepped on."""
    stepped = getattr(engine.optimizer, "param_groups", ())
    scheduler = getattr(engine, "client_lr_scheduler", None)
    for optimizer in (getattr(scheduler, "optimizer", None), getattr(engine, "client_optimizer", None)):
        groups = getattr(optimizer, "param_groups", ())
        if groups and all(all(group is not other for other in stepped) for group in groups):
            return list(groups)
    return ()


def _compared(group: Mapping[str, Any]) -> dict[str, Any]:
    """Settings to compare, without those that are tensors, which may be on a device."""
    simple = (int, float, bool, tuple, list)
    return {
        name: tuple(group[name]) if isinstance(group[name], list) else group[name]
        for name in _COMPARED
        if isinstance(group.get(name), simple)
    }
