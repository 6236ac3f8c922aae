"""1F1B: in which order a stage runs the forwards and backwards of its micro-batches.

The cost model adds up the time of this order, the runtime runs it.
"""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"


class Action(NamedTuple):
    """One pass of one micro-batch.

    Args:
        kind: `FORWARD` or `BACKWARD`.
        micro_batch: its number in the step, from 0.
    """

    kind: str
    micro_batch: int


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
