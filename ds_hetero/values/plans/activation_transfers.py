"""Messages of activations between two pipeline stages that shard them differently.

What a stage computes for a micro-batch, ``[b, L, H]``, lies on its ranks by tokens: a single rank holds all of them,
ranks of tensor parallelism hold a copy each, ranks of a sequence stage the intervals of their schedule. Each rank of
copies sends an equal part over the boundary, and receives one, so that an activation crosses the boundary once; the
ranks that want copies then gather the parts among themselves. The messages are the overlaps of what the sending ranks
hold with what the receiving ranks want, so neighbouring stages may shard in any way. Gradients travel by the same
function with the stages exchanged.

HexiScale (arXiv:2409.01143) sends between two leaders, of which the receiving one broadcasts. Those are as many bytes
over the boundary, through one NIC instead of all, and more inside the stage: a broadcast brings every rank all tokens,
the gather all but its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ds_hetero.values.placement import Range, stream_placement
from ds_hetero.values.plans.stages import Stage


class ActivationTransfer(NamedTuple):
    """One message between two stages."""

    sender: int  # global rank
    receiver: int  # global rank
    intervals: tuple[Range, ...]  # position intervals that it carries, in the receiver's order

    @property
    def tokens(self) -> int:
        """Tokens of one row of the batch."""
        return sum(stop - start for start, stop in self.intervals)


def held_intervals(stage: Stage, length: int, rank: int) -> tuple[Range, ...]:
    """Position intervals that ``rank`` computes, in its tokens' order. Raises `ScheduleError`: too few tokens."""
    if stage.schedule is None:
        return ((0, length),)
    return stream_placement(stage.schedule, length).intervals(rank)


def carried_intervals(stage: Stage, length: int, rank: int) -> tuple[Range, ...]:
    """Position intervals that ``rank`` sends to a neighbour and receives. Raises `ScheduleError`: see `held_intervals`.

    A rank of a sequence stage sends what it computes. Where n ranks hold copies, each sends one part of
    ceil(length / n) tokens, in ascending order of rank: of 10 tokens on 4 ranks 3, 3, 3 and 1.
    """
    if stage.schedule is not None:
        return held_intervals(stage, length, rank)
    step = -(-length // len(stage.ranks))
    start = min(sorted(stage.ranks).index(rank) * step, length)
    return ((start, min(start + step, length)),)


@lru_cache(maxsize=1024)
def transfers(source: Stage, target: Stage, length: int) -> tuple[ActivationTransfer, ...]:
    """Return the messages of activations from one stage to another. Raises `ScheduleError`: see `held_intervals`.

    Returns:
        By receiver and by sender, in the order of the stages' ranks; the same on every rank.
    """
    sent = {rank: carried_intervals(source, length, rank) for rank in source.ranks}
    wanted = {rank: carried_intervals(target, length, rank) for rank in target.ranks}
    messages = []
    for receiver, sender in product(wanted, sent):
        intervals = tuple(_overlap(wanted[receiver], sent[sender]))
        if intervals:
            messages.append(ActivationTransfer(sender, receiver, intervals))
    return tuple(messages)


def _overlap(wanted: Sequence[Range], sent: Sequence[Range]) -> Iterator[Range]:
    """Intervals that are in both, in the order of ``wanted``."""
    for (start, stop), (low, high) in product(wanted, sorted(sent)):
        if max(start, low) < min(stop, high):
            yield max(start, low), min(stop, high)
