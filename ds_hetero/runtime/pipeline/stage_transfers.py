"""Send activations and gradients between two stages of a pipeline, whose ranks hold different tokens.

A rank sends each token to the rank of the other stage that holds it, so its messages follow from the overlaps of the
two stages' shards. Every boundary of a pipeline has two process groups, one per direction: NCCL runs the messages of a
communicator one after the other, and activations and gradients should not wait for each other. Within a group the
messages of a micro-batch are posted together, and both sides post micro-batches in the same order. Ranks that hold the
same tokens, as tensor parallelism needs them, receive a part of these tokens each, and all-gather them over a third
group.

Dimension key: b rows of a micro-batch, L tokens of its sequences, s tokens of this rank, c tokens that it sends or
receives over the boundary, H hidden size.
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

from ds_hetero.common.rounding import ceil_div
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.process_groups import Connections, ProcessGroups
from ds_hetero.runtime.shared_tokens import gather_parts
from ds_hetero.values.placement import Range
from ds_hetero.values.plans import Plan, Stage
from ds_hetero.values.plans.activation_transfers import ActivationTransfer, carried_intervals, held_intervals, transfers


class BoundaryGroups(NamedTuple):
    """Process groups of one boundary between two stages."""

    activations: Connections  # of the ranks of both stages, from the earlier stage to the later one
    gradients: Connections  # of the ranks of both stages, the other way
    # Of this rank and those that hold the same tokens in its stage; None if it holds them alone, or in another stage.
    copies: ProcessGroup | None


def make_boundary_groups(plan: Plan, groups: ProcessGroups) -> dict[tuple[int, int], BoundaryGroups]:
    """Make the groups of every boundary of every pipeline, keyed by (pipeline, earlier stage).

    Caller: every rank of the world; all calls that make process groups come in the same order on every rank.
    Collectives: two new_group for every boundary, and one for all ranks that hold the same tokens, unless ``groups``
        has them.
    """
    groups_of_boundaries = {}
    rank = dist.get_rank()

    for i, pipeline in enumerate(plan.pipelines):
        for j, (earlier, later) in enumerate(pairwise(pipeline.stages)):
            ranks = (*earlier.ranks, *later.ranks)
            activations = groups.connections_of(groups.of(ranks, "activations"))
            gradients = groups.connections_of(groups.of(ranks, "gradients"))
            own_copies = None
            for holders in (*earlier.token_holders, *later.token_holders):
                copies = groups.of(holders, "copies") if len(holders) > 1 else None
                if rank in holders:
                    own_copies = copies
            groups_of_boundaries[i, j] = BoundaryGroups(activations, gradients, own_copies)
    return groups_of_boundaries


class Sending:
    """Posted sends of one micro-batch, with references to their tensors, which isend reads in the background."""

    def __init__(self, works: Sequence[dist.Work], parts: Sequence[Tensor]) -> None:
        self._works, self._parts = works, parts

    def wait(self) -> None:
        """Wait until the messages have been sent, so that their memory can be freed."""
        with waiting_for_peers("sending to the next stage of its pipeline"):
            for work in self._works:
                work.wait()


class Receiving:
    """Posted receives of one micro-batch.

    Args:
        parts: for each message, its ranges among the tokens of ``result``, and its tensor.
        result: [b, c, H], into which `wait` copies the messages.
        gather: all-gathers the results of the ranks of a tensor-parallel stage; None for other stages.
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
        """Return this rank's tokens in its order, [b, s, H].

        Caller: on a tensor-parallel stage, all of its ranks.
        Collectives: there one all_gather.
        """
        with waiting_for_peers("waiting for a neighbouring stage of its pipeline"):
            for work in self._works:
                work.wait()
        for ranges, part in self._parts:
            pieces = part.split_with_sizes([stop - start for start, stop in ranges], dim=1)
            for (start, stop), piece in zip(ranges, pieces, strict=True):
                self._result[:, start:stop] = piece
        return self._result if self._gather is None else self._gather(self._result)


