"""The factor of each rank's sums over tokens, read from the graph of its loss. Budget: 2 s."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hetero.errors import ConfigError
from ds_hetero.runtime.data.shard_info import ShardInfo, attach
from ds_hetero.runtime.step_checks import TokenFactors
from ds_hetero.runtime.step_checks.protocol import Undecided
from ds_hetero.values.placement import Rows, stream_placement
from ds_hetero.values.schedule import Schedule

VOCAB = 32
WEIGHT = torch.linspace(0.5, 2, VOCAB)
WEIGHTS_OF_MODEL = [torch.full((3,), 0.1, requires_grad=True) for _ in range(300)]
LABELS = 14  # of all ranks, below
WEIGHTS = 17.0  # of all ranks; any number that all of them divide by


class Gathered(torch.autograd.Function):
    """Stands for a gather over ranks: a rank's number, and those of the others beside it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return torch.ones(2).index_fill(0, torch.tensor(rank), 0) + own.detach() * F.one_hot(torch.tensor(rank), 2)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        return grads[ctx.rank], None


def _verdict(loss: Callable[[Tensor, Tensor, int], Tensor], tokens: tuple[int, int] = (12, 5), **options: Any) -> Any:
    """Of a loss of two ranks with parts of sequences, of which the first 3 tokens have no label.

    Args:
        options: "samples" are the sequences, "documents" the lengths of those that they are packed of. A rank of 0
            tokens is given one without a label.
    """
    rows, samples = [], options.get("samples", 1)
    for rank, count in enumerate(tokens):
        generator = torch.Generator().manual_seed(rank)
        hidden = torch.randn(samples, max(count, 1), VOCAB, generator=generator)
        logits = hidden @ torch.eye(VOCAB).requires_grad_()
        labels = torch.randint(0, VOCAB, (samples, max(count, 1)), generator=generator)
        labels[:, : options.get("unlabelled", 3) if rank == 0 else count == 0] = -100
        model = _model_of(rank, options.get("replicas", (0, 0))[rank])
        if options.get("known", True):
            model.latest_positions = _positions(tokens, labels, options.get("documents", (sum(tokens),)))
        check = TokenFactors(model, 1)
        value = loss(logits, labels, rank)
        check.note_backward(value)
        value.backward()
        numbers = torch.cat(check.numbers())
        assert len(numbers) == check.width
        rows.append(numbers.tolist())
    return check.verdict(rows)


def _model_of(rank: int, replica_id: int) -> Any:
    return SimpleNamespace(replica=SimpleNamespace(replica_id=replica_id, rank=rank), latest_positions=None)


def _positions(tokens: tuple[int, int], labels: Tensor, documents: tuple[int, ...]) -> Tensor:
    """Places as a loader gives them; only what comes with them is looked at."""
    groups = [{"ranks": [rank], "tokens": [count], "heads": [2]} for rank, count in enumerate(tokens)]
    plan = {"version": 1, "num_heads": 2, "num_kv_heads": 2, "layout": "contiguous", "ring": [0, 1], "groups": groups}
    ends = torch.tensor(documents).cumsum(0).tolist()
    of_row = tuple(zip([0, *ends[:-1]], ends, strict=True))
    placement = stream_placement(Schedule.from_dict(plan), sum(tokens), (Rows(0, len(labels), of_row),))
    assert placement.rank_tokens == tokens
    return attach(torch.zeros_like(labels), ShardInfo(placement=placement, labels=labels))


