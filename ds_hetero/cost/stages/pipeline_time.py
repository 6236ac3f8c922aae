"""Time of one pipeline under 1F1B: a closed form for searches, and the recurrence that it approximates.

Stage j takes F_j seconds forward and B_j seconds backward for a micro-batch, and a hop from it to the next stage takes
h_j in either direction. Sends overlap with compute; transfers over one hop in one direction follow one another. Stage j
runs at most w_j forwards ahead of its backwards (1F1B: the number of stages from j to the last). For S stages and m
micro-batches:

    period = max_{i <= j} R_ij / (w_i - w_j + 1)    R_ij = sum_{i..j} F + B  +  2 sum_{i..j-1} h
    fill   = max_j  sum_{i < j} (F_i + B_i + 2 h_i)  +  F_j + B_j  +  idle_j  -  S (period - F_j - B_j)
    idle_j = max(0, D_j - (w_j - 1) F_j) + max(0, D_j - (w_j - 1) B_j)    D_j = sum_{i > j} F + B  +  2 sum_{i >= j} h
    time   = max( fill + (m - 1) period,  sum_j F_j + B_j  +  2 sum_j h_j )

*Period.* R_ij is the time of a round trip from stage i to stage j and back. Stage i may run a further forward when the
backward of an earlier micro-batch comes back from stage j. In the time R_ij only w_i - w_j + 1 micro-batches make this
trip, so the period is at least R_ij / (w_i - w_j + 1). For i = j this is the stage's own time; over several stages it
says that 1F1B has too few micro-batches in flight to hide slow hops. No hop is longer than half the round trip over it.

*Fill.* Follow one stage j through the step. Its first forward waits for the stages before it, and after its last
backward they have to finish theirs. Between its first forward and its first backward the later stages work for D_j
seconds, in which stage j runs w_j - 1 forwards and then idles; likewise with backwards after its last forward. A stage
that is faster than the period has time to spare in every period; the formula subtracts this time S times. That is exact
for m = S + 1 if one stage decides, and keeps the formula linear in m.

Example: two stages with F = 1 s and B = 2 s each, and a hop of 1 s. The round trip from the first to the second stage
and back takes R = 6 + 2 = 8 s, and two micro-batches make it at a time, so the period is max(3, 8 / 2) = 4 s, although
no stage works longer than 3 s.

HexiScale's Eq. 9 (arXiv:2409.01143) and Tangram's Eq. 7 (arXiv:2606.16907) have no round trips, and count all of D_j
although the stage works meanwhile. On random pipelines the error of their formulas is up to a fifth, and that of the
formulas above is 0.2 % on average.

Dimension key: C candidates, S stages, P round trips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.errors import PlanError
from ds_hetero.values.plans.timetable import default_in_flight


class PipelineTimes(NamedTuple):
    """Coefficients of pipelines' times; m micro-batches take ``max(fill + (m - 1) period, latency)``."""

    fill_s: Floats  # time of the first micro-batch, see the module's docstring, ``[C]``
    period_s: Floats  # time between two micro-batches, ``[C]``
    latency_s: Floats  # time of a single micro-batch through all stages and back, ``[C]``

    def of(self, micro_batches: int) -> Floats:
        """Return the pipelines' time for a number of micro-batches, ``[C]``."""
        return np.maximum(self.fill_s + (micro_batches - 1) * self.period_s, self.latency_s)


def closed_form(forward_s: Floats, backward_s: Floats, hop_s: Floats) -> PipelineTimes:
    """Evaluate the module's formulas.

    Args:
        forward_s, backward_s: passes of every stage, ``[C, S]``.
        hop_s: hops in one direction, ``[S - 1]``.
    """
    stage_s = forward_s + backward_s
    num_stages = stage_s.shape[1]
    through_CS = stage_s.cumsum(axis=1)  # time up to the end of this stage, hops before it included
    through_CS[:, 1:] += 2 * hop_s.cumsum()
    first_P, last_P, in_flight_P = _round_trips(num_stages)
    round_trip_CP = through_CS[:, last_P] - (through_CS - stage_s)[:, first_P]
    period_C = (round_trip_CP / in_flight_P).max(axis=1)
    beyond_CS = through_CS[:, -1:] - through_CS  # D_j of the formulas
    ahead_S = np.arange(num_stages - 1, -1, -1)  # w_j - 1
    idle_CS = np.maximum(0.0, beyond_CS - ahead_S * forward_s) + np.maximum(0.0, beyond_CS - ahead_S * backward_s)
    spare_CS = num_stages * (period_C[:, None] - stage_s)
    return PipelineTimes((through_CS + idle_CS - spare_CS).max(axis=1), period_C, through_CS[:, -1])


