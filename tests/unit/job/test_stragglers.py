"""A slow rank is named soon, noise names nobody, and a rank that recovers is said to have caught up."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from math import inf

import pytest

from ds_hetero.decision.batches import plan_of_batches
from ds_hetero.decision.facts import TrainingFacts
from ds_hetero.job.batch_search import BatchSearch
from ds_hetero.job.job_times import JobTimes
from ds_hetero.job.rank_times import RECENT_STEPS, RankTimes
from ds_hetero.job.stragglers import SHARE_SAMPLES, Stragglers, scores
from ds_hetero.job.unit_cost import RankUnitCosts
from ds_hetero.runtime.step_clock import StepTimes
from ds_hetero.values.section import HeterogeneitySection, ReplanSection


def test_scores_are_against_the_typical_rank():
    assert scores([1.0, 1.0, 2.0, 1.0]) == [1.0, 1.0, 0.5, 1.0]
    assert scores([1.0, 1.25]) == [1.0, 0.8]  # the faster one of two
    assert scores([0.0, 3.0, 1.5]) == [1.0, 0.5, 1.0]  # a rank without work is behind nobody
    assert scores([0.0, 0.0]) == [1.0, 1.0]


def test_replicas_of_one_rank_are_told_to_share_out_samples():
    times = [_times(seconds, 2.0, deque([seconds] * RECENT_STEPS)) for seconds in (1.0, 2.0)]
    (line,) = Stragglers(lambda _: 0.25, SHARE_SAMPLES).observe(5, JobTimes(times))
    assert line.endswith('save 25% of a step: "schedule" with the file that "ds-hetero replicas --out FILE" writes.')
    (line,) = Stragglers(lambda _: 0.25).observe(5, JobTimes(times))
    assert line.endswith('Re-planning is predicted to save 25% of a step: "replan": {"enabled": true}.')


def test_batches_by_speed_are_looked_for_again_when_the_first_steps_show_nothing():
    plan = plan_of_batches([4, 4], TrainingFacts(), 2)
    alike, unlike = (
        JobTimes([_times(seconds, 3.0, deque([seconds])) for seconds in of_ranks])
        for of_ranks in ((3.0, 3.0), (1.0, 3.0))
    )
    search = BatchSearch(HeterogeneitySection(batch="by_speed"))
    assert search.propose(3, plan, alike) == []
    (change,) = search.propose(6, plan, unlike)
    assert change.batch == (6, 2)
    assert [search.propose(9, plan, alike), search.propose(12, plan, alike)] == [[], []]
    assert search.propose(15, plan, unlike) == []  # it has looked often enough
    watching = BatchSearch(HeterogeneitySection(batch="by_speed", replan=ReplanSection(enabled=True)))
    assert [len(watching.propose(step, plan, alike if step < 9 else unlike)) for step in range(10)] == [0] * 9 + [1]


def test_a_rank_that_ran_out_of_memory_is_given_no_more_from_then_on():
    plan = plan_of_batches([4, 4], TrainingFacts(), 2)
    seen = JobTimes([_times(seconds, 3.0, deque([seconds])) for seconds in (1.0, 3.0)])
    search = BatchSearch(HeterogeneitySection(batch="by_speed"), tests_memory=True)
    (change,) = search.propose(3, plan, seen)
    assert search.learn(change.applied_to(plan), [5, 2]) == [
        "rank 0 ran out of memory when 6 samples were tried, and goes on with 5 at most"
    ]
    (change,) = search.propose(3, plan, seen)  # the same look
    assert change.batch == (5, 3) and search.learn(change.applied_to(plan), [5, 3]) == []
    assert search.propose(6, change.applied_to(plan), seen) == []  # more for rank 0 is all that would be faster


def _follow(
    num_ranks: int, steps: int, interval: int, noise: float, speed: Callable[[int, int], float], seed: int = 0
) -> list[tuple[int, str]]:
    """What is said in a job whose rank ``r`` has ``speed(r, step)``, one line per (step, text)."""
    draw = random.Random(seed)
    stragglers = Stragglers(lambda times: 0.25)
    recent: Sequence[deque[float]] = [deque(maxlen=RECENT_STEPS) for _ in range(num_ranks)]
    said = []
    for step in range(1, steps + 1):
        own = [draw.gauss(1.0, noise) / speed(rank, step) for rank in range(num_ranks)]
        for rank, seconds in enumerate(own):
            recent[rank].append(seconds)
        if step % interval == 0:
            times = [_times(seconds, max(own), recent[rank]) for rank, seconds in enumerate(own)]
            said += [(step, line) for line in stragglers.observe(step, JobTimes(times))]
    return said


def _times(compute_s: float, step_s: float, recent: Sequence[float]) -> RankTimes:
    costs = RankUnitCosts()
    step = StepTimes(
        step_s=step_s,
        attention_s=0.4 * compute_s,
        all_to_all_s=0.0,
        ring_wait_s=0.0,
        idle_s=step_s - compute_s,
        model_s=0.6 * compute_s,
        attention_flops=100,
        attention_backward_flops=70,
        tokens=10,
        length=20,
    )
    costs.add(step)
    return RankTimes.from_steps([step], costs, inf, 0.0, recent)


@pytest.mark.parametrize("interval", [5, 10])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("slow_from", [1, 51, 53, 57])
def test_a_rank_at_70_percent_is_named_within_20_steps(interval, num_ranks, slow_from):
    said = _follow(num_ranks, 100, interval, 0.05, lambda rank, step: 0.7 if rank == 1 and step >= slow_from else 1.0)
    (step, line), *others = said
    assert not others and step < slow_from + 20
    assert f"step {step}: rank 1 is a straggler" in line and "save 25% of a step" in line


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_noise_of_5_percent_names_nobody_in_500_steps(num_ranks):
    for seed in range(4 if num_ranks == 64 else 20):
        for interval in (5, 10):
            assert _follow(num_ranks, 500, interval, 0.05, lambda rank, step: 1.0, seed) == []


def test_who_catches_up_is_named_again():
    said = _follow(4, 120, 5, 0.02, lambda rank, step: 0.7 if rank == 2 and 20 < step <= 60 else 1.0)
    assert [line.partition(": ")[2][:30] for _, line in said] == [
        "rank 2 is a straggler: it comp",
        "rank 2 is no longer a straggle",
    ]
