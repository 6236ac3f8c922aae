"""Check of the numbers by which a script multiplies the values of tokens: not made of a rank's part alone.

A policy's advantages, weights by place, weights that are divided by their sum: a script makes them beside the graph of
the loss, of what a rank holds. Any weights may be right, and their factor in the sum over tokens is
(`ds_hetero.runtime.step_checks.token_factors`). But two marks show what was made of a part:

    centred or normalized    the mean over a rank's own tokens is 0 or 1 on every rank, or their sum is 1, which of a
                             quantity of the whole batch it is not
    made by index            the weights of the first tokens are the same on ranks that hold other places

Both are told and not refused: random weights that all ranks draw from one seed have the second mark, too.

The weights are the operand without a gradient that autograd keeps of a product. A walk from the loss, or from what
`Handle.mean` is given, down through nodes of one number a token finds them. All numbers stay on the device until the
one exchange of the step.

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
from ds_hetero.runtime.data.shard_info import shard_info
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict

_PREFIX = 8  # tokens whose weights are compared
# Of these, how many have to be unlike. Masks and weights by class are few numbers, whose means come to 0 or 1 on all
# ranks now and then; of a sample of rewards some are alike. Chosen, never measured.
_FEWEST_UNLIKE = 6
_MOST_OF_ALL = 64  # in a node above the values of tokens; as of `token_factors`
_MOST_NODES_TO_WEIGHTS = 256  # of a walk; chosen, never measured: a policy's clipped loss has some thirty
_PRODUCTS = frozenset({"MulBackward0", "DivBackward0"})
_GOLDEN = 0.6180339887498949
_IGNORED = -100
# Of means, relative to the weights' root mean square. A mean that was subtracted in fp32 leaves 1e-7; those of random
# weights over s tokens vary by one over the root of s, 1e-3 of a million tokens.
_SAME = 1e-5


class _Weights(NamedTuple):
    """Numbers of one rank about the weights that are looked at in a step."""

    replica: float
    tokens: float  # that have one; 0 where none were found
    labels: float  # of those that count
    distinct: float  # of the first weights
    prefix: float  # a combination of them
    places: float  # the same of the places of their tokens
    mean: float  # of all
    mean_of_labels: float  # of those whose labels count
    size: float  # root mean square


class TrainedOnParts(Protocol):
    """A model that is split over the sequence."""

    replica: Replica
    latest_positions: Tensor | None


class LocalWeights:
    """`ds_hetero.runtime.step_checks.protocol.StepCheck` of the weights of tokens in the losses of one split model.

    Of several weights in a step one is looked at, by turns.
    """

    width = len(_Weights._fields)

    def __init__(self, model: TrainedOnParts) -> None:
        self._model = model
        self._step = self._seen = self._seen_before = 0
        self._numbers: Tensor | None = None  # [8] of the step that runs, on its device

    @torch.no_grad()
    def note_values(self, values: Tensor) -> None:
        """The script gives ``values``, of tokens or a loss of them, to be trained by; waits for no device."""
        positions = self._model.latest_positions
        info = shard_info(positions)
        if positions is None or info is None or info.labels is None or values.grad_fn is None:
            return
        for weights in _weights_in(values.grad_fn, tuple(info.labels.shape)):
            if self._numbers is None and self._seen == self._step % max(self._seen_before, 1):
                self._numbers = _numbers_of(weights, positions, info.labels)
            self._seen += 1

    def numbers(self) -> tuple[Tensor, Tensor]:
        """See `StepCheck`."""
        numbers, self._numbers = self._numbers, None
        self._seen, self._seen_before = 0, self._seen
        self._step += 1
        replica = torch.tensor([float(self._model.replica.replica_id)], dtype=torch.float64)
        return replica, torch.zeros(self.width - 1) if numbers is None else numbers

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        of_ranks = [_Weights(*row) for row in rows]
        for ranks in ranks_by_value((rank, one.replica) for rank, one in enumerate(of_ranks)).values():
            known = {rank: of_ranks[rank] for rank in ranks if of_ranks[rank].labels > 0}
            looked_at = {rank: one for rank, one in known.items() if one.distinct >= _FEWEST_UNLIKE}
            if by_index := _by_index(looked_at):
                return Undecided(_BY_INDEX.format(by_index), subject=_BY_INDEX)
            if len(looked_at) > 1 and _are_of_parts(list(looked_at.values())):
                return Undecided(_OF_PARTS.format(list(looked_at)), subject=_OF_PARTS)
        return None


def _by_index(of_ranks: dict[int, _Weights]) -> list[int]:
    """Ranks whose first weights are the same, all of them unlike, of tokens at other places."""
    unlike = {rank: one for rank, one in of_ranks.items() if one.distinct == _PREFIX}
    for alike in ranks_by_value((rank, one.prefix) for rank, one in unlike.items()).values():
        if len({unlike[rank].places for rank in alike}) > 1:
            return list(alike)
    return []


def _are_of_parts(of_ranks: Sequence[_Weights]) -> bool:
    """Whether each rank's own weights are centred or normalized, and they are not those of the same tokens."""
    if len({one.prefix for one in of_ranks}) == 1:
        return False
    centred_or_normalized = [_quantities_of_parts(one) for one in of_ranks]
    # One and the same quantity on all ranks: a rank may have weights of mean 1 by chance.
    return any(map(all, zip(*centred_or_normalized, strict=True)))


