"""The unit of a loss is found by two rows, and a loss that is no mean over them is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ds_hetero.errors import ConfigError
from ds_hetero.runtime.data.loss_units import UnitCounts, probe, unit_of_probes


def _logits(batch: dict[str, Tensor]) -> Tensor:
    table = torch.randn(50, 50, generator=torch.Generator().manual_seed(3))
    return table[batch["ids"]]


def _of_labels(batch: Any) -> Tensor:
    return cross_entropy(_logits(batch).flatten(0, 1), batch["labels"].flatten())


def _of_tokens(batch: Any) -> Tensor:
    return cross_entropy(_logits(batch)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def _of_rows(batch: Any) -> Tensor:
    each = cross_entropy(_logits(batch).flatten(0, 1), batch["labels"].flatten(), reduction="none")
    each = each.view_as(batch["labels"])
    return (each.sum(1) / batch["labels"].ne(-100).sum(1)).mean()


def _batch(rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(rows))
    return {"ids": ids, "labels": ids.roll(1, 1)}


@pytest.mark.parametrize(
    ("loss", "unit"), [(_of_labels, "label_mean"), (_of_tokens, "token_mean"), (_of_rows, "sample_mean")]
)
@pytest.mark.parametrize("rows", [1, 4])
def test_the_unit_of_a_mean_is_found(loss: Callable[[Any], Tensor], unit: str, rows: int) -> None:
    assert unit_of_probes([probe(loss, _batch(rows), rows), probe(loss, _batch(2), 2)], "Model") == unit


def _contrastive(batch: Any) -> Tensor:
    features = _logits(batch).mean(1)
    return cross_entropy(features @ features.T, torch.arange(len(features)))


@pytest.mark.parametrize("loss", [_contrastive, lambda batch: _logits(batch).square().sum()], ids=["rows", "sum"])
def test_a_loss_between_rows_and_a_sum_are_refused(loss: Callable[[Any], Tensor]) -> None:
    with pytest.raises(ConfigError, match="not a mean over the samples or labels"):
        unit_of_probes([probe(loss, {"ids": _batch()["ids"]}, 4)], "Model")


def test_a_loss_that_says_nothing_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="does not show in the first batch"):
        unit_of_probes([probe(lambda batch: torch.ones(()), _batch(), 4)], "Model")


def test_counts_follow_the_labels_that_count() -> None:
    labels = torch.tensor([[1, 2, -100], [-100, 5, 6]])
    assert UnitCounts.of({"labels": labels}, 2) == (2, 4, 3)
    assert UnitCounts.of({"shift_labels": labels}, 2) == (2, 4, 4)
    assert UnitCounts.of({"labels": torch.tensor([1, -100, 3])}, 3) == (2, 0, 0)
    assert UnitCounts.of((torch.zeros(3), torch.zeros(3)), 3) == (3, 0, 0)
