"""A module that runs whole: whose labels count after a step that was filled up. Budget: 1 s."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from ds_hetero.engine.model_calls import ModelCalls
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.runtime.data.loss_units import UnitCounts
from ds_hetero.runtime.data.sample_loader import MicroBatchWeights
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.schedule import Group, Schedule

BATCH = {"labels": torch.tensor([[-100, 5, 6, -100, 7]])}


def test_labels_of_an_evaluation_count_after_an_epoch_whose_last_step_was_filled_up():
    """A rank's last micro-batch of training may be a copy that only fills a step up; its labels alone count nothing."""
    module = nn.Linear(2, 2)
    model = WholeModel(module, _replica())
    calls = ModelCalls(module, model)
    model.give(_weights(UnitCounts(0)))
    assert calls.count_labels(BATCH) == 0
    module.eval()
    assert calls.count_labels(BATCH) == 3
    module.train()
    model.give(_weights(UnitCounts(1)))
    assert calls.count_labels(BATCH) == 3


def _weights(counts: UnitCounts) -> MicroBatchWeights:
    return MicroBatchWeights(index=0, counts=counts, counts_of_step=UnitCounts(1), micro_batches=1)


def _replica() -> Replica:
    schedules = []
    for rank in range(2):
        lone = Group(ranks=(rank,), tokens=(1,), heads=(1,))
        schedules.append(Schedule(num_heads=1, num_kv_heads=1, groups=(lone,)))
    split = BatchSplit(micro_batch_sizes=(1, 1), micro_batches=(1, 1))
    group = cast("torch.distributed.ProcessGroup", None)
    return Replica(plan=Plan.of_replicas(schedules, split), rank=0, sp_group=group, a2a_group=None)
