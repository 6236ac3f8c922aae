"""The hop between two stages: this rank's messages of one micro-batch, by the overlap of the two stages' token cuts.

Every boundary of a pipeline has two process groups, one per direction, so that on NCCL, which runs the messages of a
communicator one after the other, activations and gradients do not wait for each other. Within a group the messages of
a micro-batch are posted together, and micro-batches follow one another in the same order on both sides.

Dimension key: b rows of a micro-batch, s tokens of this rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import ProcessGroups
from ds_hetero.values.placement import Range
from ds_hetero.values.plans import Plan, Stage
from ds_hetero.values.plans.timetable import ActivationTransfer, held_intervals, transfers


class BoundaryGroups(NamedTuple):
    """Process groups of the ranks on both sides of a boundary, one per direction."""

    activations: ProcessGroup  # from the earlier stage to the later one
    gradients: ProcessGroup


def make_boundary_groups(plan: Plan, groups: ProcessGroups) -> dict[tuple[int, int], BoundaryGroups]:
    """Make the groups of every boundary of every pipeline, by pipeline and earlier stage.

    Args:
        plan: what all ranks do.
        groups: made so far, to be used again.

    Caller: every rank of the world, in the same order as whatever else makes process groups.
    Collectives: two new_group for every boundary that ``groups`` does not have.
    """
    made = {}
    for i, pipeline in enumerate(plan.pipelines):
        for j, (earlier, later) in enumerate(pairwise(pipeline.stages)):
            ranks = (*earlier.ranks, *later.ranks)
            made[i, j] = BoundaryGroups(groups.of(ranks, "activations"), groups.of(ranks, "gradients"))
    return made


class Sending:
    """Messages of one micro-batch that are on their way; holds their memory until they have left."""

    def __init__(self, works: Sequence[dist.Work], parts: Sequence[Tensor]) -> None:
        self._works, self._parts = works, parts

    def wait(self) -> None:
        """Wait until the parts may be freed."""
        with waiting_for_peers("sending to the next stage of its pipeline"):
            for work in self._works:
                work.wait()


class Receiving:
    """Messages of one micro-batch that this rank has asked for."""

    def __init__(
        self, works: Sequence[dist.Work], parts: Sequence[tuple[tuple[Range, ...], Tensor]], result: Tensor
    ) -> None:
        self._works, self._parts, self._result = works, parts, result

    def wait(self) -> Tensor:
        """Return ``[b, s, H]``, this rank's tokens in its order."""
        with waiting_for_peers("waiting for a neighbouring stage of its pipeline"):
            for work in self._works:
                work.wait()
        for local, part in self._parts:
            for (start, stop), piece in zip(local, _split(part, local), strict=True):
                self._result[:, start:stop] = piece
        return self._result


@dataclass(frozen=True, kw_only=True, eq=False)
class Boundary:
    """One direction between this rank's stage and a neighbouring one."""

    source: Stage
    target: Stage
    rank: int  # this process's, on either side
    group: ProcessGroup
    device: torch.device  # where activations live

    def send(self, x: Tensor, length: int) -> Sending:
        """Send this rank's part of what its stage computed.

        Args:
            x: [b, s, H], in the order of the rank's tokens.
            length: tokens of the whole sequence.
        """
        parts, ops = [], []
        for message in self._messages(length):
            if message.sender == self.rank:
                local = _local(message.intervals, held_intervals(self.source, length, self.rank))
                parts.append(torch.cat([x[:, start:stop] for start, stop in local], dim=1).contiguous())
                ops.append(dist.P2POp(dist.isend, parts[-1], message.receiver, self.group))
        return Sending(_post(ops), parts)

    def receive(self, rows: int, length: int, width: int, dtype: torch.dtype) -> Receiving:
        """Ask for this rank's part of what the other stage computes.

        Args:
            rows: b.
            length: tokens of the whole sequence.
            width: H.
        """
        held = held_intervals(self.target, length, self.rank)
        result = torch.empty(rows, sum(stop - start for start, stop in held), width, dtype=dtype, device=self.device)
        parts, ops = [], []
        for message in self._messages(length):
            if message.receiver == self.rank:
                part = result.new_empty(rows, message.tokens, width)
                parts.append((_local(message.intervals, held), part))
                ops.append(dist.P2POp(dist.irecv, part, message.sender, self.group))
        return Receiving(_post(ops), parts, result)

    def sent_elements(self, rows: int, length: int, width: int) -> int:
        """Elements that this rank sends for a micro-batch."""
        return sum(m.tokens for m in self._messages(length) if m.sender == self.rank) * rows * width

    def _messages(self, length: int) -> tuple[ActivationTransfer, ...]:
        return transfers(self.source, self.target, length)


def _post(ops: Sequence[dist.P2POp]) -> list[dist.Work]:
    return list(dist.batch_isend_irecv(list(ops))) if ops else []


def _local(intervals: Sequence[Range], held: Sequence[Range]) -> tuple[Range, ...]:
    """Where position intervals lie among the tokens of a rank that holds ``held`` in this order."""
    offsets = accumulate((stop - start for start, stop in held), initial=0)
    first = dict(zip(held, offsets, strict=False))
    local = []
    for start, stop in intervals:
        low, offset = next((a, first[a, b]) for a, b in held if a <= start and stop <= b)
        local.append((offset + start - low, offset + stop - low))
    return tuple(local)


def _split(part: Tensor, local: Sequence[Range]) -> tuple[Tensor, ...]:
    return part.split_with_sizes([stop - start for start, stop in local], dim=1)
