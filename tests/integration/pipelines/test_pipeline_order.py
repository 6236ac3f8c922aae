"""Parameters that every rank holds and only some use: gradients leave in the order of all ranks. Budget: 20 s."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.combinations.optimizers import Optimizing
from tests.integration.combinations.pipelines import PipelineJob
from tests.integration.combinations.running import outcomes_of
from tests.integration.pipelines.test_pipelines import HEADS, pipeline, plan_of

STAGES = pipeline(2, 2, {"ranks": [0], "layers": [0, 1]}, {"ranks": [1], "layers": [1, 4]})


# Each pipeline has rows of its own.
ALONE = [pipeline(1, 1, {"ranks": [rank], "layers": [0, 4]}) for rank in range(2)]
IN_STAGES = [
    pipeline(1, 1, {"ranks": [rank], "layers": [0, 1]}, {"ranks": [rank + 1], "layers": [1, 4]}) for rank in (0, 2)
]


@pytest.mark.parametrize("change", ["scaled output", "gate"])
def test_a_parameter_of_the_last_stage_alone_trains_as_on_one_process(change: str) -> None:
    outcome = outcomes_of({0: job(2, [STAGES], change)})[0]
    assert outcome.kind == "exact", outcome


@pytest.mark.parametrize("pipelines", [ALONE, IN_STAGES], ids=["of one stage", "of two stages"])
def test_experts_that_one_pipeline_uses_and_another_does_not_train_as_on_one_process(
    pipelines: list[dict[str, Any]],
) -> None:
    num_ranks = sum(len(each["stages"]) for each in pipelines)
    outcome = outcomes_of({0: job(num_ranks, pipelines, "experts by row")})[0]
    assert outcome.kind == "exact", outcome


def job(num_ranks: int, pipelines: list[dict[str, Any]], change: str) -> PipelineJob:
    return PipelineJob(
        world_size=num_ranks,
        plan=plan_of(*pipelines, kv_heads=HEADS),
        resumed=None,
        stage=1,
        tied=False,
        packed=False,
        lora=False,
        recomputed=False,
        change=change,
        loss="model",
        optimizing=Optimizing("SGD", False, "", 0.5),
        steps=4,
        evaluated=True,
    )
