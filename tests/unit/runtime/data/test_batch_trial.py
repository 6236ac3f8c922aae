"""What fits is found by trials that leave the model, its buffers and the random state as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ds_hetero.runtime.data.batch_trial import BatchTrial


class Bounded(nn.Module):
    """A model that runs out of memory with more than ``most`` rows, in the forward or the backward."""

    def __init__(self, most: int, where: str) -> None:
        super().__init__()
        self.most, self.where, self.tried = most, where, list[int]()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, rows: Tensor, scale: Tensor) -> dict[str, Tensor]:
        self.tried.append(len(rows))
        self.forwards += 1
        if self.where == "forward":
            self._expect_room(len(rows))
        hidden = self.dropout(self.layer(rows)) * scale
        if self.where == "backward":
            hidden.register_hook(lambda grad: self._expect_room(len(rows)))
        return {"loss": hidden.square().mean()} if self.where != "nowhere" else {"out": hidden}

    def _expect_room(self, rows: int) -> None:
        if rows > self.most:
            raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_most_rows_that_fit_are_found_and_nothing_is_left_behind(where: str) -> None:
    model = Bounded(7, where)
    fired = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    trial = BatchTrial(model)
    assert trial.max_samples(12, 4) == 12  # nothing is known yet
    trial.note((torch.randn(4, 4),), {"scale": torch.ones(())})
    state = torch.get_rng_state()
    assert trial.max_samples(12, 4) == 7
    assert (model.tried[0], max(model.tried[1:])) == (12, 8)
    assert trial.max_samples(6, 4) == 6
    assert torch.equal(torch.get_rng_state(), state)
    assert float(model.forwards) == 0 and fired == []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not trial.is_running


def test_a_model_without_a_loss_is_tried_by_its_outputs() -> None:
    model = Bounded(7, "nowhere")
    trial = BatchTrial(model)
    trial.note((torch.randn(4, 4),), {"scale": torch.ones(())})
    assert trial.max_samples(12, 4) == 12 and model.tried == [12]


def test_the_longest_samples_are_tried() -> None:
    lengths = []

    class Length(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            lengths.append(rows.shape[1])
            return rows.sum().requires_grad_()

    trial = BatchTrial(Length())
    for length in (3, 9, 5):
        trial.note((torch.zeros(2, length),), {})
    trial.max_samples(4, 2)
    assert lengths == [9]


def test_a_model_that_cannot_be_run_so_is_taken_to_fit(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            raise ValueError("three rows only")

    trial = BatchTrial(Broken())
    trial.note((torch.zeros(3, 2),), {})
    assert trial.max_samples(6, 3) == 6
    assert "a trial forward of 6 samples failed, so ds_hetero assumes that they fit into memory" in caplog.text
