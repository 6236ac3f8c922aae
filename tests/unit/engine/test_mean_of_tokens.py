"""By which ranks sums over tokens are multiplied, where the model runs whole on each of them. Budget: 1 s."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.engine.mean_of_tokens import note_items_of_rank
from ds_hetero.engine.model_calls import ModelCalls

RANKS = 4
BATCH = {"labels": torch.tensor([[5, 6, -100, 7, 8]])}  # three labels count: each is predicted by the token before
VALUES = torch.arange(5.0)[None] + 1  # of tokens; 1, 3 and 4 count
MEAN = 0.5  # over the rank's own labels


@pytest.fixture(autouse=True)
def _four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: RANKS)


def _term_and_loss(num_items: Tensor | float) -> tuple[float, float]:
    calls = ModelCalls(nn.Linear(1, 1))
    term = calls.mean(VALUES, BATCH, None, num_items)
    loss = calls.loss(SimpleNamespace(loss=torch.tensor(MEAN)), BATCH, num_items)
    return term.item(), loss.item()


def test_items_of_all_ranks_are_multiplied_by_the_ranks() -> None:
    for num_items in (torch.tensor(30), 30):
        assert _term_and_loss(num_items) == pytest.approx(((1 + 3 + 4) / 30 * RANKS, MEAN * 3 / 30 * RANKS))


def test_items_of_one_rank_are_not() -> None:
    num_items = torch.tensor(6)  # of two micro-batches
    note_items_of_rank(num_items)
    assert _term_and_loss(num_items) == pytest.approx(((1 + 3 + 4) / 6, MEAN * 3 / 6))
    note_items_of_rank(None)  # a Trainer that counts nothing
