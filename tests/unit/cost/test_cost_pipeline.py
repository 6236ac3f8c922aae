"""Pipelines in time: the 1F1B recurrence, and the closed form that the search uses for it."""

import random
from statistics import mean

import numpy as np
import pytest

from ds_hetero.cost.stages.pipeline_time import closed_form, run_pipeline
from ds_hetero.errors import PlanError
from ds_hetero.values.plans.timetable import default_in_flight, one_f_one_b


def random_pipeline(rng):
    """Stages within 20 % of one another, one possibly slower, recomputation, hops of up to 0.4 of a forward."""
    stages, micro_batches = rng.randint(2, 8), rng.choice((8, 16, 32))
    forward = [rng.uniform(0.8, 1.2) for _ in range(stages)]
    if rng.random() < 0.5:
        forward[rng.randrange(stages)] *= rng.uniform(1, 1.5)
    share = rng.choice((0.0, 0.05, 0.2, 0.4))
    hops = [share * rng.uniform(0.5, 1.5) for _ in range(stages - 1)]
    return forward, [3 * seconds for seconds in forward], hops, micro_batches


def by_events(forward, backward, hops, micro_batches, in_flight):
    """The same by brute force: a clock that jumps to the next event; stages and wires are busy or free."""
    stages = len(forward)
    queues = [one_f_one_b(number, micro_batches) for number in in_flight]
    inputs = {("F", 0, k) for k in range(micro_batches)} | {("B", stages - 1, k) for k in range(micro_batches)}
    stage_ends = [None] * stages
    wires = {(kind, j): ([], None) for kind in "FB" for j in range(stages)}
    clock = 0.0
    while any(queues) or any(stage_ends):
        for j in range(stages):
            if stage_ends[j] is None and queues[j] and (queues[j][0][0], j, queues[j][0][1]) in inputs:
                kind, k = queues[j].pop(0)
                stage_ends[j] = clock + (forward if kind == "F" else backward)[j], kind, k
        for (kind, j), (waiting, sending) in wires.items():
            if sending is None and waiting:
                hop = hops[j if kind == "F" else j - 1]
                wires[kind, j] = waiting[1:], (clock + hop, waiting[0])
        events = [end[0] for end in stage_ends if end] + [sending[0] for _, sending in wires.values() if sending]
        if not events:
            raise AssertionError("deadlock")
        clock = min(events)
        for j, end in enumerate(stage_ends):
            if end and end[0] == clock:
                stage_ends[j] = None
                if 0 <= j + (1 if end[1] == "F" else -1) < stages:
                    wires[end[1], j][0].append(end[2])
        for (kind, j), (waiting, sending) in wires.items():
            if sending and sending[0] == clock:
                inputs.add((kind, j + (1 if kind == "F" else -1), sending[1]))
                wires[kind, j] = waiting, None
    return clock


def test_a_stage_alternates_after_its_warm_up():
    assert one_f_one_b(2, 3) == [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    assert one_f_one_b(5, 2) == [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    assert default_in_flight(3) == (3, 2, 1)


def test_two_stages_by_hand():
    # Stage 0: F0 0-1, F1 1-2; stage 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7; stage 0: B0 4-6, B1 7-9.
    run = run_pipeline([1, 1], [2, 2], [0], 2)
    assert run.forward_end_s == ((1, 2), (2, 5))
    assert run.backward_end_s == ((6, 9), (4, 7))
    assert run.total_s == 9


def test_the_recurrence_equals_an_event_simulation():
    rng = random.Random(0)
    for _ in range(1000):
        forward, backward, hops, micro_batches = random_pipeline(rng)
        in_flight = [number + rng.randint(0, 2) for number in default_in_flight(len(forward))]
        in_flight = sorted(in_flight, reverse=True)
        expected = by_events(forward, backward, hops, micro_batches, in_flight)
        assert run_pipeline(forward, backward, hops, micro_batches, in_flight).total_s == pytest.approx(expected, 1e-9)


def test_the_closed_form_is_close_to_the_recurrence():
    rng = random.Random(1)
    errors = []
    for _ in range(1000):
        forward, backward, hops, micro_batches = random_pipeline(rng)
        times = closed_form(np.array([forward]), np.array([backward]), np.array(hops))
        exact = run_pipeline(forward, backward, hops, micro_batches).total_s
        errors.append(float(times.of(micro_batches)[0]) / exact - 1)
    assert mean(map(abs, errors)) < 0.003
    assert max(map(abs, errors)) < 0.04


def test_one_stage_takes_its_micro_batches_in_turn():
    times = closed_form(np.array([[1.0]]), np.array([[3.0]]), np.zeros(0))
    assert [time[0] for time in times] == [4, 4, 4]
    assert run_pipeline([1], [3], [], 5).total_s == 20


def test_more_in_flight_hides_slow_hops():
    slow = run_pipeline([1, 1, 1], [2, 2, 2], [1, 1], 16).total_s
    assert run_pipeline([1, 1, 1], [2, 2, 2], [1, 1], 16, (6, 4, 1)).total_s < slow


def test_stages_that_would_wait_for_each_other_are_refused():
    with pytest.raises(PlanError, match="in_flight"):
        run_pipeline([1, 1], [1, 1], [0], 4, (1, 2))
