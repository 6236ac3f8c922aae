"""A layer that one rank alone freezes amid training, where models run whole: refused by name before its backward ends.

Budget: 25 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.integration.tiny import ds_config
from tests.support import run_deepspeed

STEPS, FROZEN_AT = 4, 2
SECTIONS: dict[str, dict[str, Any]] = {"plain data parallelism": {}, "unlike batches": {"batch": [3, 1]}}


class Net(nn.Module):
    """A few layers and their loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def _train(rank: int, stage: int, section: dict[str, Any], culprits: list[int]) -> int:
    """Steps that were taken."""
    import deepspeed

    import ds_hetero

    handle, model = ds_hetero.register(), Net()
    config = ds_config(stage, None, sequence_parallel_size=1, heterogeneity=section, gradient_clipping=0.0)
    if section:
        del config["sequence_parallel_size"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rows = torch.rand(4 * STEPS, 8, generator=torch.Generator().manual_seed(1))
    for step, batch in enumerate(handle.dataloader(DataLoader(list(rows), batch_size=2))):  # type: ignore[arg-type]
        if step == FROZEN_AT and rank in culprits:
            model.layers[2].requires_grad_(False)
        engine.backward(engine(batch))
        engine.step()
        print(f"steps taken: {engine.global_steps}", flush=True)
    return int(engine.global_steps)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_rank_alone_is_refused_by_name(stage: int, section: str) -> None:
    with pytest.raises(AssertionError) as failure:
        run_deepspeed(_train, 2, stage, SECTIONS[section], [1])
    text = str(failure.value)
    assert "requires_grad" in text and "on every rank alike" in text, text
    assert f"steps taken: {FROZEN_AT}" in text and f"steps taken: {FROZEN_AT + 1}" not in text, text


@pytest.mark.parametrize("section", SECTIONS)
def test_all_ranks_may_freeze(section: str) -> None:
    first, second = run_deepspeed(_train, 2, 0, SECTIONS[section], [0, 1])
    assert first == second > FROZEN_AT
