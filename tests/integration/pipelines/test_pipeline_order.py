"""Parameters that every rank holds and only some use: gradients leave in the order of all ranks. Budget: 10 s."""

from __future__ import annotations

import pytest

from tests.integration.combinations.optimizers import Optimizing
from tests.integration.combinations.pipelines import PipelineJob
from tests.integration.combinations.running import outcomes_of
from tests.integration.pipelines.test_pipelines import HEADS, pipeline, plan_of

STAGES = pipeline(2, 2, {"ranks": [0], "layers": [0, 1]}, {"ranks": [1], "layers": [1, 4]})


@pytest.mark.parametrize("change", ["scaled output", "gate"])
def test_a_parameter_of_the_last_stage_alone_trains_as_on_one_process(change: str) -> None:
    job = PipelineJob(
        world_size=2,
        plan=plan_of(STAGES, kv_heads=HEADS),
        resumed=None,
        stage=1,
        tied=False,
        packed=False,
        lora=False,
        recomputed=False,
        change=change,
        loss="model",
        optimizing=Optimizing("SGD", False, "", 0.5),
        steps=3,
        evaluated=True,
    )
    outcome = outcomes_of({0: job})[0]
    assert outcome.kind == "exact", outcome
