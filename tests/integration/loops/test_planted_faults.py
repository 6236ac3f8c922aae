"""A sample of `python -m benchmarks.planted`: faults are found where they begin, odd scripts are left alone.

Budget: 25 s.
"""

from __future__ import annotations

import pytest

from benchmarks.planted.controls import Penalties, Quarter, TwoForwards
from benchmarks.planted.job import Job, Trace, run_on_ranks
from benchmarks.planted.reported import MeanOfMeans
from benchmarks.planted.unforeseen import (
    AutocastOnOneRank,
    BackwardOfPartsLater,
    BufferFollows,
    DepthByRank,
    EvalOnOneRank,
    FrozenLater,
    HookOnOneRank,
    LocalBaseline,
    PositionsOff,
    PositionWeights,
    StaleBatch,
    WeightInPlace,
)
from benchmarks.planted.verdict import FOUND, TOLD, judge
from tests.support import run_deepspeed

FAULTS: list[type[Job]] = [
    MeanOfMeans,
    PositionsOff,
    WeightInPlace,
    EvalOnOneRank,
    FrozenLater,
    AutocastOnOneRank,
    HookOnOneRank,
    BufferFollows,
    StaleBatch,
    DepthByRank,
    BackwardOfPartsLater,
    LocalBaseline,
    PositionWeights,
]
CONTROLS: list[type[Job]] = [Quarter, Penalties, TwoForwards]


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Trace]]:
    jobs = [*FAULTS, *CONTROLS]
    by_rank = run_deepspeed(run_on_ranks, 2, jobs, True, timeout_s=200)
    return {job.name: [of_rank[number] for of_rank in by_rank] for number, job in enumerate(jobs)}


@pytest.mark.parametrize("job", FAULTS, ids=lambda job: job.name)
def test_a_fault_is_found_at_the_step_where_it_begins(job: type[Job], traces: dict[str, list[Trace]]) -> None:
    verdict = judge(job, traces[job.name], None)
    # A hook may only look; by what tokens are weighed is the script's own affair.
    is_told = job in (HookOnOneRank, LocalBaseline, PositionWeights)
    expected = (TOLD, 0) if is_told else (FOUND, 2)
    assert (verdict.verdict, verdict.ended) == expected, verdict


@pytest.mark.parametrize("job", CONTROLS, ids=lambda job: job.name)
def test_an_odd_script_that_is_right_is_left_alone(job: type[Job], traces: dict[str, list[Trace]]) -> None:
    assert [trace.message for trace in traces[job.name]] == ["", ""]
