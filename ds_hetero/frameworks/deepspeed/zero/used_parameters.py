"""Leave parameters unchanged in a step in which no rank has a gradient of them, as one process does.

The tokens of a rank may use only some experts, or the head of one task. In one process an unused parameter has no
gradient, so the optimizer skips it: no weight decay, no momentum. Under ZeRO its gradient is zeros, and the optimizer
would change it.

Example with experts a, b and c, in one step:

    rank 0 uses a                missing on rank 0: b, c
    rank 1 uses a and b          missing on rank 1: c
    b: rank 0 reduces zeros for it (see `reduction_order`), so the optimizer steps b by rank 1's gradient
    c: no rank uses it, so the step leaves c and its optimizer state unchanged

A rank does not send its list of missing parameters in every step, but a checksum of it. Only for a combination of
checksums that is new do the ranks send a byte for each parameter.
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
from ds_hetero.frameworks.deepspeed.zero.kept_parts import keep_parts
from ds_hetero.frameworks.deepspeed.zero.reduction_order import ReductionOrder
from ds_hetero.frameworks.deepspeed.zero.stage12 import WeightedZeroOptimizer
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.step_checks import Undecided, Verdict

_SHARED_STEP_COUNT = (
    "in some steps no rank has a gradient of {}. Their values and moments stay unchanged in such a step, as on one "
    "process. But one process does not count these steps for them, while ZeRO counts steps for a whole group, so that "
    'the optimizer\'s bias correction differs. With "zero_optimization": {{"stage": 0}} training is exact.'
)
_MAX_REMEMBERED_UNIONS = 256  # combinations of checksums whose unused parameters are remembered


class UsedParameters:
    """A check of steps (`ds_hetero.runtime.step_checks.StepCheck`) that finds the parameters that no rank has used.

    Args:
        names: names of all trained parameters of the job, the same on every rank.
        read: called once in a step; returns the names of parameters that this rank holds, and of those that had a
            gradient in the step.
        skip_in_next_step: called in every step with the names of parameters that no rank has used, which the step must
            leave unchanged; returns whether the optimizer has one count of steps for them and others.
        order: the optimizer's order of reductions, which learns here which parameters are rare; None if it has none.

    Collectives: for each new combination of the ranks' missing parameters, an all_reduce of a byte for each parameter;
    and those of `ReductionOrder.note_rare`.
    """

    width = 2

    def __init__(
        self,
        names: Sequence[str],
        read: Callable[[], tuple[Sequence[str], Set[str]]],
        skip_in_next_step: Callable[[Set[str]], bool],
        order: ReductionOrder | None = None,
    ) -> None:
        self._names, self._read, self._order = list(names), read, order
        self._skip_in_next_step = skip_in_next_step
        self._used: Set[str] = frozenset()  # on this rank, in the step that ends
        self._unused_by_checksums: dict[tuple[float, ...], frozenset[str]] = {}  # keys: the checksums of all ranks
        self._ever_used: set[str] = set()

    def numbers(self) -> Sequence[float]:
        """Return two numbers of this rank's step.

        The first is a checksum of the names of parameters without a gradient on this rank; 0 if every parameter has a
        gradient. The second is 1 if `ReductionOrder` does not yet count all of these parameters as rare, else 0.
        """
        names, self._used = self._read()
        missing = [name for name in names if name not in self._used]
        checksum = crc32("\n".join(missing).encode()) + 1 if missing else 0
        has_new_rare = self._order is not None and self._order.has_new_rare
        return [float(checksum), float(has_new_rare)]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`: `Undecided` if skipped parameters share their count of steps with others."""
        if self._order is not None and any(has_new_rare for _, has_new_rare in rows):
            self._order.note_rare()
        unused = self._unused(tuple(checksum for checksum, _ in rows))
        shares_step_count = self._skip_in_next_step(unused)
        self._ever_used |= set(self._names) - unused
        # A parameter that no step has used so far has no moments to correct.
        skipped = sorted(unused & self._ever_used)
        return (
            Undecided(_SHARED_STEP_COUNT.format(listed(skipped, max_names=3)))
            if skipped and shares_step_count
            else None
        )

    def _unused(self, checksums: tuple[float, ...]) -> frozenset[str]:
        """Return the names of the parameters of which no rank has a gradient in this step.

        Args:
            checksums: of the missing parameters of every rank, see `numbers`.
        """
        if not any(checksums):
            return frozenset()
        if checksums not in self._unused_by_checksums:
            if len(self._unused_by_checksums) == _MAX_REMEMBERED_UNIONS:
                self._unused_by_checksums.clear()
            is_used_here = [name in self._used for name in self._names]
            bits = torch.tensor(is_used_here, dtype=torch.uint8, device=message_device())
            dist.all_reduce(bits, dist.ReduceOp.MAX)
            is_used_anywhere = zip(self._names, bits.tolist(), strict=True)
            self._unused_by_checksums[checksums] = frozenset(name for name, is_used in is_used_anywhere if not is_used)
        return self._unused_by_checksums[checksums]


