"""1F1B: in which order a stage runs the forwards and backwards of its micro-batches.

The cost model adds up the time of this order, the runtime runs it.

Which rank sends which tokens of the activations to which rank, between two stages that cut them differently.

What a stage computes for a micro-batch, ``[b, L, H]``, lies on its ranks by tokens: a single rank holds all of them,
ranks of tensor parallelism hold a copy each, ranks of a sequence stage the intervals of their schedule. Of copies every
rank carries an equal part over a boundary, as it leaves and as it arrives, so that an activation crosses the boundary
once; the ranks that want copies then gather the parts among themselves. The hop is the overlap of the two cuts, and
neighbouring stages may cut in any way. Gradients travel by the same function with the stages exchanged.

HexiScale (arXiv:2409.01143) sends between two leaders, of which the receiving one broadcasts. Those are as many bytes
over the boundary, through one port instead of all, and more inside the stage: a broadcast brings every rank all tokens,
the gather all but its own.

Plain integers; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ds_hetero.values.placement import Range, stream_placement
from ds_hetero.values.plans.plan import Stage

FORWARD, BACKWARD = "F", "B"


class Action(NamedTuple):
    """One pass of one micro-batch."""

    kind: str  # `FORWARD` or `BACKWARD`
    micro_batch: int  # its number in the step, from 0


def default_in_flight(stages: int) -> tuple[int, ...]:
    """Micro-batches in flight by stage under plain 1F1B: the stages from this one to the last."""
    return tuple(range(stages, 0, -1))


def one_f_one_b(in_flight: int, micro_batches: int) -> list[Action]:
    """A stage's actions in order: of every micro-batch a forward and a backward, at most ``in_flight`` apart."""
    warm_up = min(in_flight - 1, micro_batches)
    actions = [Action(FORWARD, k) for k in range(warm_up)]
    for k in range(micro_batches - warm_up):
        actions += [Action(FORWARD, warm_up + k), Action(BACKWARD, k)]
    return actions + [Action(BACKWARD, k) for k in range(micro_batches - warm_up, micro_batches)]


def gradients_due(in_flight_after: int, sent: int, micro_batches: int) -> int:
    """How many gradients a stage gets back for ``sent`` outputs, without sending any further.

    Backward k of the stage after, whose ``in_flight`` is given, follows its forward k + in_flight - 1.
    """
    return micro_batches if sent == micro_batches else max(sent - in_flight_after + 1, 0)


class ActivationTransfer(NamedTuple):
    """One message of a hop."""

    sender: int  # global rank
    receiver: int  # global rank
    intervals: tuple[Range, ...]  # position intervals that it carries, in the receiver's order

    @property
    def tokens(self) -> int:
        """Tokens of one row of the batch."""
        return sum(stop - start for start, stop in self.intervals)


def held_intervals(stage: Stage, length: int, rank: int) -> tuple[Range, ...]:
    """Position intervals of ``rank`` of a stage, in its tokens' order. Raises `ScheduleError`: too few tokens."""
    return ((0, length),) if stage.schedule is None else stream_placement(stage.schedule, length).intervals(rank)


def carried_intervals(stage: Stage, length: int, rank: int) -> tuple[Range, ...]:
    """Position intervals of ``rank`` sent to a neighbour and received. Raises `ScheduleError`: see `held_intervals`.

    What it holds; of copies on n ranks the part with its place among them, ascending, which has ceil(length / n) tokens
    as far as there are any.
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
    held, wanted = ([(rank, carried_intervals(s, length, rank)) for rank in s.ranks] for s in (source, target))
    return tuple(
        ActivationTransfer(sender, receiver, common)
        for receiver, wanted_intervals in wanted
        for sender, held_intervals in held
        if (common := tuple(_overlap(wanted_intervals, held_intervals)))
    )


def _overlap(wanted: Sequence[Range], held: Sequence[Range]) -> Iterator[Range]:
    for start, stop in wanted:
        for low, high in sorted(held):
            if max(start, low) < min(stop, high):
                yield max(start, low), min(stop, high)