@dataclass(frozen=True, eq=False)
class Boundary:
    """One direction between this rank's stage and a neighbouring one."""

    source: Stage
    target: Stage
    rank: int  # of this process, on either side
    connections: Connections  # of the ranks of both stages
    copies: ProcessGroup | None  # of the ranks of the rank's own stage that hold the same tokens; None if it is alone
    device: torch.device  # of the activations

    def connect(self, lengths: Iterable[int]) -> None:
        """Connect the pairs of ranks that exchange messages for sequences of ``lengths``; they depend on the length.

        Caller: every rank of both stages, before it posts a message, with the same lengths.
        Collectives: those of `Connections.make`; none for pairs that are connected already.
        """
        pairs: set[tuple[int, int]] = set()
        for length in set(lengths):
            pairs.update((message.sender, message.receiver) for message in self._messages(length))
        self.connections.make(pairs)

    def send(self, x: Tensor, length: int) -> Sending:
        """Post the sends of this rank's activations of a micro-batch.

        Args:
            x: [b, s, H], in the order of the rank's tokens.
            length: tokens of the whole sequence.
        """
        parts, ops = [], []
        for message in self._messages(length):
            if message.sender == self.rank:
                ranges = _local_ranges(message.intervals, held_intervals(self.source, length, self.rank))
                part = torch.cat([x[:, start:stop] for start, stop in ranges], dim=1).contiguous()
                parts.append(part)
                ops.append(dist.P2POp(dist.isend, part, message.receiver, self.connections.group))
        return Sending(_post(ops), parts)

    def receive(self, rows: int, length: int, width: int, dtype: torch.dtype) -> Receiving:
        """Post the receives of this rank's part of activations [``rows``, ``length``, ``width``] of the other stage."""
        carried = carried_intervals(self.target, length, self.rank)
        tokens = sum(stop - start for start, stop in carried)
        held = sum(stop - start for start, stop in held_intervals(self.target, length, self.rank))
        if self.copies is not None:  # an all_gather takes equal parts of all ranks; the last ones' may be padded
            tokens = ceil_div(held, dist.get_world_size(self.copies))
        result = torch.empty(rows, tokens, width, dtype=dtype, device=self.device)
        parts, ops = [], []
        for message in self._messages(length):
            if message.receiver == self.rank:
                part = result.new_empty(rows, message.tokens, width)
                parts.append((_local_ranges(message.intervals, carried), part))
                ops.append(dist.P2POp(dist.irecv, part, message.sender, self.connections.group))
        gather = None if self.copies is None or not held else partial(_gather_tokens, tokens=held, group=self.copies)
        return Receiving(_post(ops), parts, result, gather)

    def _messages(self, length: int) -> tuple[ActivationTransfer, ...]:
        """Return the messages of all ranks for sequences of a length."""
        return transfers(self.source, self.target, length)


@waiting_for_peers("gathering what a neighbouring stage of its pipeline sent")
def _gather_tokens(part: Tensor, tokens: int, group: ProcessGroup) -> Tensor:
    """See `gather_parts`; a rank that waits here says so."""
    return gather_parts(part, tokens, group)


def _post(ops: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Post messages as one batch, which NCCL runs together, so that a send cannot block a receive."""
    return list(dist.batch_isend_irecv(list(ops))) if ops else []


def _local_ranges(intervals: Sequence[Range], intervals_of_rank: Sequence[Range]) -> tuple[Range, ...]:
    """Return the ranges of position intervals among the tokens of a rank.

    Example: a rank holds the positions [4, 8) and [12, 16). The interval [13, 15) has its tokens [5, 7).

    Args:
        intervals_of_rank: intervals that the rank holds, in the order of its tokens.
    """
    ranges = []
    for start, stop in intervals:
        num_before = 0  # tokens of the intervals before
        for low, high in intervals_of_rank:
            if low <= start and stop <= high:
                ranges.append((num_before + start - low, num_before + stop - low))
                break
            num_before += high - low
        else:
            raise AssertionError(
                f"interval {(start, stop)} lies in none of {list(intervals_of_rank)}, which the rank holds"
            )
    return tuple(ranges)
