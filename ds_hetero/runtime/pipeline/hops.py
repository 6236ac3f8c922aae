"""The hop between two stages: this rank's messages of one micro-batch, by the overlap of the two stages' token cuts.

Every boundary of a pipeline has two process groups, one per direction, so that on NCCL, which runs the messages of a
communicator one after the other, activations and gradients do not wait for each other. Within a group the messages of
a micro-batch are posted together, and micro-batches follow one another in the same order on both sides. Ranks of tensor
parallelism gather what arrives among themselves, over a third group.

Dimension key: b rows of a micro-batch, L tokens of its sequences, s tokens of this rank, c tokens that it carries over
the boundary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.process_groups import Connections, ProcessGroups
from ds_hetero.values.placement import Range
from ds_hetero.values.plans import Plan, Stage
from ds_hetero.values.plans.activation_transfers import ActivationTransfer, carried_intervals, held_intervals, transfers


class BoundaryGroups(NamedTuple):
    """Process groups of the ranks on both sides of a boundary, one per direction, and of each side alone."""

    activations: Connections  # from the earlier stage to the later one
    gradients: Connections
    earlier: ProcessGroup | None  # of the ranks of a ``"tensor"`` stage, which gather gradients
    later: ProcessGroup | None  # likewise, which gather activations


def make_boundary_groups(plan: Plan, groups: ProcessGroups) -> dict[tuple[int, int], BoundaryGroups]:
    """Make the groups of every boundary of every pipeline, by pipeline and earlier stage.

    Caller: every rank of the world, in the same order as whatever else makes process groups.
    Collectives: two new_group for every boundary, and one for every tensor-parallel stage, that ``groups`` does not
        have.
    """
    made = {}

    def inside(stage: Stage) -> ProcessGroup | None:
        return groups.of(stage.ranks, "copies") if stage.inner == "tensor" else None

    for i, pipeline in enumerate(plan.pipelines):
        for j, (earlier, later) in enumerate(pairwise(pipeline.stages)):
            ranks = (*earlier.ranks, *later.ranks)
            activations = groups.connections_of(groups.of(ranks, "activations"))
            gradients = groups.connections_of(groups.of(ranks, "gradients"))
            made[i, j] = BoundaryGroups(activations, gradients, inside(earlier), inside(later))
    return made


class Sending:
    """Messages of one micro-batch that are on their way. It holds their memory: isend reads it in the background."""

    def __init__(self, works: Sequence[dist.Work], parts: Sequence[Tensor]) -> None:
        self._works, self._parts = works, parts

    def wait(self) -> None:
        """Wait until the parts may be freed."""
        with waiting_for_peers("sending to the next stage of its pipeline"):
            for work in self._works:
                work.wait()


class Receiving:
    """Messages of one micro-batch that this rank has requested.

    Args:
        parts: of each message, where its intervals lie among the tokens of ``result``, and its tensor.
        result: [b, c, H], to be filled.
        gather: puts the results of all ranks of the stage together; None where they hold no copies.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        parts: Sequence[tuple[tuple[Range, ...], Tensor]],
        result: Tensor,
        gather: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._works, self._parts, self._result, self._gather = works, parts, result, gather

    def wait(self) -> Tensor:
        """Return ``[b, s, H]``, this rank's tokens in its order. Caller: on a ``"tensor"`` stage all its ranks."""
        with waiting_for_peers("waiting for a neighbouring stage of its pipeline"):
            for work in self._works:
                work.wait()
        for local, part in self._parts:
            pieces = part.split_with_sizes([stop - start for start, stop in local], dim=1)
            for (start, stop), piece in zip(local, pieces, strict=True):
                self._result[:, start:stop] = piece
        return self._result if self._gather is None else self._gather(self._result)


@dataclass(frozen=True, eq=False)
class Boundary:
    """One direction between this rank's stage and a neighbouring one."""

    source: Stage
    target: Stage
    rank: int  # this process's, on either side
    connections: Connections  # of the ranks of both stages
    copies: ProcessGroup | None  # of the target's ranks, where they hold copies
    device: torch.device  # where activations live

    def connect(self, lengths: Iterable[int]) -> None:
        """Connect the ranks between which sequences of ``lengths`` travel; the length decides which they are.

        Caller: every rank of both stages, before it posts a message, with the same lengths.
        Collectives: see `Connections.make`; nothing for lengths whose ranks are connected.
        """
        pairs: set[tuple[int, int]] = set()
        for length in set(lengths):
            pairs.update((message.sender, message.receiver) for message in self._messages(length))
        self.connections.make(pairs)

    def send(self, x: Tensor, length: int) -> Sending:
        """Send this rank's part of the activations of a micro-batch.

        Args:
            x: [b, s, H], in the order of the rank's tokens.
            length: tokens of the whole sequence.
        """
        parts, ops = [], []
        for message in self._messages(length):
            if message.sender == self.rank:
                local = _local(message.intervals, held_intervals(self.source, length, self.rank))
                parts.append(torch.cat([x[:, start:stop] for start, stop in local], dim=1).contiguous())
                ops.append(dist.P2POp(dist.isend, parts[-1], message.receiver, self.connections.group))
        return Sending(_post(ops), parts)

    def receive(self, rows: int, length: int, width: int, dtype: torch.dtype) -> Receiving:
        """Request this rank's part of the other stage's activations [``rows``, ``length``, ``width``]."""
        carried = carried_intervals(self.target, length, self.rank)
        tokens = sum(stop - start for start, stop in carried)
        if self.copies is not None:  # a gather takes equal parts of all ranks, and the last may carry fewer tokens
            tokens = -(-length // len(self.target.ranks))
        result = torch.empty(rows, tokens, width, dtype=dtype, device=self.device)
        parts, ops = [], []
        for message in self._messages(length):
            if message.receiver == self.rank:
                part = result.new_empty(rows, message.tokens, width)
                parts.append((_local(message.intervals, carried), part))
                ops.append(dist.P2POp(dist.irecv, part, message.sender, self.connections.group))
        gather = None if self.copies is None else partial(_gathered, length=length, group=self.copies)
        return Receiving(_post(ops), parts, result, gather)

    def _messages(self, length: int) -> tuple[ActivationTransfer, ...]:
        return transfers(self.source, self.target, length)


def _gathered(part: Tensor, length: int, group: ProcessGroup) -> Tensor:
    """Tokens that ranks carry one after the other, ``[b, L, H]``, of ``[b, c, H]`` on each; the last may be padded."""
    rows, tokens, width = part.shape
    parts = part.new_empty(dist.get_world_size(group) * rows, tokens, width)
    with waiting_for_peers("gathering what a neighbouring stage of its pipeline sent"):
        dist.all_gather_single(parts, part, group=group)
    return parts.view(-1, rows, tokens, width).transpose(0, 1).flatten(1, 2)[:, :length].contiguous()


def _post(ops: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Post messages as one batch: NCCL runs those of a batch together, so that a send cannot block a receive."""
    return list(dist.batch_isend_irecv(list(ops))) if ops else []


def _local(intervals: Sequence[Range], held: Sequence[Range]) -> tuple[Range, ...]:
    """Return where position intervals lie among the tokens of a rank that holds ``held`` in this order."""
    local = []
    for start, stop in intervals:
        num_before = 0  # tokens of the intervals before
        for low, high in held:
            if low <= start and stop <= high:
                local.append((num_before + start - low, num_before + stop - low))
                break
            num_before += high - low
        else:
            raise AssertionError("an interval lies in one of those that a rank holds")
    return tuple(local)
