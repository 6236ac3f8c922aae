"""Losses of loops under ``"batch"`` that accumulate, where the last step of an epoch has fewer micro-batches.

Budget: 20 s.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.combinations.optimizers import Optimizing
from tests.integration.combinations.running import outcomes_of
from tests.integration.combinations.unequal import UnequalJob

# Micro-batches are of 3 + 1 samples and a step is two of them: 8 samples.
ONE_MICRO_BATCH, SHORT_MICRO_BATCH, LESS_THAN_ONE = 8 + 4, 8 + 6, 8 + 3
JOBS: dict[str, dict[str, Any]] = {
    "a mean over samples": {"rows": SHORT_MICRO_BATCH},
    "a mean over weights": {"module": "class weights", "rows": ONE_MICRO_BATCH},
    "a mean over weights, a short micro-batch": {"module": "class weights", "rows": SHORT_MICRO_BATCH},
    "a mean over weights, less than a micro-batch": {"module": "class weights", "rows": LESS_THAN_ONE},
    "labels that are ignored": {"module": "ignored", "rows": SHORT_MICRO_BATCH, "first_alike": True},
    "a declared mean over tokens": {"module": "text, own loss", "rows": ONE_MICRO_BATCH},
    "a penalty beside a mean": {"module": "penalty", "rows": ONE_MICRO_BATCH},
    "a mean over tokens and one over samples": {"module": "text, annealed", "rows": SHORT_MICRO_BATCH},
}


@pytest.fixture(scope="module")
def outcomes() -> Any:
    jobs = {number: job(**changes) for number, changes in enumerate(JOBS.values())}
    return dict(zip(JOBS, outcomes_of(jobs).values(), strict=True))


@pytest.mark.timeout(300)  # the first case waits for all jobs, which share a start of ranks
@pytest.mark.parametrize("name", JOBS)
def test_a_short_last_step_of_a_loop_trains_as_on_one_process(name: str, outcomes: Any) -> None:
    assert outcomes[name].kind == "exact", outcomes[name]


def job(**changes: Any) -> UnequalJob:
    plain: dict[str, Any] = {
        "world_size": 2,
        "batch": (3, 1),
        "stage": 1,
        "module": "mean",
        "optimizing": Optimizing("SGD", False, "", 0.0),
        "order": "sequential",
        "rows": ONE_MICRO_BATCH,
        "accumulated": 2,
        "steps": 3,
        "first_alike": False,
        "weights": (),
        "evaluated": False,
    }
    return UnequalJob(**{**plain, **changes})
