"""Training steps keep NCCL's rules: every ZeRO stage with uneven schedules, weighted partitions, replicas, a new plan.

What the ranks post with torch.distributed, DeepSpeed's calls among it, is recorded on gloo and replayed by the rules.

Budget: 30 s; further stages are marked slow.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.integration.tiny import UNEVEN_2, UNEVEN_4, adam, batches, ds_config, llama, samples
from tests.support import run_deepspeed

STEPS = 2
# The other way round than `UNEVEN_2`.
CHANGED_2 = copy.deepcopy(UNEVEN_2)
for _group, _tokens in zip(CHANGED_2["groups"], (1, 2), strict=True):  # type: ignore
    _group["tokens"] = [_tokens]
ALONE = {"version": 1, "num_heads": 4, "num_kv_heads": 2, "groups": [{"ranks": [2], "tokens": [1], "heads": [4]}]}
REPLICAS = {
    "version": 1,
    "replicas": [
        {"schedule": UNEVEN_2, "micro_batch_size": 2, "micro_batches": 2},
        {"schedule": ALONE, "micro_batch_size": 1, "micro_batches": 1},
    ],
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=SLOW) for stage in (0, 1, 2)), 3])
def test_steps_of_an_uneven_schedule_keep_the_rules(stage: int) -> None:
    run_deepspeed(_train, 4, stage, UNEVEN_4, nccl_rules=True)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
def test_steps_with_weighted_partitions_and_a_new_plan_keep_the_rules(stage: int) -> None:
    run_deepspeed(_train, 2, stage, UNEVEN_2, [3, 1], CHANGED_2, nccl_rules=True)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=SLOW)])
def test_steps_of_unequal_replicas_keep_the_rules(stage: int) -> None:
    run_deepspeed(_train_replicas, 3, stage, nccl_rules=True)


def _train(rank: int, stage: int, schedule: Any, weights: list[int] | None = None, changed: Any = None) -> None:
    import deepspeed

    import ds_hetero
    from ds_hetero import Schedule

    handle = ds_hetero.register()
    config = ds_config(stage, schedule, zero={"stage3_param_persistence_threshold": 0})
    if weights is not None:
        config["heterogeneity"]["zero_partition"] = weights
    if changed is not None:
        config["heterogeneity"]["replan"] = {"enabled": True, "interval_steps": 3}
    engine, *_ = deepspeed.initialize(model=(model := llama()), optimizer=adam(model), config=config)
    for number, batch in enumerate(handle.dataloader(batches(2 * STEPS), batches="same")):
        engine.backward(handle.loss(engine(**batch), batch))
        engine.step()
        if changed is not None and number == STEPS - 1:
            _change_plan(handle, changed)
    assert changed is None or handle.schedule == Schedule.from_dict(changed)
    engine.save_checkpoint("saved")
    engine.destroy()


def _change_plan(handle: Any, schedule: Any) -> None:
    """As a job does it that is resumed after re-planning."""
    from ds_hetero import Schedule

    replanning = handle.registry.latest.monitor.replanning
    assert replanning.resume(handle.plan.with_schedules([Schedule.from_dict(schedule)]).to_dict())


def _train_replicas(rank: int, stage: int) -> None:
    import deepspeed
    from torch.utils.data import DataLoader

    import ds_hetero

    handle = ds_hetero.register()
    config = ds_config(stage, REPLICAS)
    del config["train_micro_batch_size_per_gpu"]
    engine, *_ = deepspeed.initialize(model=(model := llama()), optimizer=adam(model), config=config)
    whole: Any = DataLoader(samples(5 * STEPS), batch_size=5)  # type: ignore[arg-type]
    for batch in handle.dataloader(whole):
        engine.backward(handle.loss(engine(**batch), batch))
        engine.step()
    assert engine.global_steps == STEPS
