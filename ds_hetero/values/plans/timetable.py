"""1F1B: in which order a stage runs the forwards and backwards of its micro-batches.

The cost model adds up the time of this order, the runtime runs it.

Which rank sends which tokens of the activations to which rank, between two stages that cut them differently.

What a stage computes for a micro-batch, ``[b, L, H]``, lies on its ranks by tokens: a single rank holds all of them,
ranks of tensor parallelism hold a copy each, ranks of a sequence stage the intervals of their schedule. The hop to the
next stage is the overlap of the two cuts: every receiver gets each of its tokens once, from one of the ranks that hold
it, and receivers take from the copies by turns. No leader gathers or broadcasts, and neighbouring stages may cut in any
way. Gradients travel by the same function with the stages exchanged.

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
    """Return the actions of a stage in order, a forward and a backward for every micro-batch.

    Args:
        in_flight: forwards that may run before their backward, at least 1.
        micro_batches: of the step.
    """
    warm_up = min(in_flight - 1, micro_batches)
    actions = [Action(FORWARD, k) for k in range(warm_up)]
    for k in range(micro_batches - warm_up):
        actions += [Action(FORWARD, warm_up + k), Action(BACKWARD, k)]
    return actions + [Action(BACKWARD, k) for k in range(micro_batches - warm_up, micro_batches)]


class TokenPart(NamedTuple):
    """Tokens of a sequence that the same ranks of a stage hold."""

    ranks: tuple[int, ...]  # global ranks with equal copies
    intervals: tuple[Range, ...]  # position intervals, in the order in which the ranks hold them


class ActivationTransfer(NamedTuple):
    """One message of a hop."""

    sender: int  # global rank
    receiver: int  # global rank
    intervals: tuple[Range, ...]  # position intervals that it carries, in the receiver's order

    @property
    def tokens(self) -> int:
        """Tokens of one row of the batch."""
        return sum(stop - start for start, stop in self.intervals)


def token_parts(stage: Stage, length: int) -> tuple[TokenPart, ...]:
    """Return what the ranks of a stage hold of a sequence of ``length`` tokens.

    Raises:
        ScheduleError: fewer tokens than ranks of a sequence stage that are to hold some.
    """
    if stage.schedule is None:
        return (TokenPart(stage.ranks, ((0, length),)),)
    placement = stream_placement(stage.schedule, length)
    return tuple(TokenPart((rank,), placement.intervals(rank)) for rank in stage.schedule.ranks)


def held_intervals(stage: Stage, length: int, rank: int) -> tuple[Range, ...]:
    """Position intervals that ``rank`` of a stage holds, in the order of its tokens."""
    return next(part.intervals for part in token_parts(stage, length) if rank in part.ranks)


@lru_cache(maxsize=1024)
def transfers(source: Stage, target: Stage, length: int) -> tuple[ActivationTransfer, ...]:
    """Return the messages that bring the activations of one stage to another.

    Args:
        source: the stage that has computed them.
        target: the stage that needs them.
        length: tokens of the sequence.

    Returns:
        By receiver in the order of the target's parts, and by sender in that of the source's; the same on every rank.

    Raises:
        ScheduleError: see `token_parts`.
    """
    held = token_parts(source, length)
    receivers = [(rank, part) for part in token_parts(target, length) for rank in part.ranks]
    return tuple(
        ActivationTransfer(part.ranks[turn % len(part.ranks)], receiver, common)
        for turn, (receiver, wanted) in enumerate(receivers)
        for part in held
        if (common := tuple(_overlap(wanted.intervals, part.intervals)))
    )


def _overlap(wanted: Sequence[Range], held: Sequence[Range]) -> Iterator[Range]:
    for start, stop in wanted:
        for low, high in sorted(held):
            if max(start, low) < min(stop, high):
                yield max(start, low), min(stop, high)
