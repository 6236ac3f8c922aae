"""Parameters with a gradient on any rank in a step: all others are left unchanged, as on one process.

A rank's tokens may use some of the experts in a list, or the head of one task. A gradient that other ranks have is
zeros here, see `zero.reduction_order`; one that no rank has is None in one process, so that its parameter does not
decay and its momentum stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_hetero.common.text import listed
from ds_hetero.frameworks.deepspeed.protocols import Engine
from ds_hetero.frameworks.deepspeed.zero.kept_parts import parts_kept
from ds_hetero.frameworks.deepspeed.zero.reduction_order import ReductionOrder
from ds_hetero.frameworks.deepspeed.zero.stage12 import WeightedZeroOptimizer
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.step_checks import Undecided, Verdict

_ONE_COUNT = (
    "in some steps no rank has a gradient of {}. Values and moments stay then, as on one process; but ZeRO has one "
    "number of steps for all parameters of a group, by which the optimizer corrects moments, where one process has one "
    'for each. With "zero_optimization": {{"stage": 0}} it is exact.'
)
_REMEMBERED = 256  # combinations of ranks' missing parameters, of which the union is remembered


class UsedParameters:
    """A check of steps (`ds_hetero.runtime.step_checks.StepCheck`): which parameters no rank has used.

    Args:
        names: of all trained parameters of the job, the same on every rank.
        read: called once in a step; the names of parameters that this rank holds, and of those that had a gradient.
        leave: called in every step with the names of parameters that no rank has used; returns whether their steps
            are counted together with those of others.
        order: of the reductions, which learns of parameters that some rank lacked.

    Collectives: where the ranks lack different parameters, the first time that they do, an all_reduce of a byte for
    each parameter; see `ReductionOrder.note_rare`.
    """

    width = 2

    def __init__(
        self,
        names: Sequence[str],
        read: Callable[[], tuple[Sequence[str], Set[str]]],
        leave: Callable[[Set[str]], bool],
        order: ReductionOrder | None = None,
    ) -> None:
        self._names, self._read, self._leave, self._order = list(names), read, leave, order
        self._used: Set[str] = frozenset()  # by this rank, in the step that ended
        self._unused_of: dict[tuple[float, ...], frozenset[str]] = {}  # by the checksums of all ranks
        self._ever_used: set[str] = set()

    def numbers(self) -> Sequence[float]:
        """Return a checksum of the parameters without a gradient on this rank, 0 for none; and whether some are new."""
        held, self._used = self._read()
        missing = [name for name in held if name not in self._used]
        lacks = self._order is not None and self._order.lacks
        return [float(crc32("\n".join(missing).encode()) + 1 if missing else 0), float(lacks)]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`: None, or what is not quite as on one process."""
        if self._order is not None and any(lacks for _, lacks in rows):
            self._order.note_rare()
        unused = self._unused(tuple(checksum for checksum, _ in rows))
        counted = self._leave(unused)
        self._ever_used |= set(self._names) - unused
        again = sorted(unused & self._ever_used)
        return Undecided(_ONE_COUNT.format(listed(again, most=3))) if again and counted else None

    def _unused(self, checksums: tuple[float, ...]) -> frozenset[str]:
        """Return parameters without a gradient on every rank that holds them."""
        if not any(checksums):
            return frozenset()
        if checksums not in self._unused_of:
            if len(self._unused_of) == _REMEMBERED:
                self._unused_of.clear()
            used = [name in self._used for name in self._names]
            bits = torch.tensor(used, dtype=torch.uint8, device=message_device())
            dist.all_reduce(bits, dist.ReduceOp.MAX)
            by_any = zip(self._names, bits.tolist(), strict=True)
            self._unused_of[checksums] = frozenset(name for name, is_used in by_any if not is_used)
        return self._unused_of[checksums]


class _Recorded:
    """Names of parameters whose gradients this rank has made since the last `read`."""

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._held, self._used = list(trained), set[str]()
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]

    def _note(self, name: str, parameter: nn.Parameter) -> None:
        self._used.add(name)

    def read(self) -> tuple[Sequence[str], Set[str]]:
        """See `UsedParameters`."""
        used, self._used = self._used, set()
        return self._held, used


def used_parameters_of(engine: Engine) -> UsedParameters:
    """Return the check of an engine whose model is whole on every rank, or partitioned by ZeRO-3."""
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    optimizer = engine.optimizer
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        leave: Callable[[Set[str]], bool] = _FlatParts(optimizer, trained).leave
    else:
        # Optimizers over flat copies of 16-bit parameters have no part for each; DeepSpeed's own zeros stay.
        leave = partial(_drop_gradients, trained if engine.zero_optimization_stage() == 0 else {})
    return UsedParameters(list(trained), _Recorded(trained).read, leave, getattr(optimizer, "reduction_order", None))


def _drop_gradients(trained: Mapping[str, nn.Parameter], unused: Set[str]) -> bool:
    """Drop the zeros that DeepSpeed has made for gradients of no rank; an optimizer of torch's passes them over."""
    for name in unused & trained.keys():
        trained[name].grad = None
    return False


class _FlatParts:
    """The parts of ZeRO's flat vectors that a step leaves alone, on this rank."""

    def __init__(self, optimizer: Any, trained: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self._trained = optimizer, trained
        self._parts: dict[int, list[slice]] = {}  # by group of flat vectors
        optimizer._optimizer_step = partial(self._step, optimizer._optimizer_step)

    def leave(self, unused: Set[str]) -> bool:
        """Leave parameters alone in the next step; return whether the optimizer counts steps of whole groups."""
        self._parts = {}
        for group, part in self._places(unused) if unused else ():
            self._parts.setdefault(group, []).append(part)
        return bool(unused) and any("step" in state for state in self._optimizer.optimizer.state.values())

    def _places(self, unused: Set[str]) -> Iterator[tuple[int, slice]]:
        """Flat vectors and parts of them where parameters lie on this rank."""
        optimizer = self._optimizer
        parameters = [self._trained[name] for name in unused]
        if isinstance(optimizer, WeightedZeroOptimizer):
            wanted = {id(parameter) for parameter in parameters}
            for group in range(len(optimizer.bit16_groups)):
                for parameter, at in optimizer.fragments(group, optimizer.rank_in(group)):
                    if id(parameter) in wanted:
                        yield group, slice(at.in_part, at.in_part + at.count)
        elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            for parameter in parameters:
                group, start, count = optimizer.grad_position[optimizer.get_param_id(parameter)]
                if not optimizer._swappable_optimizer_subgroup(group):  # else they are not in memory
                    yield group, slice(start, start + count)

    def _step(self, step: Callable[[int], None], group: int) -> None:
        """Replace ``_optimizer_step`` of a group."""
        optimizer = self._optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            flat = optimizer.fp32_partitioned_groups_flat[group]
        else:
            flat = optimizer.single_partition_of_fp32_groups[group]
        inners = [
            optimizer.optimizer,
            getattr(optimizer, "backup_optimizer", None),
        ]  # the latter of what is not offloaded
        inner = next((each for each in inners if each is not None and flat in each.state), optimizer.optimizer)
        with parts_kept(inner, flat, self._parts.get(group, [])):
            step(group)
