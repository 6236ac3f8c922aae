"""Labels of micro-batches that only fill an optimizer step up, and of engines that have none. Budget: 5 s."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_hetero.engine import handle as handle_module
from ds_hetero.engine.handle import Handle
from ds_hetero.engine.model_calls import ModelCalls
from ds_hetero.engine.trained.unlike_batches import UnlikeBatches
from ds_hetero.runtime.data.loss_units import UnitCounts
from ds_hetero.runtime.data.sample_loader import MicroBatchCounts

BATCH = {"labels": torch.tensor([[1, 2, -100, 3]])}  # two that count: no token comes before the first one
NOTHING = MicroBatchCounts(index=1, counts=UnitCounts(0), counts_of_step=UnitCounts(4), micro_batches=2)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle_module, "count_items", lambda counted, device: torch.as_tensor(counted))


def _unlike_batches() -> UnlikeBatches:
    replica: Any = SimpleNamespace(sp_size=1)
    batches = UnlikeBatches(nn.Linear(2, 2), replica)
    batches.give(NOTHING)
    return batches


def _counted(batches: UnlikeBatches) -> tuple[int, int]:
    """Labels of `BATCH` by the handle, and in its losses."""
    registry: Any = SimpleNamespace(in_training=[SimpleNamespace(batches=batches)])
    return int(Handle(registry).count_items([BATCH])), int(ModelCalls(batches.model, batches).count_labels(BATCH))


def test_a_filler_counts_no_label() -> None:
    assert _counted(_unlike_batches()) == (0, 0)


def test_an_evaluation_after_a_filler_counts_its_own_labels() -> None:
    batches = _unlike_batches()
    batches.model.eval()
    assert _counted(batches) == (2, 2)


def test_the_next_micro_batch_with_a_sample_counts_its_labels() -> None:
    batches = _unlike_batches()
    batches.give(replace(NOTHING, counts=UnitCounts(1)))
    assert _counted(batches) == (2, 2)


def test_labels_are_counted_for_an_engine_that_was_prepared_without_a_section() -> None:
    """Or is of pipelines: the registry finds neither among the models with a section."""
    registry: Any = SimpleNamespace(find=lambda model: None, latest=None)
    assert int(Handle(registry, nn.Linear(2, 2)).count_items([BATCH])) == 2