def _quantities_of_parts(weights: _Weights) -> list[bool]:
    """Whether a rank's weights are centred or normalized: those of all its tokens, then of those that count."""
    of_all = _centred_or_normalized(weights.mean, weights.tokens, weights.size)
    of_labels = _centred_or_normalized(weights.mean_of_labels, weights.labels, weights.size)
    return [*of_all, *of_labels]


def _centred_or_normalized(mean: float, count: float, size: float) -> tuple[bool, bool, bool]:
    """Whether the mean of weights is 0, whether it is 1, and whether their sum is 1."""
    return (
        _are_alike(mean, 0.0, size),
        _are_alike(mean, 1.0, size),
        _are_alike(mean * count, 1.0, size * count),
    )


def _are_alike(value: float, expected: float, size: float) -> bool:
    return abs(value - expected) <= _SAME * size


def _weights_in(top: Node, shape: Sequence[int]) -> list[Tensor]:
    """Operands without a gradient, of one number a token, in products of the values of [B, s] tokens."""
    batch_size, tokens = shape
    num_values = batch_size * tokens
    todo, seen, found = [top], set[Node](), list[Tensor]()
    while todo and len(seen) < _MOST_NODES_TO_WEIGHTS:
        node = todo.pop()
        numel = _numel(node)
        is_by_token, is_of_all = numel == num_values, numel <= _MOST_OF_ALL
        if node in seen or not (is_by_token or is_of_all):
            continue
        seen.add(node)
        weights = _operand(node) if is_by_token and tokens >= _PREFIX else None
        if weights is not None and weights.numel() in (tokens, num_values):
            found.append(weights)
        todo += [below for below, _ in reversed(node.next_functions) if below is not None]
    return found


def _numel(node: Any) -> int:
    """Of a node's first result; no small number where that is not known."""
    metadata = node._input_metadata
    return prod(int(size) for size in metadata[0].shape) if metadata else _MOST_OF_ALL + 1


def _operand(node: Any) -> Tensor | None:
    """What a product or a quotient multiplies by, which has no gradient; None of others, and of hooked tensors."""
    if node.name() not in _PRODUCTS or all(below is not None for below, _ in node.next_functions):
        return None
    name = "other" if node.next_functions[0][0] is not None else "self"
    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:  # see `token_factors`
        return None
    saved = getattr(node, f"_saved_{name}")
    if not isinstance(saved, Tensor) or saved.is_complex():
        return None
    is_exact = not saved.is_floating_point() or saved.element_size() >= 4  # an index is of integers, often
    return saved.detach() if is_exact else None


def _numbers_of(weights: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    """Summarize this rank's token weights as the numbers of `_Weights`, [8]."""
    flat = weights.reshape(-1).double()
    first = flat[:_PREFIX]
    counted = labels.ne(_IGNORED)
    counted = (counted[0] if len(flat) == labels.shape[1] else counted).reshape(-1).double()
    return torch.stack(
        [
            torch.full((), float(len(flat)), dtype=torch.float64, device=flat.device),
            counted.sum(),
            1 + first.sort().values.diff().ne(0).sum().double(),
            _combined(first),
            _combined(positions.reshape(-1, positions.shape[-1])[0, :_PREFIX].double()),
            flat.mean(),
            (flat * counted).sum() / counted.sum().clamp(min=1),
            flat.square().mean().sqrt(),
        ]
    )


def _combined(numbers: Tensor) -> Tensor:
    """[] a sum with fixed unlike weights."""
    order = torch.arange(1, len(numbers) + 1, device=numbers.device, dtype=torch.float64)
    return (numbers * torch.frac(order * _GOLDEN)).sum()


_BY_INDEX = (
    "the loss given to backward weighs the values of tokens, and the weights of the first tokens are the same on ranks "
    "{}, which hold other places of the sequences. If they are made by the index in the part that a rank holds, one "
    "process has others: make them of position_ids then. Weights that repeat along a sequence are right and look alike"
)
_OF_PARTS = (
    "the loss given to backward weighs the values of tokens, and the mean of the weights over a rank's own tokens is 0 "
    "or 1, or their sum is 1, on each of ranks {}. What is centred or normalized over a part is another quantity than "
    "one process has: take the mean over the tokens of all ranks, by torch.distributed.all_reduce, or make it in the "
    "dataset, where sequences are whole"
)