@lru_cache
def _round_trips(num_stages: int) -> tuple[Ints, Ints, Ints]:
    """List the pairs of stages i <= j between which a micro-batch goes forward and back.

    Returns i, j, and how many micro-batches make this trip at once under 1F1B, ``[P]`` each.
    """
    first_P, last_P = np.triu_indices(num_stages)
    return first_P, last_P, last_P - first_P + 1


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """Times at which the passes of a pipeline end."""

    forward_end_s: tuple[tuple[float, ...], ...]  # end of every forward, by stage and micro-batch
    backward_end_s: tuple[tuple[float, ...], ...]  # end of every backward, by stage and micro-batch

    @property
    def total_s(self) -> float:
        """Time from the first forward to the last backward."""
        return max(ends[-1] for ends in self.backward_end_s)


def run_pipeline(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: Sequence[float],
    micro_batches: int,
    in_flight: Sequence[int] | None = None,
) -> PipelineRun:
    """Run every pass of a pipeline as soon as its inputs have arrived, in O(S m) steps.

    Args:
        forward_s, backward_s: passes of every stage.
        hop_s: hops between neighbouring stages, in one direction.
        in_flight: micro-batches in flight, by stage; None: as under plain 1F1B.

    Raises:
        PlanError: with these ``in_flight`` two stages would wait for each other forever.
    """
    stages = len(forward_s)
    in_flight = default_in_flight(stages) if in_flight is None else in_flight
    if any(later > earlier for earlier, later in pairwise(in_flight)) or min(in_flight) < 1:
        raise PlanError(
            f"in_flight {tuple(in_flight)} must not rise from stage to stage and be at least 1: a stage that runs more "
            "forwards ahead than the one before it waits for inputs that never come."
        )
    warm_up = [min(number - 1, micro_batches) for number in in_flight]
    forward_end: list[list[float]] = [[] for _ in range(stages)]
    backward_end: list[list[float]] = [[] for _ in range(stages)]
    # Arrival times of the inputs of forwards (activations) and of backwards (gradients), by stage. The first stage has
    # all activations at once, the last stage all gradients.
    activations: list[list[float]] = [[0.0] * micro_batches] + [[] for _ in range(stages - 1)]
    gradients: list[list[float]] = [[] for _ in range(stages - 1)] + [[0.0] * micro_batches]
    free_from = [0.0] * stages  # time at which each stage has ended its last pass so far
    unfinished = set(range(stages))
    while unfinished:
        for j in sorted(unfinished):
            free_from[j] = _advance(
                free_from[j],
                warm_up[j],
                micro_batches,
                forward=_Pass(forward_s[j], forward_end[j], activations[j]),
                backward=_Pass(backward_s[j], backward_end[j], gradients[j]),
                to_next=_Wire(activations[j + 1], hop_s[j]) if j + 1 < stages else None,
                to_previous=_Wire(gradients[j - 1], hop_s[j - 1]) if j else None,
            )
            if len(backward_end[j]) == micro_batches:
                unfinished.discard(j)
    return PipelineRun(tuple(map(tuple, forward_end)), tuple(map(tuple, backward_end)))


class _Pass(NamedTuple):
    """Forward or backward of one stage; lists grow by a micro-batch at a time."""

    seconds: float
    ends: list[float]  # time at which the pass of every micro-batch has ended
    inputs: list[float]  # time at which the input of every micro-batch has arrived


class _Wire(NamedTuple):
    """Hop from a stage to a neighbour, in one direction."""

    arrivals: list[float]  # time at which every transfer has arrived
    seconds: float  # time of one transfer


def _advance(
    clock: float,
    warm_up: int,
    micro_batches: int,
    forward: _Pass,
    backward: _Pass,
    to_next: _Wire | None,
    to_previous: _Wire | None,
) -> float:
    """Run those passes of one stage whose inputs are known, in the order of `one_f_one_b`.

    A transfer begins when its data exists and the transfer before it has ended. The lists in the arguments grow by the
    passes and transfers that are run.

    Args:
        clock: time from which the stage is free.
        warm_up: forwards that the stage runs before its first backward.

    Returns:
        The time from which the stage is free again.
    """
    # Comparisons instead of max(), which would be a call for every pass of every stage.
    forward_s, forward_end, inputs = forward
    backward_s, backward_end, gradients = backward
    sent, sent_s = to_next or ([0.0], 0.0)
    sent_back, sent_back_s = to_previous or ([0.0], 0.0)
    num_forwards, num_backwards, num_inputs, num_gradients = map(len, (forward_end, backward_end, inputs, gradients))
    while num_backwards < micro_batches:
        if num_forwards < micro_batches and num_forwards - num_backwards <= warm_up:
            if num_forwards == num_inputs:
                break
            ready = inputs[num_forwards]
            clock = (ready if ready > clock else clock) + forward_s
            forward_end.append(clock)
            wire_free = sent[-1] if sent else 0.0
            sent.append((clock if clock > wire_free else wire_free) + sent_s)
            num_forwards += 1
        else:
            if num_backwards == num_gradients:
                break
            ready = gradients[num_backwards]
            clock = (ready if ready > clock else clock) + backward_s
            backward_end.append(clock)
            wire_free = sent_back[-1] if sent_back else 0.0
            sent_back.append((clock if clock > wire_free else wire_free) + sent_back_s)
            num_backwards += 1
    return clock
