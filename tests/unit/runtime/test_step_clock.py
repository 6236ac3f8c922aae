"""What a step is divided into, told by a clock that only moves when the test says so."""

from __future__ import annotations

import pytest
import torch

from ds_hetero.runtime import step_clock as clock_module
from ds_hetero.runtime.step_clock import ALL_TO_ALL, ATTENTION, IDLE, RING_WAIT, UNTIMED, StepClock
from ds_hetero.values.plans.timetable import BACKWARD, FORWARD


class Times:
    """A clock to be measured with, and the time that it shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.device_is_at, self.stream = 0.0, float("inf"), 0
        reading = (
            lambda: self.now,
            lambda begin, end: end - begin,
            lambda mark: mark <= self.device_is_at,
            lambda: self.stream,
        )
        monkeypatch.setattr(clock_module, "_wall_clock", lambda: reading)
        self.clock = StepClock(torch.device("cpu"))

    def spend(self, seconds: float, kind: str | None = None) -> None:
        if kind is None:
            self.now += seconds
        else:
            with self.clock.phase(kind, kind):
                self.now += seconds

    def micro_batch(self) -> None:
        with self.clock.forward(training=True):
            self.spend(0.01, IDLE)  # agreeing on the batch
            self.block()
            self.spend(4)  # the head
        self.spend(50)  # a loss of the user's, which may wait for other ranks
        with self.clock.backward():
            self.block()
            self.spend(7)  # may be a wait for gradients

    def block(self) -> None:
        self.spend(2)
        self.spend(0.1, ALL_TO_ALL)
        self.spend(3, ATTENTION)
        self.spend(0.5, RING_WAIT)
        self.spend(0.1, ALL_TO_ALL)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    return Times(monkeypatch)


def test_a_step_of_two_micro_batches(times):
    times.spend(100)  # before the first forward
    for _ in range(2):
        times.micro_batch()
        times.clock.count_attention(20, backward=False)
        times.clock.count_attention(50, backward=True)
        times.clock.count_batch(2, 30, 40)
    times.spend(1, IDLE)
    times.clock.end_step()
    (step,) = times.clock.pop_finished()
    assert step.step_s == pytest.approx(2 * (0.01 + 2 * 5.7 + 4 + 50 + 7) + 1)
    assert step.attention_s == pytest.approx(12)
    assert step.all_to_all_s == pytest.approx(0.8)
    assert step.ring_wait_s == pytest.approx(2)
    assert step.idle_s == pytest.approx(1.02)
    assert step.model_s == pytest.approx(16)
    assert (step.attention_flops, step.attention_backward_flops) == (140, 100)
    assert (step.tokens, step.length) == (120, 40)
    assert times.clock.pop_finished() == []


def test_a_backward_without_exchanges_counts_up_to_its_gradients_less_the_waits_in_it(times):
    for _ in range(2):
        with times.clock.forward(training=True):
            times.spend(4)
            times.spend(0.5, IDLE)  # ZeRO-3 gathers
        with times.clock.backward(exchanges=False):
            times.spend(1, IDLE)  # the loss is scaled
            times.spend(6)
            times.spend(0.25, IDLE)  # a bucket of gradients
            times.spend(2)
            times.clock.note_gradients()
            times.spend(3, IDLE)  # the last buckets
            times.spend(20)
    times.clock.end_step()
    (step,) = times.clock.pop_finished()
    assert step.model_s == pytest.approx(2 * (4 + 6 + 2))
    assert step.idle_s == pytest.approx(2 * (0.5 + 1 + 0.25 + 3))
    assert [one.kind for one in step.passes] == [FORWARD, BACKWARD] * 2


def test_a_step_begins_where_the_last_one_ended(times):
    for _ in range(2):
        times.spend(3)  # the loader
        times.micro_batch()
        times.clock.end_step()
    first, second = times.clock.pop_finished()
    assert second.step_s - first.step_s == pytest.approx(3)


def test_steps_that_the_device_has_not_finished_are_given_out_later(times):
    for _ in range(3):
        times.micro_batch()
        times.clock.end_step()
    times.device_is_at = times.now - 1
    assert len(times.clock.pop_finished()) == 2
    times.device_is_at = times.now
    assert len(times.clock.pop_finished()) == 1


def test_a_step_with_an_evaluation_in_it_is_dropped(times):
    times.micro_batch()
    with times.clock.forward(training=False):
        times.spend(50, ATTENTION)
    times.clock.end_step()
    times.micro_batch()
    times.clock.end_step()
    (step,) = times.clock.pop_finished()
    assert step.attention_s == pytest.approx(6)


def test_a_phase_inside_a_phase_belongs_to_the_outer_one(times):
    with times.clock.forward(True), times.clock.phase(IDLE, "outer"), times.clock.phase(ATTENTION, "inner"):
        times.now += 1
    times.clock.end_step()
    (step,) = times.clock.pop_finished()
    assert (step.idle_s, step.attention_s, step.model_s) == (1, 0, 0)


def test_a_phase_on_another_stream_takes_no_time_of_this_one(times):
    with times.clock.forward(True):
        times.spend(2, ATTENTION)
        times.stream = 7
        times.spend(3, IDLE)
        times.stream = 0
    times.clock.end_step()
    (step,) = times.clock.pop_finished()
    assert (step.attention_s, step.idle_s, step.model_s) == (2, 0, 3)


def test_a_failing_phase_leaves_the_clock_in_order(times):
    with pytest.raises(ValueError), times.clock.forward(True), times.clock.phase(IDLE, "fails"):
        raise ValueError
    with times.clock.forward(True):
        times.spend(2, ATTENTION)
    times.clock.end_step()
    assert times.clock.pop_finished()[0].attention_s == 2


@pytest.mark.parametrize("clock", [UNTIMED, StepClock(torch.device("cpu"))])
def test_names_are_in_the_trace_whether_or_not_times_are_taken(clock):
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        clock.phase(ATTENTION, "attention"),
    ):
        torch.ones(2).sum()
    assert "ds_hetero.attention" in {event.key for event in profile.key_averages()}
