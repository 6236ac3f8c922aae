"""The weight of every label in the gradient that trains: by rank, by class, with few labels. Budget: 2 s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hetero.errors import ConfigError
from ds_hetero.runtime.step_checks import TokenWeights
from ds_hetero.runtime.step_checks.protocol import Undecided

VOCAB = 9
WEIGHT = torch.tensor([5.0, 1.0, 1.0]).repeat(3)  # of every third class
HEAVY, LIGHT = [0, 3, 6, 0, 3, 6], [1, 2, 4, 5, 7, 8]  # labels

Loss = Callable[[Tensor, Tensor, int], Tensor]  # of logits, labels, and the labels of all ranks


def _verdicts(loss: Loss, labels_by_rank: Sequence[Sequence[int]], steps: int = 1) -> list[Any]:
    """Of each step of two ranks that give their part of a loss to backward, scaled as the engine does."""
    checks = []
    for _ in labels_by_rank:
        replica = SimpleNamespace(replica_id=0, batch_split=None)
        model: Any = SimpleNamespace(replica=replica, convention="local_share")
        checks.append(TokenWeights(model, 1))
    verdicts = []
    for step in range(steps):
        rows = []
        for rank, (check, of_rank) in enumerate(zip(checks, labels_by_rank, strict=True)):
            generator = torch.Generator().manual_seed(10 * step + rank)
            labels = torch.full((1, 8), -100)
            labels[0, : len(of_rank)] = torch.tensor(of_rank)
            logits = torch.randn(1, 8, VOCAB, generator=generator).requires_grad_()
            check.note_forward(logits, labels, None, None)
            value = loss(logits[0], labels[0], sum(map(len, labels_by_rank)))
            check.note_backward(value + rank, 1, is_scaled=False)  # no rank has the value of the other
            (2 * value).backward()
            rows.append(torch.cat([part.double() for part in check.numbers()]).tolist())
        of_ranks = [check.verdict(rows) for check in checks]
        assert repr(of_ranks[0]) == repr(of_ranks[1])
        verdicts.append(of_ranks[0])
    return verdicts


def _common_verdict(gradient: Callable[[Tensor, Tensor], Tensor], logits: Sequence[Tensor]) -> Any:
    """Of two ranks that give one value to backward, that of the mean over 6 + 4 labels; the gradient is of another."""
    checks, rows = [], []
    labels = [torch.tensor(HEAVY), torch.tensor(LIGHT[:4])]
    pairs = list(zip(logits, labels, strict=True))
    expected = sum(F.cross_entropy(x, y, reduction="sum") for x, y in pairs).detach() / 10
    for x, y in pairs:
        replica = SimpleNamespace(replica_id=0, batch_split=None)
        check = TokenWeights(SimpleNamespace(replica=replica, convention=None), 1)
        checks.append(check)
        logits_of_rank = x[None].clone().requires_grad_()
        check.note_forward(logits_of_rank, y[None], expected, None)
        check.note_backward(expected, 1, is_scaled=False)
        (2 * gradient(logits_of_rank[0], y) / 10).backward()
        rows.append(torch.cat([part.double() for part in check.numbers()]).tolist())
    return checks[0].verdict(rows)


@pytest.mark.parametrize("size", [0.0, 1.0])
def test_a_smoothed_loss_under_a_head_of_zeros_is_not_one_with_another_gradient(size: float) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = [size * torch.randn(count, VOCAB, generator=generator) for count in (6, 4)]

    def plain(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, reduction="sum")

    def smoothed(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, reduction="sum", label_smoothing=0.1)

    assert _common_verdict(plain, logits) is None
    verdict = _common_verdict(smoothed, logits)
    assert verdict is None if size == 0 else isinstance(verdict, Undecided)
    halved = _common_verdict(lambda x, y: plain(x, y) / 2, logits)
    assert halved is None if size == 0 else "0.5 times its gradient" in str(halved)


def _by_class(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    return F.cross_entropy(logits, labels, weight=WEIGHT, reduction="sum") / count


def _mean(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    return F.cross_entropy(logits, labels)


def _twice_on_even_counts(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum") * (2 if len(labels[labels >= 0]) % 2 else 3) / count


FEW = [(HEAVY[:2], LIGHT[:4]), (HEAVY[:1], LIGHT[:1]), (HEAVY[:3], LIGHT), (LIGHT[:1], HEAVY[:1])]


@pytest.mark.parametrize("labels", FEW)
def test_weights_by_class_of_few_labels_are_not_weights_by_rank(labels: tuple[list[int], list[int]]) -> None:
    for verdict in _verdicts(_by_class, labels, steps=6):
        assert isinstance(verdict, Undecided) and "weighs tokens unlike each other" in verdict.text


def test_weights_by_class_that_are_alike_inside_ranks_by_chance_are_undecided() -> None:
    first, second, third, fourth = _verdicts(_by_class, (HEAVY, LIGHT), steps=4)
    assert first == second == third and isinstance(first, Undecided) and "weighs labels by rank" in first.text
    assert isinstance(fourth, ConfigError) and "So it was in 4 steps in a row" in str(fourth)
    (mixed,) = _verdicts(_by_class, (HEAVY[:3] + LIGHT[:3], LIGHT))
    assert isinstance(mixed, Undecided) and "weighs tokens unlike each other" in mixed.text


def test_means_of_ranks_are_refused() -> None:
    (verdict,) = _verdicts(_mean, (HEAVY[:4], LIGHT))
    assert isinstance(verdict, ConfigError) and "They go with one over the rank's own labels" in str(verdict)
    (verdict,) = _verdicts(lambda x, y, count: _mean(x, y, count) * len(y), (HEAVY[:4], LIGHT))
    assert isinstance(verdict, ConfigError)


def test_means_of_few_labels_are_refused_at_the_fourth_step() -> None:
    verdicts = _verdicts(_mean, (HEAVY[:2], LIGHT), steps=4)
    assert all(isinstance(verdict, Undecided) for verdict in verdicts[:3])
    assert isinstance(verdicts[3], ConfigError) and "weighs labels by rank: ['1', '0.3333']" in str(verdicts[3])


def test_weights_of_another_kind_are_told_with_one_subject() -> None:
    (verdict,) = _verdicts(_twice_on_even_counts, (HEAVY[:5], LIGHT))
    assert isinstance(verdict, Undecided) and verdict.subject == "the loss given to backward weighs labels by rank"
