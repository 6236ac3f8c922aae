"""One order in which all ranks reduce gradients, whichever of the parameters a rank's tokens have used.

ZeRO 1 and 2 put gradients into buckets as the backward makes them, and average bucket with bucket. Ranks that use other
parameters in a step (experts in a list, heads of tasks) would average gradients of different parameters. Here a
gradient waits until all before it in a common order have gone, and what a rank does not have goes as zeros, as on
ZeRO 0. The order is the one in which rank 0's first backward made them, so in an ordinary job nothing waits.

Whether a parameter that has not come will come is known at the end of a backward alone: checkpointed layers show their
graph while they run again. So a parameter that a rank once lacked is *rare*: it stands at the end of the order, where
ranks say which of the rare ones they have, and those that no rank has are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_hetero.runtime.backends import message_device

Reduce = Callable[[nn.Parameter], None]
"""Puts the gradient of a parameter into its bucket; zeros where it has none."""


class ReductionOrder:
    """The order of one optimizer's reductions.

    Args:
        parameters: all that are trained, the same on every rank in the same order.
        reduce: called once a backward for every parameter, in the same order on every rank of ``group``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup | None, reduce: Reduce) -> None:
        self._parameters, self._group, self._reduce = list(parameters), group, reduce
        self._number = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._order = list(reversed(range(len(self._parameters))))  # of numbers; a backward begins at the last layers
        self._rare: list[int] = []
        self._is_agreed = False  # whether the order is that of a backward of rank 0
        self._lacking: set[int] = set()  # parameters in the order that this rank lacked since `note_rare`
        self._begin()

    def _begin(self) -> None:
        self._next = 0  # index in the order
        self._arrived: dict[int, None] = {}  # numbers of this backward, as they came
        self._gone: set[int] = set()

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether the order has a parameter; one that is trained only since it was made is not in it."""
        return id(parameter) in self._number

    def arrive(self, parameter: nn.Parameter) -> None:
        """Reduce the gradient of a parameter that the backward has made, and those that waited for it."""
        number = self._number[id(parameter)]
        self._arrived[number] = None
        if number in self._gone:  # made twice: DeepSpeed says what it thinks of that
            self._reduce(parameter)
            return
        while self._next < len(self._order) and self._order[self._next] in self._arrived:
            self._go(self._order[self._next])
            self._next += 1

    def finish(self) -> None:
        """Reduce the remaining gradients when a backward has ended; zeros where this rank has none.

        Caller: every rank of the group, once for each backward that reduces.
        Collectives: one all_reduce of a byte for each rare parameter, if there are any; the first time, of every
        parameter, and one broadcast of as many integers.
        """
        for number in self._order[self._next :]:
            if self._parameters[number].requires_grad:
                if number not in self._arrived:
                    self._lacking.add(number)
                self._go(number)
        # Only now: ranks that lack nothing have started these reductions long ago.
        for number, is_used in zip(self._rare, self._any([n in self._arrived for n in self._rare]), strict=True):
            if is_used:
                self._go(number)
        if not self._is_agreed:
            self._agree()
        self._begin()

    def _go(self, number: int) -> None:
        self._gone.add(number)
        self._reduce(self._parameters[number])

    @property
    def lacks(self) -> bool:
        """Whether this rank has lacked parameters that are not known to be rare."""
        return bool(self._lacking)

    def note_rare(self) -> None:
        """Make what any rank has lacked rare. Caller: every rank of the group. Collectives: one all_reduce of bytes."""
        lacking = self._any([number in self._lacking for number in range(len(self._parameters))])
        self._make_rare(number for number, is_lacking in enumerate(lacking) if is_lacking)
        self._lacking = set()

    def _make_rare(self, numbers: Iterable[int]) -> None:
        rare = sorted({*self._rare, *numbers}, reverse=True)
        self._order = [number for number in self._order if number not in rare]
        self._rare = rare

    def _agree(self) -> None:
        """Take the order of rank 0's backward; what some rank lacked in it is rare."""
        missing = self._any([number not in self._arrived for number in range(len(self._parameters))])
        if self._parameters:
            known = [*self._arrived, *(number for number in self._order if number not in self._arrived)]
            order = torch.tensor(known, dtype=torch.int32, device=message_device(self._group))
            dist.broadcast(order, _first_of(self._group), group=self._group)
            self._order = order.tolist()
        self._make_rare(number for number, is_missing in enumerate(missing) if is_missing)
        self._lacking, self._is_agreed = set(), True

    def _any(self, own: Sequence[bool]) -> list[bool]:
        """Whether it holds on any rank, by entry; nothing is exchanged without entries."""
        if not own:
            return []
        bits: Tensor = torch.tensor(own, dtype=torch.uint8, device=message_device(self._group))
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self._group)
        return [bool(bit) for bit in bits.tolist()]


def _first_of(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_global_rank(group, 0)
