"""Training under the strict group: pipelines, gradient buckets, weighted ZeRO and new plans block nowhere for ever.

Each locked in its first step, or could, while ranks connected when they first happened to send: see
`ds_hetero.runtime.process_groups`. Budget: 40 s.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.loops.test_nccl_training import CHANGED_2, _train
from tests.integration.pipelines.test_pipeline_replan import moved_as_one_process
from tests.integration.pipelines.test_pipelines import trains_as_one_process
from tests.integration.tiny import UNEVEN_2, UNEVEN_4
from tests.support import run_deepspeed

SLOW = pytest.mark.slow
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


def _plan(*pipelines: Any) -> Any:
    return {
        "version": 2,
        "model": {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
        "pipelines": [
            {"micro_batch_size": size, "micro_batches": count, "stages": list(stages)}
            for size, count, stages in pipelines
        ],
    }


def _stage(ranks: list[int], first: int, last: int, **keys: Any) -> Any:
    return {"ranks": ranks, "layers": [first, last], **keys}


_SEQUENCE = {
    "version": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "layout": "zigzag",
    "groups": [{"ranks": [0, 1], "tokens": [3, 1], "heads": [3, 1]}],
}
_TWO = _plan((2, 3, [_stage([0], 0, 2), _stage([1], 2, 4)]))
PLANS = {
    "three stages": (3, _plan((2, 4, [_stage([0], 0, 1), _stage([1], 1, 3), _stage([2], 3, 4)])), TIED),
    "one stage owns all of what is tied": (
        2,
        {**_TWO, "zero": {"stage": 1, "owner_weights": {"0": 10000.0, "1": 0.0001}}},
        TIED,
    ),
    "a tensor stage": (3, _plan((2, 3, [_stage([0, 1], 0, 3, inner="tensor"), _stage([2], 3, 4)])), UNTIED),
    "a sequence stage": (
        3,
        _plan((2, 3, [_stage([0, 1], 0, 3, inner="sequence", schedule=_SEQUENCE), _stage([2], 3, 4)])),
        UNTIED,
    ),
    "two pipelines": (
        4,
        _plan((2, 3, [_stage([0], 0, 3), _stage([1], 3, 4)]), (1, 2, [_stage([2], 0, 1), _stage([3], 1, 4)])),
        TIED,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_pipelines_train_as_one_process_where_first_messages_block(name: str) -> None:
    world_size, plan, model = PLANS[name]
    errors = run_deepspeed(trains_as_one_process, world_size, plan, model, strict=True)
    assert max(error for error, _ in errors) < 1e-12  # fp64


@pytest.mark.parametrize("name", ["one", pytest.param("sequence", marks=SLOW)])
def test_layers_move_between_stages_where_first_messages_block(name: str) -> None:
    run_deepspeed(moved_as_one_process, 4, name, TIED, False, strict=True)


@pytest.mark.parametrize(
    ("world_size", "args"),
    [
        pytest.param(4, (1, UNEVEN_4), marks=SLOW),
        (4, (3, UNEVEN_4)),
        (2, (3, UNEVEN_2, [3, 1], CHANGED_2)),
        pytest.param(2, (2, UNEVEN_2, [3, 1], CHANGED_2), marks=SLOW),
    ],
    ids=["ZeRO 1", "ZeRO 3", "ZeRO 3, weighted, a new plan", "ZeRO 2, weighted, a new plan"],
)
def test_zero_trains_where_first_messages_block(world_size: int, args: tuple[Any, ...]) -> None:
    run_deepspeed(_train, world_size, *args, strict=True)
