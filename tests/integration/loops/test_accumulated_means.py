"""Losses of loops under ``"batch"`` that accumulate, where the last step of an epoch has fewer micro-batches.

Budget: 20 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.combinations.compare import snapshot
from tests.integration.combinations.optimizers import Optimizing
from tests.integration.combinations.running import outcomes_by_name
from tests.integration.combinations.unequal import Rows, UnequalJob
from tests.support import run_deepspeed

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
    return outcomes_by_name({name: job(**changes) for name, changes in JOBS.items()})


@pytest.mark.timeout(300)  # the first case waits for all jobs, which share a start of ranks
@pytest.mark.parametrize("name", JOBS)
def test_a_short_last_step_of_a_loop_trains_as_on_one_process(name: str, outcomes: Any) -> None:
    assert outcomes[name].kind == "exact", outcomes[name]


def test_a_resumed_loop_goes_on_with_what_earlier_batches_showed_of_the_loss() -> None:
    """The first batch after the checkpoint would show a mean over samples, which a step before it was not."""
    for uninterrupted, resumed in run_deepspeed(_train_twice, 2):
        assert uninterrupted.keys() == resumed.keys()
        for name, value in uninterrupted.items():
            np.testing.assert_allclose(resumed[name], value, rtol=1e-6, atol=1e-8)


IGNORED = 3
# Steps of two micro-batches of 3 + 1 samples; labels of the first micro-batch of each step all count. The second step
# is short, so that a mean over samples of the step would weigh other than one of each micro-batch.
FULL_STEP, SHORT_STEP = [0, 1, 2, 0] + [0, IGNORED, 2, IGNORED], [2, 1, 0, 1] + [IGNORED, 1]


def _train_twice(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters after two steps: in one go, and with another engine for the second."""
    return _train(resumes=False), _train(resumes=True)


def _train(*, resumes: bool) -> dict[str, Any]:
    import deepspeed

    import ds_hetero

    handle = ds_hetero.register()
    config = {
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "heterogeneity": {"batch": [3, 1]},
    }
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randn(len(FULL_STEP) + len(SHORT_STEP), Rows("ignored").first.in_features, generator=generator)
    rows = [
        {"x": x, "y": torch.tensor(label), "tasks": torch.tensor(0)}
        for x, label in zip(numbers, FULL_STEP + SHORT_STEP, strict=True)
    ]

    def begin() -> tuple[Any, Any]:
        model = Rows("ignored").train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    model, engine = begin()
    for part in (rows[: len(FULL_STEP)], rows[len(FULL_STEP) :]):
        if resumes and engine.global_steps:
            engine.save_checkpoint("saved", "amid")
            engine.destroy()
            model, engine = begin()
            engine.load_checkpoint("saved", "amid")
        for batch in handle.for_engine(engine).dataloader(torch.utils.data.DataLoader(part, batch_size=3)):
            engine.backward(engine(**batch))
            engine.step()
    assert engine.global_steps == 2
    parameters = snapshot(model)
    engine.destroy()
    return parameters


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
