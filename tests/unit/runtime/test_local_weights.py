"""Weights of tokens in a loss: those made of a rank's part alone are told. Budget: 2 s."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hetero.runtime.data.shard_info import ShardInfo, attach
from ds_hetero.runtime.step_checks import LocalWeights
from ds_hetero.runtime.step_checks.protocol import Undecided

LENGTH, ROWS = 40, 2
PARTS = [(0, 26), (26, 40)]  # places of the ranks
REWARDS = torch.rand((ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
LABELS = torch.full((ROWS, LENGTH), 5)
LABELS[:, :3] = -100
VALUES = torch.rand((ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
DOCUMENT = 20  # tokens of the first document, where places begin again

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _verdict(loss: Loss, positions: Tensor | None = None, steps: int = 1, parts: Any = None) -> Any:
    """Of a loss of two ranks' values of tokens, rewards, labels and places; of the last step."""
    places = torch.arange(LENGTH) if positions is None else positions
    checks, verdict = [], None
    for _ in range(steps):
        rows = []
        for rank, (start, stop) in enumerate(parts or PARTS):
            labels = LABELS[:, start:stop]
            info = ShardInfo(placement=SimpleNamespace(), labels=labels)  # type: ignore[arg-type]
            held = attach(places[None, start:stop].expand(ROWS, -1).clone(), info)
            if len(checks) == rank:
                replica = SimpleNamespace(replica_id=0)
                checks.append(LocalWeights(SimpleNamespace(replica=replica, latest_positions=held)))  # type: ignore[arg-type]
            values = VALUES[:, start:stop].clone().requires_grad_() * 1
            checks[rank].note_values(loss(values, REWARDS[:, start:stop], labels, held))
            rows.append(torch.cat([part.double() for part in checks[rank].numbers()]).tolist())
            assert len(rows[-1]) == LocalWeights.width
        verdict = checks[0].verdict(rows)
    return verdict


def _of_labels(rewards: Tensor, labels: Tensor) -> Tensor:
    return rewards[labels != -100]


MEAN, COUNT = REWARDS.mean(), REWARDS.numel()  # of the whole batch
RIGHT: dict[str, Loss] = {
    "no weights": lambda x, r, y, p: x,
    "rewards": lambda x, r, y, p: x * r,
    "an advantage over the whole batch": lambda x, r, y, p: (x * (r - MEAN)).sum() / COUNT,
    "a mask of labels": lambda x, r, y, p: x * y.ne(-100).float(),
    "weights by class": lambda x, r, y, p: x * torch.tensor([0.5, 2.0])[(r > 0.5).long()],
    "weights by place": lambda x, r, y, p: x * (p / LENGTH),
    "integers by place": lambda x, r, y, p: x * p,
    "a mask": lambda x, r, y, p: x * y.ne(-100),
    "one number": lambda x, r, y, p: x * 0.25,
    "a number for each row": lambda x, r, y, p: x * torch.tensor([[0.3], [-0.3]]),
    "in half precision": lambda x, r, y, p: (x.half() * (r - r.mean()).half()).float(),
}
CENTRED: dict[str, Loss] = {
    "over the rank's tokens": lambda x, r, y, p: x * (r - r.mean()),
    "and whitened": lambda x, r, y, p: ((r - r.mean()) / r.std() * x).mean(),
    "over the rank's labels": lambda x, r, y, p: x * (r - _of_labels(r, y).mean()),
    "divided by their mean": lambda x, r, y, p: x * (r / r.mean()),
    "divided by their sum": lambda x, r, y, p: (x * (r / r.sum())).sum(),
    "in a clipped loss": lambda x, r, y, p: (
        -torch.min(x.exp() * (r - r.mean()), x.exp().clamp(0.8, 1.2) * (r - r.mean())).mean()
    ),
}
BY_INDEX: dict[str, Loss] = {
    "by row": lambda x, r, y, p: x * torch.linspace(0, 1, LENGTH)[: x.shape[1]],
    "as a divisor": lambda x, r, y, p: x / (1.0 + torch.arange(x.shape[1])),
    "of integers": lambda x, r, y, p: x * torch.arange(x.shape[1]),
    "of all values in a row": lambda x, r, y, p: (x.flatten() * torch.arange(x.shape[1]).repeat(ROWS).float()).sum(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_weights_of_the_whole_batch_are_left_alone(name: str) -> None:
    assert _verdict(RIGHT[name]) is None


@pytest.mark.parametrize("name", CENTRED)
def test_what_is_centred_over_a_part_is_told(name: str) -> None:
    verdict = _verdict(CENTRED[name])
    assert isinstance(verdict, Undecided) and "over a rank's own tokens" in verdict.text, verdict


@pytest.mark.parametrize("name", BY_INDEX)
def test_weights_by_the_index_in_a_part_are_told(name: str) -> None:
    verdict = _verdict(BY_INDEX[name])
    assert isinstance(verdict, Undecided) and "from the index in the part" in verdict.text, verdict


def test_weights_by_place_in_documents_are_left_alone() -> None:
    places = torch.cat([torch.arange(DOCUMENT), torch.arange(LENGTH - DOCUMENT)])
    parts = [(0, DOCUMENT), (DOCUMENT, LENGTH)]
    assert _verdict(lambda x, r, y, p: x * (p / LENGTH), places, parts=parts) is None


def test_of_several_weights_all_are_looked_at_by_turns() -> None:
    def loss(x: Tensor, r: Tensor, y: Tensor, p: Tensor) -> Tensor:
        return x * y.ne(-100).float() * (r - r.mean())

    assert any(_verdict(loss, steps=steps) is not None for steps in (2, 3))


@pytest.mark.usefixtures("found_hooks")
def test_tensors_with_hooks_are_not_read() -> None:
    def fail(packed: Any) -> Tensor:
        raise AssertionError

    def loss(x: Tensor, r: Tensor, y: Tensor, p: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fail):
            return x * (r - r.mean())

    assert _verdict(loss) is None