class _GradientRecorder:
    """Records the names of parameters whose gradients this rank makes."""

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._names, self._used = list(trained), set[str]()
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]

    def _note(self, name: str, parameter: nn.Parameter) -> None:
        self._used.add(name)

    def read(self) -> tuple[Sequence[str], Set[str]]:
        """Return the names of all parameters, and of the parameters that had a gradient since the last call."""
        used, self._used = self._used, set()
        return self._names, used


def used_parameters_of(engine: Engine) -> UsedParameters:
    """Return the check of unused parameters for an engine without pipelines, of ZeRO stage 0 to 3."""
    # Experts that are divided among ranks are another optimizer's, which finds unused ones by itself.
    named = engine.module.named_parameters()
    trained = {name: p for name, p in named if p.requires_grad and getattr(p, "allreduce", True)}
    optimizer = engine.optimizer
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        skip: Callable[[Set[str]], bool] = _SkippedParts(optimizer, trained).skip_in_next_step
    else:
        # DeepSpeed's optimizers over flat copies of 16-bit parameters keep no part for each parameter, so nothing can
        # be skipped there: DeepSpeed's zeros stay.
        skip = partial(_drop_gradients, trained if engine.zero_optimization_stage() == 0 else {})
    order = getattr(optimizer, "reduction_order", None)
    return UsedParameters(list(trained), _GradientRecorder(trained).read, skip, order)


def _drop_gradients(trained: Mapping[str, nn.Parameter], unused: Set[str]) -> bool:
    """Set gradients of unused parameters to None instead of DeepSpeed's zeros, so that torch's optimizers skip them.

    Returns:
        False: torch's optimizers count the steps of each parameter by itself.
    """
    for name in unused & trained.keys():
        trained[name].grad = None
    return False


class _SkippedParts:
    """The parts of ZeRO's flat vectors on this rank that the next step leaves unchanged.

    Args:
        optimizer: DeepSpeed's optimizer of ZeRO stage 1, 2 or 3, whose ``_optimizer_step`` is replaced.
        trained: trained parameters of the model, by name.
    """

    def __init__(self, optimizer: Any, trained: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self._trained = optimizer, trained
        self._parts: dict[int, list[slice]] = {}  # by group, of which each has one flat vector
        optimizer._optimizer_step = partial(self._step, optimizer._optimizer_step)

    def skip_in_next_step(self, unused: Set[str]) -> bool:
        """Leave the named parameters unchanged in the next step.

        Returns:
            True if there are such parameters, and the optimizer counts steps. It then has one count for a whole flat
            vector, and so for skipped and other parameters together.
        """
        self._parts = {}
        if not unused:
            return False
        for group, part in self._find_parts(unused):
            self._parts.setdefault(group, []).append(part)
        return any("step" in state for state in self._optimizer.optimizer.state.values())

    def _find_parts(self, names: Set[str]) -> Iterator[tuple[int, slice]]:
        """Yield where the named parameters are on this rank: the group, and the part of its flat vector."""
        optimizer = self._optimizer
        parameters = [self._trained[name] for name in names]
        if isinstance(optimizer, WeightedZeroOptimizer):
            wanted = {id(parameter) for parameter in parameters}
            for group in range(len(optimizer.bit16_groups)):
                for parameter, fragment in optimizer.fragments(group, optimizer.rank_in(group)):
                    if id(parameter) in wanted:
                        yield group, slice(fragment.in_part, fragment.in_part + fragment.count)
        elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            for parameter in parameters:
                group, start, count = optimizer.grad_position[optimizer.get_param_id(parameter)]
                if not optimizer._swappable_optimizer_subgroup(group):  # a swapped one is not in memory
                    yield group, slice(start, start + count)

    def _step(self, step: Callable[[int], None], group: int) -> None:
        """Replace ``_optimizer_step``, which steps on the flat vector of one group."""
        optimizer = self._optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            flat = optimizer.fp32_partitioned_groups_flat[group]
        else:
            flat = optimizer.single_partition_of_fp32_groups[group]
        # With partial offload DeepSpeed has a second optimizer, for groups that stay on the device.
        candidates = [optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)]
        with_state = [inner for inner in candidates if inner is not None and flat in inner.state]
        inner = with_state[0] if with_state else optimizer.optimizer
        with keep_parts(inner, flat, self._parts.get(group, [])):
            step(group)
