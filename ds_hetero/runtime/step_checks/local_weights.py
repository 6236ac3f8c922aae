"""Check the weights by which a script multiplies the values of tokens: were they computed from a rank's part alone?

A script computes such weights (a policy's advantages, weights by position, weights divided by their sum) outside the
graph of the loss, from the tokens that a rank holds. Any weights may be right, and `token_factors` checks their factor
in the sum over tokens. But two marks show weights that were computed from a part of the sequences:

    centred or normalized    the mean over a rank's own tokens is 0 or 1 on every rank, or their sum is 1; for a
                             quantity of the whole batch, each rank's mean would be another number
    made by index            the first weights are the same on ranks that hold other positions of the sequences

Either mark is a warning and not an error: random weights that all ranks draw from one seed have the second mark, too.

The weights are the operand without a gradient that autograd saves for a product. A walk from the loss, or from the
argument of `Handle.mean`, down through nodes with one number per token finds them. All numbers stay on the device until
the one exchange of the step.

Dimension key: B batch, s tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ds_hetero.common.text import ranks_by_value
from ds_hetero.runtime.data.saved_hooks import hook_of
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict

_PREFIX = 8  # first tokens of a rank whose weights are compared
# Distinct weights that must be among these. Masks and weights by class have few distinct values, whose means come to 0
# or 1 on all ranks now and then; rewards of samples have some equal ones. Chosen, never measured.
_MIN_DISTINCT = 6
_MAX_SCALARS_TO_WEIGHTS = 64  # elements of a node above the values of tokens; as in `token_factors`
_MAX_NODES_TO_WEIGHTS = 256  # of a walk; chosen, never measured: a policy's clipped loss has some thirty
_PRODUCTS = frozenset({"MulBackward0", "DivBackward0"})
_GOLDEN = 0.6180339887498949
_IGNORED = -100
# Difference of a mean from 0 or 1, relative to the weights' root mean square. A mean that was subtracted in fp32 leaves
# 1e-7; the mean of random weights over s tokens varies by one over the root of s, 1e-3 for a million tokens.
_RTOL_MEAN = 1e-5


class _Weights(NamedTuple):
    """Numbers of one rank about the weights that it examined in a step; zeros if it found none."""

    replica: float  # id of the rank's replica
    tokens: float  # number of weights
    labels: float  # number of weights whose tokens have labels that count
    distinct: float  # number of distinct values among the first `_PREFIX` weights
    prefix: float  # a combination of these, to compare them between ranks
    positions: float  # a combination of the positions of their tokens
    mean: float  # of all weights
    mean_of_labels: float  # of the weights whose tokens have labels that count
    size: float  # root mean square of all weights


class TrainedOnParts(Protocol):
    """What `LocalWeights` reads of a model whose sequences are split over ranks."""

    latest_positions: Tensor | None

    @property
    def replica(self) -> Replica:
        """This rank's replica, which may change between steps."""


class LocalWeights:
    """Checks the weights of tokens in the losses of one split model, as a step check.

    If a step has several tensors of weights, one of them is examined, another one in the next step.
    """

    width = len(_Weights._fields)

    def __init__(self, model: TrainedOnParts) -> None:
        self._model = model
        self._step = 0
        self._num_weights = 0  # tensors of weights in this step so far
        self._num_weights_before = 0  # in the step before
        self._numbers: Tensor | None = None  # [8] of this step, on the device

    @torch.no_grad()
    def note_values(self, values: Tensor) -> None:
        """Examine ``values`` that the script trains on, of tokens or a loss; does not wait for the device."""
        positions = self._model.latest_positions
        info = shard_info(positions)
        if positions is None or info is None or info.labels is None or values.grad_fn is None:
            return
        for weights in _weights_in(values.grad_fn, tuple(info.labels.shape)):
            index_to_examine = self._step % max(self._num_weights_before, 1)
            if self._numbers is None and self._num_weights == index_to_examine:
                self._numbers = _numbers_of(weights, positions, info.labels)
            self._num_weights += 1

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of `_Weights` for the step that ends."""
        numbers, self._numbers = self._numbers, None
        self._num_weights_before, self._num_weights = self._num_weights, 0
        self._step += 1
        replica = torch.tensor([float(self._model.replica.replica_id)], dtype=torch.float64)
        return replica, torch.zeros(self.width - 1) if numbers is None else numbers

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Warn of weights that were made by index, or centred or normalized on every rank."""
        weights_by_rank = [_Weights(*row) for row in rows]
        for ranks in ranks_by_value((rank, weights.replica) for rank, weights in enumerate(weights_by_rank)).values():
            weights_of_replica: dict[int, _Weights] = {}
            for rank in ranks:
                if weights_by_rank[rank].labels > 0 and weights_by_rank[rank].distinct >= _MIN_DISTINCT:
                    weights_of_replica[rank] = weights_by_rank[rank]
            ranks_by_index = _ranks_weighing_by_index(weights_of_replica)
            if ranks_by_index:
                return Undecided(_BY_INDEX.format(ranks_by_index), subject=_BY_INDEX)
            if len(weights_of_replica) > 1 and _are_normalized_by_rank(list(weights_of_replica.values())):
                return Undecided(_BY_PART.format(list(weights_of_replica)), subject=_BY_PART)
        return None


