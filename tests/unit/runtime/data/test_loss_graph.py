"""Terms of losses, as their graphs say them, and the weights that ranks give them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.runtime.data.loss_graph import read_terms
from ds_hetero.runtime.data.loss_units import Batch, UnitCounts
from ds_hetero.runtime.data.loss_weights import RankLoss, explain_divisor, weigh_terms
from ds_hetero.runtime.data.restored_state import restoring_state
from ds_hetero.runtime.data.row_operations import mixing_node
from ds_hetero.runtime.data.sample_probe import probe_samples, raise_if_mixed

WEIGHT = torch.tensor([1.0, 2.0, 4.0])


def _scores(rows: int) -> tuple[nn.Parameter, Tensor, Tensor]:
    weight = nn.Parameter(torch.arange(12.0).reshape(4, 3) / 7)
    return weight, torch.linspace(-1, 1, 4 * rows).reshape(rows, 4) @ weight, torch.arange(rows) % 3


@pytest.mark.parametrize(
    ("loss", "kinds", "counts"),
    [
        (lambda w, s, y: F.cross_entropy(s, y), ["mean"], [5]),
        (lambda w, s, y: F.cross_entropy(s, y, weight=WEIGHT), ["mean"], [10]),
        (lambda w, s, y: F.cross_entropy(s, y, ignore_index=2), ["mean"], [4]),
        (lambda w, s, y: 3 * F.mse_loss(s, s.detach() + 1), ["mean"], [15]),
        (lambda w, s, y: s.square().mean(0).mean(), ["mean"], [15]),
        (lambda w, s, y: s.square().mean(1).sum(), ["sum"], [1]),
        (lambda w, s, y: s[s > 0].mean(), ["mean"], [9]),
        (lambda w, s, y: s.sum() + w.norm() + 0.1 * w.square().sum(), ["sum", "common", "common"], [1, 1, 1]),
        (lambda w, s, y: torch.stack([s.mean(), s.sum()]).mean(), ["mean", "sum"], [15, 1]),
        (lambda w, s, y: (w.sum().exp() * s.mean()).reshape(1), ["mean"], [15]),
    ],
)
def test_terms_and_what_they_are_divided_by(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], kinds: list[str], counts: list[float]
) -> None:
    read = read_terms(loss(*_scores(5)), 5)
    assert read.problem is None
    assert [term.kind for term in read.terms] == kinds
    assert [term.count for term in read.terms] == counts


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (lambda s: s.square().mean().sqrt(), "SqrtBackward0"),
        (lambda s: s.sum() / s.abs().sum(), "denominator has gradients"),
        (lambda s: s.mean() * s.sum(), "product of two terms"),
        (lambda s: 1 / s.mean(), "ReciprocalBackward0"),
        (lambda s: s.logsumexp((0, 1)), "LogsumexpBackward0"),
    ],
)
def test_what_is_no_sum_of_such_terms_is_named(loss: Callable[[Tensor], Tensor], named: str) -> None:
    problem = read_terms(loss(_scores(5)[1]), 5).problem
    assert problem is not None and named in problem


class _GivenOnce:
    """Hooks that keep tensors elsewhere and forget what they have given back, as activation offloading does."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def keep(self, tensor: Tensor) -> int:
        self._kept[len(self._kept)] = tensor
        return len(self._kept) - 1

    def give(self, key: int) -> Tensor:
        return self._kept.pop(key)


@pytest.mark.usefixtures("found_hooks")
@pytest.mark.parametrize(
    ("loss", "counts"),
    [
        (lambda w, s, y: F.cross_entropy(s, y), None),
        (lambda w, s, y: s.sum() / torch.tensor(3.0), None),
        (lambda w, s, y: (s * (s > 0)).sum(), None),
        (lambda w, s, y: F.mse_loss(s, s.detach() + 1), [15]),
        (lambda w, s, y: s.square().mean(), [15]),
        (lambda w, s, y: (s @ s.T).mean(), [25]),
    ],
)
def test_what_hooks_may_give_but_once_is_left_to_the_backward(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], counts: list[float] | None
) -> None:
    hooks = _GivenOnce()
    w, s, y = _scores(5)
    with torch.autograd.graph.saved_tensors_hooks(hooks.keep, hooks.give):
        value = loss(w, s, y)
    read = read_terms(value, 5)
    mixing_node(value.grad_fn, read.linear, [s.grad_fn], 5)
    if counts is None:
        assert read.problem is not None and f"hooks of {__name__}" in read.problem
    else:
        assert read.problem is None and [term.count for term in read.terms] == counts
    value.backward()
    assert w.grad is not None


