"""1F1B: the order in which a pipeline stage runs the forwards and backwards of its micro-batches.

The runtime runs this order, and the cost model computes its time.
"""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"


class Action(NamedTuple):
    """One pass of one micro-batch."""

    kind: str  # `FORWARD` or `BACKWARD`
    micro_batch: int  # number of the micro-batch in the step, from 0


def default_in_flight(stages: int) -> tuple[int, ...]:
    """Return the micro-batches in flight under plain 1F1B by stage: as many as stages from this one to the last."""
    return tuple(range(stages, 0, -1))


def one_f_one_b(in_flight: int, micro_batches: int) -> list[Action]:
    """List a stage's actions in order, with at most ``in_flight`` micro-batches between forward and backward.

    With 2 in flight and 3 micro-batches: F0, F1 B0, F2 B1, B2.
    """
    warm_up = min(in_flight - 1, micro_batches)
    steady = micro_batches - warm_up
    actions = [Action(FORWARD, k) for k in range(warm_up)]
    for k in range(steady):
        actions += [Action(FORWARD, warm_up + k), Action(BACKWARD, k)]
    return actions + [Action(BACKWARD, k) for k in range(steady, micro_batches)]


def gradients_due(in_flight_after: int, sent: int, micro_batches: int) -> int:
    """Return how many gradients the next stage sends back before it needs a further micro-batch.

    With 2 in flight on the next stage, its backward 0 follows its forward 1: after 1 micro-batch no gradient is due,
    after 2 one is.

    Args:
        in_flight_after: micro-batches in flight on the next stage; its backward k follows its forward
            k + in_flight_after - 1.
        sent: micro-batches that were sent to it so far.
        micro_batches: micro-batches of the step.
    """
    if sent == micro_batches:
        return micro_batches
    return max(sent - in_flight_after + 1, 0)