def _ranks_weighing_by_index(weights_by_rank: dict[int, _Weights]) -> list[int]:
    """Return ranks whose first weights are the same, though their tokens have other positions; [] if there are none."""
    all_distinct = {rank: weights for rank, weights in weights_by_rank.items() if weights.distinct == _PREFIX}
    for ranks in ranks_by_value((rank, weights.prefix) for rank, weights in all_distinct.items()).values():
        if len({all_distinct[rank].positions for rank in ranks}) > 1:
            return list(ranks)
    return []


def _are_normalized_by_rank(weights_by_rank: Sequence[_Weights]) -> bool:
    """Whether every rank's weights are centred or normalized in the same way, and are not equal on all ranks."""
    if len({weights.prefix for weights in weights_by_rank}) == 1:
        return False
    marks_by_rank = [_normalization_marks(weights) for weights in weights_by_rank]
    # The same mark on all ranks: one rank alone may have weights of mean 1 by chance.
    return any(map(all, zip(*marks_by_rank, strict=True)))


def _normalization_marks(weights: _Weights) -> list[bool]:
    """Return whether the mean is 0, the mean is 1, the sum is 1: of all weights, then of those whose labels count."""
    marks = []
    for mean, count in ((weights.mean, weights.tokens), (weights.mean_of_labels, weights.labels)):
        marks += [
            _is_near(mean, 0.0, weights.size),
            _is_near(mean, 1.0, weights.size),
            _is_near(mean * count, 1.0, weights.size * count),
        ]
    return marks


def _is_near(value: float, expected: float, size: float) -> bool:
    """Whether ``value`` is ``expected`` up to rounding of numbers of this size."""
    return abs(value - expected) <= _RTOL_MEAN * size


def _weights_in(top: Node, shape: Sequence[int]) -> list[Tensor]:
    """Return the tensors of weights in a graph: operands without a gradient in products with values of tokens.

    Args:
        top: node of the loss, or of the values.
        shape: B and s; weights have one number for each of the B * s tokens, or for each of s positions.
    """
    batch_size, tokens = shape
    num_values = batch_size * tokens
    todo: list[Node] = [top]
    seen: set[Node] = set()
    all_weights: list[Tensor] = []
    while todo and len(seen) < _MAX_NODES_TO_WEIGHTS:
        node = todo.pop()
        numel = _numel(node)
        has_token_values = numel == num_values
        if node in seen or not (has_token_values or numel <= _MAX_SCALARS_TO_WEIGHTS):
            continue
        seen.add(node)
        weights = _constant_factor(node) if has_token_values and tokens >= _PREFIX else None
        if weights is not None and weights.numel() in (tokens, num_values):
            all_weights.append(weights)
        todo += [operand for operand, _ in reversed(node.next_functions) if operand is not None]
    return all_weights


def _numel(node: Any) -> int:
    """Return the elements of a node's first result; a number too large for scalars if not known."""
    metadata = node._input_metadata
    return prod(int(size) for size in metadata[0].shape) if metadata else _MAX_SCALARS_TO_WEIGHTS + 1


def _constant_factor(node: Any) -> Tensor | None:
    """Return the operand without a gradient of a product or quotient; None for other nodes, and tensors with hooks."""
    if node.name() not in _PRODUCTS or all(operand is not None for operand, _ in node.next_functions):
        return None
    name = "other" if node.next_functions[0][0] is not None else "self"
    if hook_of(node, name) is not None:  # see `token_factors`
        return None
    saved = getattr(node, f"_saved_{name}")
    if not isinstance(saved, Tensor) or saved.is_complex():
        return None
    is_exact = not saved.is_floating_point() or saved.element_size() >= 4  # weights by index are integers, often
    return saved.detach() if is_exact else None


def _numbers_of(weights: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    """Summarize this rank's token weights as the numbers of `_Weights`, [8]."""
    flat = weights.reshape(-1).double()
    first_weights = flat[:_PREFIX]
    has_label = labels.ne(_IGNORED)
    if len(flat) == labels.shape[1]:  # one weight per position, for all samples
        has_label = has_label[0]
    is_counted = has_label.reshape(-1).double()
    return torch.stack(
        [
            torch.full((), float(len(flat)), dtype=torch.float64, device=flat.device),
            is_counted.sum(),
            1 + first_weights.sort().values.diff().ne(0).sum().double(),
            _combined(first_weights),
            _combined(positions.reshape(-1, positions.shape[-1])[0, :_PREFIX].double()),
            flat.mean(),
            (flat * is_counted).sum() / is_counted.sum().clamp(min=1),
            flat.square().mean().sqrt(),
        ]
    )


def _combined(numbers: Tensor) -> Tensor:
    """Combine numbers to one scalar, a sum with fixed unlike weights, by which ranks compare them."""
    order = torch.arange(1, len(numbers) + 1, device=numbers.device, dtype=torch.float64)
    return (numbers * torch.frac(order * _GOLDEN)).sum()


_BY_INDEX = (
    "the loss given to backward weighs the values of tokens, and the weights of the first tokens are the same on ranks "
    "{}, which hold other positions of the sequences. If they are computed from the index in the part that a rank "
    "holds, one process has others: compute them from position_ids then. Weights that repeat along a sequence are "
    "right, and look the same"
)
_BY_PART = (
    "the loss given to backward weighs the values of tokens, and the mean of the weights over a rank's own tokens is 0 "
    "or 1, or their sum is 1, on each of ranks {}. One process would centre or normalize them over the whole batch: "
    "take the mean over the tokens of all ranks, by torch.distributed.all_reduce, or compute the weights in the "
    "dataset, where sequences are whole"
)