def _ce(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def _own_mean(mean: Tensor, labels: Tensor) -> Tensor:
    """Of a mean over the rank's labels, its share in the mean over all of them."""
    return mean * labels.ne(-100).sum() / LABELS


def _by_chunk(logits: Tensor, labels: Tensor) -> list[Tensor]:
    """Sums over chunks, of which the larger rank has more."""
    chunks = zip(logits.split(5, dim=1), labels.split(5, dim=1), strict=True)
    return [_ce(x, y, reduction="sum") for x, y in chunks]


def _by_row(logits: Tensor, labels: Tensor) -> Tensor:
    """Means over the rank's tokens of four rows, each with its weight."""
    rows = logits.square().sum(-1).expand(4, -1)
    return rows.mean(1) * torch.tensor([1.0, 2.0, 3.0, 4.0])


def _weights_of(labels: Tensor) -> Tensor:
    return WEIGHT[labels.flatten().clamp(min=0)]


def _by_document(logits: Tensor, labels: Tensor, rank: int) -> list[Tensor]:
    """Means over documents, of which rank 0 has three and rank 1 has one."""
    sizes = [4, 4, labels.shape[1] - 8] if rank == 0 else [labels.shape[1]]
    documents = zip(logits.split(sizes, dim=1), labels.split(sizes, dim=1), strict=True)
    return [_ce(x, y, reduction="sum") / y.ne(-100).sum() for x, y in documents]


RIGHT = {
    "sum by the labels of all": lambda x, y, rank: _ce(x, y, reduction="sum") / LABELS,
    "weighted by class": lambda x, y, rank: _ce(x, y, weight=WEIGHT, reduction="sum") / WEIGHTS,
    "mean over weights, weighed by them": lambda x, y, rank: (
        _ce(x, y, weight=WEIGHT) * WEIGHT[y[y != -100]].sum() / WEIGHTS
    ),
    "smoothed": lambda x, y, rank: _own_mean(_ce(x, y, label_smoothing=0.1), y),
    "from the values of tokens": lambda x, y, rank: (_ce(x, y, reduction="none") * y.flatten().ne(-100) / LABELS).sum(),
    "mean over chosen tokens": lambda x, y, rank: _own_mean(x[y != -100].square().mean(), y),
    "of ranks' sums": lambda x, y, rank: Gathered.apply(_ce(x, y, reduction="sum"), rank).sum() / LABELS,
    "by the recipe": lambda x, y, rank: Gathered.apply(_own_mean(_ce(x, y), y), rank).mul(1.0).sum(),
    "of chunks, stacked": lambda x, y, rank: torch.stack(_by_chunk(x, y)).sum() / LABELS,
    "of chunks, put together": lambda x, y, rank: torch.cat([one[None] for one in _by_chunk(x, y)]).sum() / LABELS,
    "of chunks, added up": lambda x, y, rank: sum(_by_chunk(x, y)) / LABELS,
    "of stacked chunks, gathered": lambda x, y, rank: (
        Gathered.apply(torch.stack(_by_chunk(x, y)).sum(), rank).sum() / LABELS
    ),
    "by rows with weights": lambda x, y, rank: _by_row(x, y).sum() * y.shape[1] / 17,
    "with a penalty": lambda x, y, rank: _own_mean(_ce(x, y), y) + torch.ones(3, requires_grad=True).square().sum(),
}
WRONG = {
    "mean over the rank's labels": lambda x, y, rank: _ce(x, y) / 2,
    "mean over the rank's weights": lambda x, y, rank: _own_mean(_ce(x, y, weight=WEIGHT), y),
    "mean over the rank's tokens": lambda x, y, rank: x.logsumexp(-1).square().mean(),
    "divided inside the sum": lambda x, y, rank: (_ce(x, y, reduction="none") / y.ne(-100).sum()).sum(),
    "mean of ranks' means": lambda x, y, rank: torch.stack([*Gathered.apply(_ce(x, y), rank)]).mean(),
    "weights of tokens, by the rank's own labels": lambda x, y, rank: (
        (_ce(x, y, reduction="none") * _weights_of(y)).sum() / y.ne(-100).sum()
    ),
    "a term beside a right loss": lambda x, y, rank: (
        _own_mean(_ce(x, y), y) + 1e-2 * x[y != -100].logsumexp(-1).square().mean()
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_sum_over_all_tokens_has_one_factor(name: str) -> None:
    assert _verdict(RIGHT[name]) is None
    assert _verdict(RIGHT[name], tokens=(40, 30)) is None


@pytest.mark.parametrize("name", WRONG)
def test_a_mean_over_the_ranks_own_tokens_is_refused(name: str) -> None:
    for tokens in ((12, 5), (90, 70)):
        verdict = _verdict(WRONG[name], tokens=tokens)
        assert isinstance(verdict, ConfigError) and "weighs the sums of ranks" in str(verdict), (tokens, verdict)


def test_a_mean_of_means_is_refused_where_a_rank_has_no_label() -> None:
    def mean_of_means(x: Tensor, y: Tensor, rank: int) -> Tensor:
        return 0.25 * _ce(x, y, reduction="sum") / y.ne(-100).sum().clamp(min=1) / 2

    assert isinstance(_verdict(mean_of_means, unlabelled=12), ConfigError)
    assert _verdict(lambda x, y, rank: 0.25 * _ce(x, y, reduction="sum") / 5, unlabelled=12) is None


@pytest.mark.parametrize("tokens", [(1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("unlabelled", [0, 1])
@pytest.mark.parametrize("common", [torch.ones(()), torch.full((1,), 0.5)])
def test_weights_of_a_single_token_are_no_common_number(
    tokens: tuple[int, int], unlabelled: int, common: Tensor
) -> None:
    def loss(x: Tensor, y: Tensor, rank: int) -> Tensor:
        return (_ce(x, y, reduction="none") * _weights_of(y) * common).sum() / WEIGHTS

    def scaled(x: Tensor, y: Tensor, rank: int) -> Tensor:
        return (_ce(x, y, reduction="none") * common).sum() / LABELS

    assert _verdict(loss, tokens=tokens, unlabelled=unlabelled) is None
    assert _verdict(scaled, tokens=tokens, unlabelled=unlabelled) is None


@pytest.mark.parametrize("left_out", [lambda total: 0.0 * total, lambda total: total / 0.0])
def test_a_rank_without_labels_may_leave_its_sum_out(left_out: Callable[[Tensor], Tensor]) -> None:
    def loss(x: Tensor, y: Tensor, rank: int) -> Tensor:
        total = _ce(x, y, reduction="sum")
        return total / LABELS if y.ne(-100).any() else left_out(total)

    assert _verdict(loss, unlabelled=12) is None


UNDECIDED = {
    "means of documents, stacked": lambda x, y, rank: torch.stack(_by_document(x, y, rank)).sum() / 4,
    "means of documents, added up": lambda x, y, rank: sum(_by_document(x, y, rank)) / 4,
    "means of documents, gathered": lambda x, y, rank: (
        Gathered.apply(torch.stack(_by_document(x, y, rank)).sum(), rank).sum() / 4
    ),
    "means of alike documents": lambda x, y, rank: torch.stack(_by_document(x, y, rank)[:2]).sum() / 3,
    "chunks by the rank's count": lambda x, y, rank: torch.stack(_by_chunk(x, y)).sum() / y.ne(-100).sum() / 2,
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_unlike_factors_of_several_sums_are_undecided(name: str) -> None:
    assert isinstance(_verdict(UNDECIDED[name], tokens=(17, 5), unlabelled=0), Undecided)


def _focal(x: Tensor, y: Tensor) -> Tensor:
    by_token = _ce(x, y, reduction="none")
    return by_token * (1 - (-by_token).exp()).square()


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda x, y: _ce(x, y, reduction="sum"),
    "weighted by class": lambda x, y: _ce(x, y, weight=WEIGHT, reduction="sum"),
    "weighted by token": lambda x, y: (_ce(x, y, reduction="none") * _weights_of(y)).sum(),
    "smoothed": lambda x, y: _ce(x, y, label_smoothing=0.1, reduction="sum"),
    "focal": lambda x, y: _focal(x, y).sum(),
    "focal, weighted by token": lambda x, y: (_focal(x, y) * _weights_of(y)).sum(),
    "penalty": lambda x, y: (x.logsumexp(-1).square() * y.ne(-100)).sum(),
}
FEW_TOKENS = [(12, 5), (12, 0), (12, 1), (0, 5), (4, 0)]


@pytest.mark.parametrize("tokens", FEW_TOKENS)
@pytest.mark.parametrize("name", SUMS)
def test_an_average_of_means_is_refused_where_a_rank_has_few_labels_or_none(name: str, tokens: tuple[int, int]) -> None:
    def average(x: Tensor, y: Tensor, rank: int) -> Tensor:
        means = SUMS[name](x, y) / y.ne(-100).sum().clamp(min=1e-9)
        return Gathered.apply(means, rank).sum() / 2

    def stacked(x: Tensor, y: Tensor, rank: int) -> Tensor:
        means = torch.stack([SUMS[name](x, y) / y.ne(-100).sum().clamp(min=1e-9)])
        return Gathered.apply(means[0], rank).sum() / 2

    def over_weights(x: Tensor, y: Tensor, rank: int) -> Tensor:
        weights = (_weights_of(y) * y.flatten().ne(-100)).sum()
        return torch.stack([SUMS[name](x, y) / weights.clamp(min=1e-9)]).sum() / 2

    for loss in (average, stacked, over_weights):
        for samples in (1, 3):
            verdict = _verdict(loss, tokens=tokens, samples=samples)
            assert isinstance(verdict, ConfigError), (loss, samples, verdict)


@pytest.mark.parametrize("tokens", FEW_TOKENS)
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_all_ranks_is_right_where_a_rank_has_few_labels_or_none(name: str, tokens: tuple[int, int]) -> None:
    def recipe(x: Tensor, y: Tensor, rank: int) -> Tensor:
        return Gathered.apply(torch.stack([SUMS[name](x, y)])[0], rank).sum() / LABELS

    for samples in (1, 3):
        assert _verdict(recipe, tokens=tokens, samples=samples) is None


LEFT_OUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by where": lambda total, count: torch.where(count > 0, total / count.clamp(min=1), 0.0),
    "by a product": lambda total, count: total / count.clamp(min=1) * (count > 0),
    "as a number": lambda total, count: (total / count).nan_to_num(),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_an_average_with_ranks_that_leave_their_sums_out_is_told(name: str) -> None:
    def average(x: Tensor, y: Tensor, rank: int) -> Tensor:
        means = LEFT_OUT[name](_focal(x, y).sum(), y.ne(-100).sum())
        return Gathered.apply(means, rank).sum() / 2 * 2  # what the engine does with it: two ranks are averaged

    def of_weights(x: Tensor, y: Tensor, rank: int) -> Tensor:
        means = _ce(x, y, weight=WEIGHT) if y.ne(-100).any() else x.sum() * 0
        return Gathered.apply(means, rank).sum()

    for loss in (average, of_weights):
        verdict = _verdict(loss, tokens=(12, 0))
        assert isinstance(verdict, Undecided) and "leaves out the sums of ranks [1]" in verdict.text, verdict
    assert _verdict(lambda x, y, rank: 2 * of_weights(x, y, rank), tokens=(12, 0)) is None
    assert _verdict(lambda x, y, rank: 2 * average(x, y, rank), tokens=(12, 0)) is None
    assert isinstance(_verdict(average, tokens=(12, 5)), ConfigError)


def test_means_of_one_whole_document_a_rank_are_undecided() -> None:
    def loss(x: Tensor, y: Tensor, rank: int) -> Tensor:
        return torch.stack([_ce(x, y)]).sum() / 2

    assert isinstance(_verdict(loss, documents=(12, 5)), Undecided)
    assert isinstance(_verdict(loss, known=False), Undecided)
    assert isinstance(_verdict(loss, documents=(6, 6, 5)), ConfigError)  # rank 0 holds two
    assert isinstance(_verdict(loss, documents=(14, 3)), ConfigError)  # both hold parts of the first


def test_terms_that_are_made_alike_may_have_weights() -> None:
    def loss(x: Tensor, y: Tensor, rank: int) -> Tensor:
        return (0.7 * _ce(x, y, reduction="sum") + 0.3 * _ce(2 * x, y, reduction="sum")) / LABELS

    assert _verdict(loss) is None


def test_means_of_chunks_may_be_weighed_by_their_tokens() -> None:
    def loss(x: Tensor, y: Tensor, rank: int) -> Tensor:
        means = [chunk.logsumexp(-1).square().mean() for chunk in x.chunk(2, dim=1)]
        return torch.stack(means).mean() * y.numel() / 18

    assert _verdict(loss, tokens=(12, 6)) is None


def test_replicas_may_divide_by_their_own_labels() -> None:
    assert _verdict(lambda x, y, rank: _ce(x, y), replicas=(0, 1)) is None


def test_a_means_of_equally_many_labels_is_right() -> None:
    assert _verdict(lambda x, y, rank: _ce(x, y, weight=None), tokens=(8, 5)) is None


def test_half_precision_rounds_factors() -> None:
    def loss(x: Tensor, y: Tensor, rank: int) -> Tensor:
        return ((x.logsumexp(-1).square()[y != -100].mean()).bfloat16() * (y.ne(-100).sum() / 14).bfloat16()) * 1.01

    assert _verdict(loss) is None


@pytest.mark.parametrize("weight", [None, WEIGHT.bfloat16()])
def test_half_logits_round_the_factors_of_a_loss_of_fp32(weight: Tensor | None) -> None:
    def loss(x: Tensor, y: Tensor, rank: int) -> Tensor:
        counts = y.ne(-100).sum() if weight is None else weight.double()[y[y != -100]].sum()
        return F.cross_entropy(x[0].bfloat16(), y[0], weight=weight).float() * counts.float() / 1000

    assert _verdict(loss, tokens=(1030, 517), unlabelled=7) is None
    assert _verdict(loss, tokens=(1030, 517), unlabelled=1030) is None


HOOKED = {
    "likelihood": lambda x, y: _ce(x, y),
    "half likelihood": lambda x, y: _ce(x.bfloat16(), y, weight=WEIGHT.bfloat16()),
    "elementwise": lambda x, y: F.mse_loss(x.sin(), torch.ones_like(x)),
    "product": lambda x, y: (x.logsumexp(-1) * torch.tensor(0.5)).sum(),
}


@pytest.mark.usefixtures("found_hooks")
@pytest.mark.parametrize("name", HOOKED)
def test_tensors_that_are_offloaded_are_fetched_by_the_backward_alone(name: str) -> None:
    offloaded: dict[int, Tensor] = {}

    def offload(tensor: Tensor) -> int:
        offloaded[len(offloaded)] = tensor
        return len(offloaded) - 1

    fetched: list[int] = []

    def fetch(place: int) -> Tensor:
        fetched.append(place)
        return offloaded[place]

    def loss(x: Tensor, y: Tensor, rank: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(offload, fetch):
            return HOOKED[name](x, y) / 2

    expected = loss(torch.randn(1, 5, VOCAB).requires_grad_(), torch.zeros(1, 5, dtype=torch.long), 0)
    expected.backward()
    of_one_backward = len(fetched)
    fetched.clear()
    verdict = _verdict(loss)
    assert len(fetched) == 2 * of_one_backward
    expected_verdict = ConfigError if name == "elementwise" else Undecided  # its count is seen by its shape
    assert isinstance(verdict, expected_verdict), verdict


@pytest.mark.usefixtures("found_hooks")
def test_a_checkpointed_loss_is_computed_twice_and_no_more() -> None:
    forwards = []

    def loss(x: Tensor, y: Tensor, rank: int) -> Tensor:
        def of_logits(x: Tensor) -> Tensor:
            forwards.append(rank)
            return _ce(x, y)

        return checkpoint(of_logits, x, use_reentrant=False) * y.ne(-100).sum() / LABELS

    assert isinstance(_verdict(loss), Undecided)
    assert forwards == [0, 0, 1, 1]


PENALTIES = {
    "squares": lambda: sum(weight.square().sum() for weight in WEIGHTS_OF_MODEL),
    "squares of one": lambda: WEIGHTS_OF_MODEL[0].square().sum(),
    "a stack of norms": lambda: torch.stack([weight.norm() for weight in WEIGHTS_OF_MODEL[:8]]).sum(),
    "sizes": lambda: sum(weight.abs().mean() for weight in WEIGHTS_OF_MODEL[:8]),
    "half weights": lambda: WEIGHTS_OF_MODEL[0].bfloat16().float().pow(2).sum(),
    "distance": lambda: F.mse_loss(WEIGHTS_OF_MODEL[0], torch.ones(3)) + (WEIGHTS_OF_MODEL[1] - 1).square().sum(),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_on_weights_are_weighed_with_a_declared_loss(name: str) -> None:
    def declared(x: Tensor, y: Tensor, rank: int) -> Tensor:
        return (1e-2 * PENALTIES[name]() + _ce(x, y)) * y.ne(-100).sum() / LABELS

    def wrong(x: Tensor, y: Tensor, rank: int) -> Tensor:
        return 1e-2 * PENALTIES[name]() + _ce(x, y) / 2

    assert _verdict(declared) is None
    assert isinstance(_verdict(wrong), ConfigError)


def _of_kinds(logits: Tensor, kinds: int) -> Tensor:
    """Sums to which unlike operations lead."""
    total = logits.new_zeros(())
    for kind in range(kinds):
        term = logits.logsumexp(-1).sum() / LABELS
        for _ in range(kind):
            term = -term
        total = total + term
    return total


def test_that_sums_are_left_out_is_said() -> None:
    assert _verdict(lambda x, y, rank: _of_kinds(x, 4)) is None
    verdict = _verdict(lambda x, y, rank: _of_kinds(x, 5))
    assert isinstance(verdict, Undecided) and "more than 4 kinds of sums" in verdict.text


def test_a_fault_is_refused_where_sums_are_left_out() -> None:
    assert isinstance(_verdict(lambda x, y, rank: _ce(x, y) / 2 + _of_kinds(x, 5)), ConfigError)


def test_a_refusal_names_the_sum() -> None:
    def loss(x: Tensor, y: Tensor, rank: int) -> Tensor:
        return _own_mean(_ce(x, y), y) + 1e-2 * x[y != -100].logsumexp(-1).square().mean()

    assert "The sum is MeanBackward0, the last of MulBackward0/MeanBackward0 in the graph" in str(_verdict(loss))
