"""Messages of activations between two pipeline stages that shard them differently.

A stage's output for a micro-batch, ``[b, L, H]``, is on its ranks by tokens:

    one         a single rank has all tokens
    tensor      every rank has a copy of all tokens
    sequence    every rank has the position intervals of its schedule; with tensor groups, every rank of a group has
                those of the group

Every activation crosses the boundary once: each of n ranks with copies sends or receives 1 / n of their tokens, and
ranks that need copies then gather the parts among themselves. The messages are the overlaps of the intervals that ranks
of one stage send with those that ranks of the other receive, so neighbouring stages may shard in any way. For gradients
the stages swap.

HexiScale (arXiv:2409.01143) instead sends from one leader to another, which broadcasts. That is as many bytes over the
boundary, but through one NIC instead of all, and more bytes inside the stage: a broadcast brings every rank all tokens,
a gather all but those that it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ds_hetero.common.rounding import ceil_div
from ds_hetero.values.placement import Range, select_tokens, stream_placement
from ds_hetero.values.plans.stages import Stage


class ActivationTransfer(NamedTuple):
    """One message between two stages."""

    sender: int  # global rank
    receiver: int  # global rank
    intervals: tuple[Range, ...]  # position intervals that it carries, in the receiver's order

    @property
    def tokens(self) -> int:
        """Number of tokens of one batch row that the message carries."""
        return sum(stop - start for start, stop in self.intervals)


def held_intervals(stage: Stage, length: int, rank: int) -> tuple[Range, ...]:
    """Return the position intervals that ``rank`` computes, in the order of its tokens.

    Raises:
        ScheduleError: the sequence is too short for the stage's schedule.
    """
    schedule = stage.schedule_of(rank)
    if schedule is None:
        return ((0, length),)
    return stream_placement(schedule, length).intervals(rank)


def carried_intervals(stage: Stage, length: int, rank: int) -> tuple[Range, ...]:
    """Return the position intervals that ``rank`` sends to a neighbouring stage, and receives from one.

    A rank that alone holds its tokens sends all of them. If n ranks have copies of some tokens, each sends one part of
    ceil(tokens / n), in ascending order of ranks: 4 ranks with 10 tokens send 3, 3, 3 and 1.

    Raises:
        ScheduleError: the sequence is too short for the stage's schedule.
    """
    held, holders = held_intervals(stage, length, rank), stage.holders_with(rank)
    if len(holders) == 1:
        return held
    tokens = sum(stop - start for start, stop in held)
    step = ceil_div(tokens, len(holders))
    first = min(holders.index(rank) * step, tokens)
    return select_tokens(held, (first, min(first + step, tokens)))


@lru_cache(maxsize=1024)
def transfers(source: Stage, target: Stage, length: int) -> tuple[ActivationTransfer, ...]:
    """List the messages of activations from one stage to another, in the same order on every rank.

    They are sorted by receiver and then by sender, in the order of the stages' ranks.

    Raises:
        ScheduleError: the sequence is too short for the schedule of a stage.
    """
    sent = {rank: carried_intervals(source, length, rank) for rank in source.ranks}
    received = {rank: carried_intervals(target, length, rank) for rank in target.ranks}
    messages = []
    for receiver, sender in product(received, sent):
        intervals = tuple(_overlap(received[receiver], sent[sender]))
        if intervals:
            messages.append(ActivationTransfer(sender, receiver, intervals))
    return tuple(messages)


def _overlap(received: Sequence[Range], sent: Sequence[Range]) -> Iterator[Range]:
    """Yield the intervals that are in both, in the order of ``received``."""
    for (start, stop), (low, high) in product(received, sorted(sent)):
        if max(start, low) < min(stop, high):
            yield max(start, low), min(stop, high)
