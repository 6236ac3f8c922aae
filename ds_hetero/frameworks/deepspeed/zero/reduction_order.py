"""Reduce gradients in the same order on all ranks, whichever parameters a rank's tokens have used.

ZeRO 1 and 2 put gradients into buckets in the order in which the backward makes them, and average the n-th buckets of
all ranks. If ranks use different parameters in a step (some experts, the head of one task), they would average
gradients of different parameters. Here a gradient waits until all gradients before it in a common order are in their
buckets; for a gradient that a rank does not have it reduces zeros, as ZeRO 0 does. The common order is that of rank 0's
first backward, so that in an ordinary job no gradient waits.

Only at the end of a backward is it known that a gradient will not come: checkpointed layers build their graph while
they run again. So a parameter that any rank has lacked once becomes *rare*. Rare parameters are reduced at the end of
each backward, after ranks have compared which of them they have; those that no rank has are left out.

Example, order a b c d, and c rare since rank 1 lacked it before:

    rank 0 makes d, b, a, c      reduces a b d as soon as each one's turn comes, c at the end
    rank 1 makes a, b, d         reduces a b d, and at the end zeros for c
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_hetero.runtime.backends import message_device

Reduce = Callable[[nn.Parameter], None]
"""A function that puts the gradient of a parameter into its bucket, zeros if there is none."""


class ReductionOrder:
    """Calls ``reduce`` for the parameters of one optimizer, in the same order on every rank.

    Args:
        parameters: all trained parameters, the same on every rank in the same order. They are numbered in this order.
        group: the ranks that reduce together; None for the default group.
        reduce: called once in a backward for every parameter of which any rank has a gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup | None, reduce: Reduce) -> None:
        self._parameters, self._group, self._reduce = list(parameters), group, reduce
        self._number = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        # Numbers of parameters that are not rare, in the common order. Until the order of rank 0 is known, they are in
        # reverse order: a backward begins at the last layers.
        self._order = list(reversed(range(len(self._parameters))))
        self._rare: list[int] = []
        self._is_agreed = False  # whether ``_order`` comes from a backward of rank 0
        self._missed: set[int] = set()  # parameters of ``_order`` that this rank lacked since the last `note_rare`
        self._begin()

    def _begin(self) -> None:
        """Clear the state of the last backward, before the next one."""
        self._next = 0  # index in ``_order`` of the parameter that is reduced next
        self._arrived: dict[int, None] = {}  # parameters with a gradient, in the order in which it was made
        self._reduced: set[int] = set()

    def knows(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter was trained when this order was made."""
        return id(parameter) in self._number

    def arrive(self, parameter: nn.Parameter) -> None:
        """Record a gradient of the backward; if its turn has come, reduce it and the gradients that waited for it."""
        number = self._number[id(parameter)]
        self._arrived[number] = None
        if number in self._reduced:  # a second gradient in one backward: DeepSpeed raises its error
            self._reduce(parameter)
            return
        while self._next < len(self._order) and self._order[self._next] in self._arrived:
            self._reduce_number(self._order[self._next])
            self._next += 1

    def finish(self) -> None:
        """Reduce the remaining gradients at the end of a backward, with zeros for gradients that this rank lacks.

        Caller: every rank of the group, once for each backward that reduces.
        Collectives: one all_reduce of a byte for each rare parameter, if there are any. After the first backward also
        one all_reduce of a byte, and one broadcast of an integer, for each parameter.
        """
        for number in self._order[self._next :]:
            if self._parameters[number].requires_grad:
                if number not in self._arrived:
                    self._missed.add(number)
                self._reduce_number(number)
        # Rare parameters come last, so that all other gradients can be reduced during the backward.
        is_used_anywhere = self._any_rank([number in self._arrived for number in self._rare])
        for number, is_used in zip(self._rare, is_used_anywhere, strict=True):
            if is_used:
                self._reduce_number(number)
        if not self._is_agreed:
            self._agree_on_order()
        self._begin()

    def _reduce_number(self, number: int) -> None:
        """Reduce the gradient of the parameter with this number."""
        self._reduced.add(number)
        self._reduce(self._parameters[number])

    @property
    def has_new_rare(self) -> bool:
        """Whether this rank has lacked a gradient of a parameter that is not rare since the last `note_rare`."""
        return bool(self._missed)

    def note_rare(self) -> None:
        """Count the parameters that any rank has lacked as rare from now on.

        Caller: every rank of the group.
        Collectives: one all_reduce of a byte for each parameter.
        """
        is_missed_anywhere = self._any_rank([number in self._missed for number in range(len(self._parameters))])
        self._make_rare(number for number, is_missed in enumerate(is_missed_anywhere) if is_missed)
        self._missed = set()

    def _make_rare(self, numbers: Iterable[int]) -> None:
        """Move parameters from ``_order`` to ``_rare``, which has the same order on every rank."""
        rare = sorted({*self._rare, *numbers}, reverse=True)
        self._order = [number for number in self._order if number not in rare]
        self._rare = rare

    def _agree_on_order(self) -> None:
        """Take the order of rank 0's first backward; parameters that any rank lacked in it become rare."""
        is_missed_anywhere = self._any_rank([number not in self._arrived for number in range(len(self._parameters))])
        if self._parameters:
            local_order = [*self._arrived, *(number for number in self._order if number not in self._arrived)]
            order = torch.tensor(local_order, dtype=torch.int32, device=message_device(self._group))
            dist.broadcast(order, _first_rank(self._group), group=self._group)
            self._order = order.tolist()
        self._make_rare(number for number, is_missed in enumerate(is_missed_anywhere) if is_missed)
        self._missed, self._is_agreed = set(), True

    def _any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank. Collectives: one all_reduce; none without flags."""
        if not flags:
            return []
        bits: Tensor = torch.tensor(flags, dtype=torch.uint8, device=message_device(self._group))
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self._group)
        return [bool(bit) for bit in bits.tolist()]


def _first_rank(group: ProcessGroup | None) -> int:
    """Return the global rank of the group's rank 0."""
    return 0 if group is None else dist.get_global_rank(group, 0)