@pytest.mark.usefixtures("found_hooks")
@pytest.mark.parametrize("kept_by", ["save_on_cpu", "checkpoint"])
def test_what_torch_keeps_for_the_backward_is_read(kept_by: str) -> None:
    w, s, y = _scores(5)
    if kept_by == "checkpoint":
        value = checkpoint(F.cross_entropy, s, y, WEIGHT, use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            value = F.cross_entropy(s, y, WEIGHT)
    read = read_terms(value, 5)
    assert read.problem is None and [term.count for term in read.terms] == [10]
    value.backward()
    assert w.grad is not None


def _weigh(loss: Callable[[Tensor, Tensor, Tensor, int], Tensor], *rows: int) -> list[list[float]]:
    """By rank the factors of its terms, as each finds them."""
    of_ranks = []
    for rank, count in enumerate(rows):
        read = read_terms(loss(*_scores(count), rank), count)
        explained = [[entry for one in term.divisors for entry in explain_divisor(one, {})] for term in read.terms]
        of_ranks.append(RankLoss(read.terms, read.problem, count, UnitCounts(count), explained, {}, False, None))
    return [[one.factor for one in weigh_terms(of_ranks, rank, "Model", {})] for rank in range(len(rows))]


def test_factors_are_shares_of_what_terms_are_divided_by() -> None:
    def loss(w: Tensor, s: Tensor, y: Tensor, rank: int) -> Tensor:
        return F.cross_entropy(s, y, weight=WEIGHT) + s.square().sum() + w.norm()

    # Classes 0, 1, 2 weigh 7, class 0 weighs 1; a sum counts for both ranks; a penalty is the same on both.
    assert _weigh(loss, 3, 1) == [[2 * 7 / 8, 2.0, 1.0], [2 * 1 / 8, 2.0, 1.0]]


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (lambda w, s, y, rank: s.sum() / 2, "whether that is a number, or counts"),
        (lambda w, s, y, rank: s.sum() / (2.5, 0.7)[rank], "does not know what these numbers count"),
        (lambda w, s, y, rank: s.sum() / (5, 1)[rank], "whether the rank counted one or none"),
        (lambda w, s, y, rank: s.mean() / (0.3, 0.4)[rank], "a number that differs between ranks"),
        (lambda w, s, y, rank: s.mean(0).square().mean(), "a mean over 3 numbers on every rank"),
        (lambda w, s, y, rank: s.mean() + (w.norm() if rank else 0), "made of different terms"),
        (lambda w, s, y, rank: s.mean() + (w - rank).square().sum(), "numbers that differ between ranks"),
        (
            lambda w, s, y, rank: (s.sum(1) * s.detach().sum(1).abs().softmax(0)).sum(),
            "normalized the weights over its own",
        ),
    ],
)
def test_divisors_that_do_not_show_what_they_count_are_refused(
    loss: Callable[[Tensor, Tensor, Tensor, int], Tensor], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        _weigh(loss, 3, 1)


class _Layer(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor], by: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.change, self.by, self.calls = nn.Linear(4, 3), change, by, 0
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.linear(x)
        self.last.copy_(hidden.detach()[0])
        hidden = nn.functional.dropout(torch.tanh(self.change(hidden) if self.training else hidden), 0.5, self.training)
        return (hidden.square().sum() / (self.by * len(x))) + hidden.mean()


def _probe(layer: nn.Module) -> dict[str, str]:
    def run(batch: Batch) -> object:
        return layer(**batch)

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    found = probe_samples(run, {"x": x}, 3, layer)
    return dict(raise_if_mixed([found], "Layer"))


def test_a_probe_sees_samples_that_are_mixed_and_leaves_nothing() -> None:
    layer, state = _Layer(lambda hidden: hidden), torch.get_rng_state()
    assert list(_probe(layer).values()) == ["count"]
    assert layer.calls == 0 and not layer.last.any() and layer.training
    assert torch.equal(torch.get_rng_state(), state)
    for change in (
        lambda hidden: hidden - hidden.mean(0),
        lambda hidden: hidden + hidden[torch.randperm(len(hidden))],
        lambda hidden: hidden / hidden.norm(),
    ):
        with pytest.raises(ModelError, match="computes a sample otherwise beside others"):
            _probe(_Layer(change))


def test_generators_and_lists_of_modules_are_put_back() -> None:
    layer = nn.Linear(2, 2)
    layer.generator, layer.seen = torch.Generator().manual_seed(3), [1]
    expected = torch.randn(2, generator=torch.Generator().manual_seed(3))
    with restoring_state(layer):
        torch.randn(5, generator=layer.generator)
        layer.seen.append(2)
    assert torch.equal(torch.randn(2, generator=layer.generator), expected) and layer.seen == [1]
    assert math.isfinite(float(expected.sum()))
