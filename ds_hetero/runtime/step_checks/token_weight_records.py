"""Record the drawn tokens of the forwards of a step, and summarize them as numbers that all ranks exchange.

    record = StepRecord()
    record_forward(...)            # at every forward: draws tokens, and hooks the gradient of their logits
    step_numbers(record, ...)      # at the step's end: the numbers of `StepTotals`
    forward_numbers(forward, ...)  # and of `ForwardNumbers`, for every recorded forward

The weight of a token is computed as `ds_hetero.runtime.step_checks.token_weights` describes. All numbers stay on the
device.

Dimension key: B batch, s tokens of this rank, V vocabulary, T = B * s flat tokens, K drawn tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

DRAWN_TOKENS = 4  # of a rank at each forward: its weights are all equal or they are not, and few tokens show it
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly: Weyl's sequence
_IGNORED = -100

# Smallest |p - y| at which a weight is believed. Both terms are near 1 where a token is learned, and p - y of fp32 has
# an error of 1e-7: 1e-5 of the weight at this size.
_MIN_ERROR = 0.02


class ForwardNumbers(NamedTuple):
    """Numbers of one rank about one forward of a step."""

    tokens: float  # in the rank's part of the batch
    labels: float  # that count, in that part
    samples: float  # drawn tokens whose weights are known
    zeros: float  # drawn tokens with a label and no gradient, which the script left out of its loss
    mean: float  # of the known weights
    min_weight: float  # of the known weights
    max_weight: float  # of the known weights
    residual: float  # largest share of a token's gradient that is not that of cross entropy
    # Value of the loss that the engine computes from these logits; NaN if it computed none, or if all logits are equal.
    expected: float
    value: float  # of the loss given to the backward that belongs to this forward; NaN if not known

    @classmethod
    def of_slot(cls, row: Sequence[float], slot: int) -> ForwardNumbers:
        """Return the numbers of the recorded forward ``slot`` in the row of a rank."""
        start = len(StepTotals._fields) + slot * len(cls._fields)
        return cls(*row[start : start + len(cls._fields)])


class StepTotals(NamedTuple):
    """What one rank tells the others about a whole step; all fields are numbers, so that they fit a tensor."""

    replica: float  # id of the rank's replica
    backwards: float
    forwards: float
    unscaled: float  # losses that the script computed itself
    is_half: float  # a loss is of half precision
    has_half_logits: float
    divisor: float  # by which the engine divides losses
    items: float  # labels of the step over all ranks, as the loader counted them; -1 if it did not
    values: float  # sum of the losses given to backward, each times a factor of its own
    size: float  # the same sum of their absolute values
    unknown: float  # losses that are NaN, as the mean over no label is
    labels: float  # that count, in all forwards of the step

    @classmethod
    def of(cls, row: Sequence[float]) -> StepTotals:
        """Return the totals at the beginning of the row of a rank."""
        return cls(*row[: len(cls._fields)])


@dataclass
class ForwardRecord:
    """The drawn tokens of one forward on this rank, on its device.

    Attributes:
        logits: [K, V], of the drawn tokens.
        labels: [K], of the drawn tokens.
        indices: [K], index of each drawn token in the flat tokens.
        num_labels: [], number of labels of the forward that count in the loss.
        num_tokens: number of all tokens of the forward on this rank, T.
        expected: loss that the engine computed from the logits, if any.
        gradient: [K, V], gradient of the logits, summed over the backwards so far; None before the first one.
    """

    logits: Tensor
    labels: Tensor
    indices: Tensor
    num_labels: Tensor
    num_tokens: int
    expected: Tensor | None
    gradient: Tensor | None = None


@dataclass
class StepRecord:
    """What this rank has noted in the present step.

    Attributes:
        forwards: the recorded forwards.
        num_forwards: number of all forwards.
        labels: [], number of labels that count, in all forwards.
        items: number of labels of the step over all ranks; None if the loader did not count them.
        values: [] each, values of the losses that were given to backward.
        unscaled: number of losses that the script computed itself.
        is_half: a loss is of half precision.
        has_half_logits: logits are of half precision.
        divisor: by which the engine divides losses.
    """

    forwards: list[ForwardRecord] = field(default_factory=list)
    num_forwards: int = 0
    labels: Tensor | None = None
    items: int | None = None
    values: list[Tensor] = field(default_factory=list)
    unscaled: int = 0
    is_half: bool = False
    has_half_logits: bool = False
    divisor: int = 1


def record_forward(logits: Tensor, labels: Tensor, expected: Tensor | None, draw: int) -> ForwardRecord:
    """Draw tokens of a forward and record them; a hook on ``logits`` adds their gradient to the record.

    Args:
        logits: [B, s, V], with a gradient.
        labels: [B, s].
        expected: loss that the engine computed from the logits, if any.
        draw: another number at every forward, so that other tokens are drawn.
    """
    counts = labels.reshape(-1).ne(_IGNORED)
    indices = _draw_tokens(counts, draw)
    record = ForwardRecord(
        logits=logits.detach().reshape(-1, logits.shape[-1])[indices],
        labels=labels.reshape(-1)[indices],
        indices=indices,
        num_labels=counts.sum(),
        num_tokens=counts.numel(),
        expected=None if expected is None else expected.detach().double(),
    )
    logits.register_hook(lambda gradient: _add_gradient(record, gradient))  # type: ignore[no-untyped-call]
    return record


def count_labels(labels: Tensor) -> Tensor:
    """Return the number of labels that count, on the device of ``labels``."""
    return labels.reshape(-1).ne(_IGNORED).sum()


def _draw_tokens(counts: Tensor, number: int) -> Tensor:
    """Return the indices [K] of tokens whose labels count, spread evenly; another ``number`` draws other tokens.

    If fewer than K labels count, tokens without such a label are drawn as well: then no size depends on a value, and
    the host need not wait for the device.

    Args:
        counts: [T], whether the label of a token counts.
    """
    order = torch.arange(1, len(counts) + 1, device=counts.device, dtype=torch.float64)
    score = torch.frac(order * _GOLDEN + (number * _GOLDEN * _GOLDEN) % 1.0) + 1.0
    return (score * counts).topk(min(DRAWN_TOKENS, len(counts))).indices


@torch.no_grad()
def _add_gradient(record: ForwardRecord, gradient: Tensor) -> None:
    """Add the gradient of the drawn tokens to the record; the hooked gradient itself stays as it is."""
    rows = gradient.detach().reshape(-1, gradient.shape[-1])[record.indices]
    record.gradient = rows if record.gradient is None else record.gradient + rows


_NAN = float("nan")
NO_FORWARD = torch.tensor([0.0] * 4 + [_NAN] * 6, dtype=torch.float64)  # `ForwardNumbers` without a forward


def forward_numbers(record: ForwardRecord, value: Tensor | None) -> list[Tensor]:
    """Summarize a forward as `ForwardNumbers`: [1] number known on the host, [9] computed on the device.

    Args:
        value: of the loss given to the backward that belongs to the forward, if known.
    """
    # In double, so that p - y of a learned token is not rounding alone.
    error_KV = torch.softmax(record.logits.double(), dim=-1)
    has_label = record.labels.ne(_IGNORED)
    minus_one = error_KV.new_full((len(error_KV), 1), -1.0)
    error_KV.scatter_add_(-1, record.labels.clamp(min=0)[:, None], minus_one)  # p - y
    error_size_K = torch.linalg.vector_norm(error_KV, dim=-1)
    if record.gradient is None:
        gradient_KV, is_believed = torch.zeros_like(error_KV), torch.zeros_like(has_label)
    else:
        gradient_KV, is_believed = record.gradient.double(), has_label & (error_size_K > _MIN_ERROR)
    norm_K = torch.linalg.vector_norm(gradient_KV, dim=-1)
    weights_K = (gradient_KV * error_KV).sum(-1) / error_size_K.square().clamp(min=1e-30)
    rest_K = torch.linalg.vector_norm(gradient_KV - weights_K[:, None] * error_KV, dim=-1)
    residual_K = rest_K / norm_K.clamp(min=1e-30)
    is_used = is_believed & (norm_K != 0)
    is_unused = ~is_used
    num_used = is_used.sum()
    infinity, nan = float("inf"), error_size_K.new_full((), _NAN)
    # Under a head of zeros all logits of a token are equal. There a smoothed loss has the value of cross entropy, and a
    # gradient that is (1 - smoothing) times as large: the expected value says nothing of the gradient.
    are_equal = (record.logits.amax(-1) == record.logits.amin(-1)).all()
    expected = nan if record.expected is None else record.expected.to(nan.device).reshape(())
    return [
        torch.tensor([float(record.num_tokens)], dtype=torch.float64),
        torch.stack(
            [
                record.num_labels.double(),
                num_used.double(),
                is_believed.sum().double() - num_used,
                weights_K.masked_fill(is_unused, 0.0).sum() / num_used.clamp(min=1),
                weights_K.masked_fill(is_unused, infinity).min(),
                weights_K.masked_fill(is_unused, -infinity).max(),
                residual_K.masked_fill(is_unused, 0.0).max(),
                torch.where(are_equal, nan, expected),
                nan if value is None else value.to(nan.device),
            ]
        ),
    ]


def step_numbers(step: StepRecord, replica_id: int) -> tuple[Tensor, Tensor]:
    """Return the fields of `StepTotals` as two tensors: the first 8 on the host, the last 4 on the device."""
    on_host = [
        replica_id,
        len(step.values),
        step.num_forwards,
        step.unscaled,
        step.is_half,
        step.has_half_logits,
        step.divisor,
        -1 if step.items is None else step.items,
    ]
    host_numbers = torch.tensor(on_host, dtype=torch.float64)
    if not step.values and step.labels is None:
        return host_numbers, torch.zeros(4, dtype=torch.float64)
    device = step.values[0].device if step.values else step.labels.device  # type: ignore[union-attr]
    if step.values:
        values = torch.stack([value.to(device) for value in step.values])
    else:
        values = torch.zeros(1, dtype=torch.float64, device=device)
    is_nan = values.isnan()
    # Each loss has a factor of its own, so that losses in another order have another sum.
    factors = 1 + torch.frac(torch.arange(len(values), device=device, dtype=torch.float64) * _GOLDEN)
    products = factors * values.masked_fill(is_nan, 0.0)
    labels = is_nan.new_zeros(()) if step.labels is None else step.labels.to(device)
    num_nan, num_labels = is_nan.sum().double(), labels.double()
    return host_numbers, torch.stack([products.sum(), products.abs().sum(), num_nan, num_labels])
