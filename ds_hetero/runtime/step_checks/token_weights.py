"""Check of the loss of every step: the weight of each label in the gradient that really trains.

One process weighs all labels of a micro-batch alike. A loss that a script computes itself on parts of sequences may do
something else (means of ranks' means, sums over the wrong count, an all_reduce without a gradient) while its value
looks right, or is right in the first steps. So a few tokens are drawn at every forward, other ones at every step, and a
hook on the logits sees the gradient that reaches them, after all scaling. Of token cross entropy it is, at token t,

    g_t = w_t (p_t - y_t)        p_t softmax of its logits, y_t one-hot of its label

so that w_t = <g_t, p_t - y_t> / |p_t - y_t|^2, and what is left, |g_t - w_t (p_t - y_t)| / |g_t|, says whether the loss
is of this kind. If it is, the w_t of all ranks of a replica have to be equal. A loss that weighs its tokens itself, by
class or by position, shows unequal w_t inside a rank; of that one, and of one that is not token cross entropy, the
values on the ranks are compared here, and its sums by `ds_hetero.runtime.step_checks.token_factors`.

All numbers stay on the device until the one exchange of the step.

Dimension key: B batch, s tokens of this rank, V vocabulary, K drawn tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds_hetero.common.text import ranks_by_value
from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict

_DRAWN = 4  # tokens of a rank at each forward; a rank's weights are equal or they are not, few show it
_MOST_FORWARDS = 8  # of a step that are looked at, spread over its accumulation; 10 numbers each
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly: Weyl's sequence
_IGNORED = -100

# Least |p - y| at which a weight is believed. Both terms are near 1 where a token is learned, and p - y of fp32 has an
# error of 1e-7: 1e-5 of the weight at this size.
_LEAST_ERROR = 0.02
# Relative differences that rounding explains. fp32: sums over V in another order. Half: gradients of 8 bits of mantissa
# (2^-8), softmax by some scripts in bf16 too.
_RTOL, _RTOL_HALF = 1e-3, 3e-2
# What is left of a gradient beside w (p - y), below which the loss is token cross entropy; of half, as above.
_RESIDUAL, _RESIDUAL_HALF = 2e-3, 6e-2
# Ranks that follow the recipe compute with the same numbers; they differ by the order of their sums, or where compilers
# fuse a product and a sum.
_SAME, _SAME_HALF = 16 * torch.finfo(torch.float32).eps, 1e-3
_STEPS_UNDECIDED = 3  # in a row with one weight inside every rank and another on each, before that is a fault


class _Forward(NamedTuple):
    """Numbers of one rank about one forward of a step."""

    tokens: float  # of the rank's part
    labels: float  # that count in it
    samples: float  # drawn tokens whose weights are known
    zeros: float  # drawn tokens with a label and no gradient, which the script left out
    mean: float  # weights of the others
    least: float
    most: float
    residual: float  # largest share of a gradient that is not token cross entropy's
    expected: float  # value of the loss that the engine makes of these logits; NaN where it made none
    value: float  # of the loss that was given to the backward of the same number; NaN without


class _Totals(NamedTuple):
    """Numbers of one rank about a whole step."""

    replica: float
    backwards: float
    forwards: float
    unscaled: float  # losses that the script computed itself
    is_half: float  # a loss is of half precision
    has_half_logits: float
    divisor: float  # by which the engine divides losses
    items: float  # labels of the step over all ranks, as the loader counted them; -1 where it did not
    values: float  # of all losses given to backward, each times a number of its own, added up
    size: float  # of the same, of their absolute values
    unknown: float  # losses that are NaN, as of no label at all
    labels: float  # that count in all forwards of the step


@dataclass
class _Seen:
    """Record of one forward on this rank, on its device."""

    rows: Tensor  # [K, V] logits of the drawn tokens
    labels: Tensor  # [K]
    places: Tensor  # [K] in the flat tokens
    counts: Tensor  # [] labels that count
    tokens: int
    expected: Tensor | None
    gradient: Tensor | None = None  # [K, V], after a backward; of several their sum


@dataclass
class _Step:
    """Record of the step that runs, on this rank."""

    forwards: list[_Seen] = field(default_factory=list)
    num_forwards: int = 0
    labels: Tensor | None = None  # [] counts of all forwards
    items: int | None = None
    values: list[Tensor] = field(default_factory=list)  # [] of the losses given to backward
    unscaled: int = 0
    is_half: bool = False
    has_half_logits: bool = False
    divisor: int = 1


class Trained(Protocol):
    """A model that is split over the sequence."""

    replica: Replica
    loss_convention: str | None  # that the section declares


class TokenWeights:
    """`ds_hetero.runtime.step_checks.protocol.StepCheck` of the loss of one split model.

    Args:
        model: whose replica may change between steps.
        accumulation: micro-batches of an optimizer step.
        scales: whether the engine multiplies losses by a factor of its own, as for fp16.
    """

    def __init__(self, model: Trained, accumulation: int, *, scales: bool = False) -> None:
        self._model, self._accumulation, self._scales = model, accumulation, scales
        self._slots = min(accumulation, _MOST_FORWARDS)
        self._stride = -(-accumulation // _MOST_FORWARDS)
        self.width = len(_Totals._fields) + self._slots * len(_Forward._fields)
        self._step, self._number = _Step(), 0
        self._in_a_row = 0  # steps whose weights differ by rank alone, in no known way
        self._earlier: list[list[float]] = []  # labels by rank, of the first forward of the first and the latest step

    @torch.no_grad()
    def note_forward(self, logits: Tensor, labels: Tensor, expected: Tensor | None, items: int | None) -> None:
        """A forward of training has made ``logits`` [B, s, V] of tokens with ``labels`` [B, s]; waits for no device.

        Args:
            expected: the loss that the engine made of them, if any.
            items: labels of the step over all ranks, where the loader counted them.
        """
        step = self._step
        number = step.num_forwards
        step.num_forwards += 1
        counts = labels.reshape(-1).ne(_IGNORED)
        num_labels = counts.sum()
        step.labels = num_labels if step.labels is None else step.labels + num_labels
        step.items = items
        step.has_half_logits |= logits.element_size() < 4
        if len(step.forwards) >= self._slots or (number + self._number) % self._stride or not logits.requires_grad:
            return
        places = _draw(counts, self._number * self._accumulation + number)
        rows = logits.detach().reshape(-1, logits.shape[-1])[places]
        seen = _Seen(
            rows=rows,
            labels=labels.reshape(-1)[places],
            places=places,
            counts=num_labels,
            tokens=counts.numel(),
            expected=None if expected is None else expected.detach().double(),
        )
        step.forwards.append(seen)
        logits.register_hook(lambda gradient: _keep(seen, gradient))  # type: ignore[no-untyped-call]

    def note_backward(self, loss: Tensor, divisor: int, *, is_scaled: bool) -> None:
        """The script gives ``loss`` to backward, which divides it. ``is_scaled``: the engine made it."""
        self._step.values.append(loss.detach().double().reshape(()))
        self._step.unscaled += not is_scaled
        self._step.is_half |= loss.element_size() < 4
        self._step.divisor = divisor

    @property
    def _convention(self) -> str | None:
        return self._model.loss_convention

    @property
    def _weighs_by_items(self) -> bool:
        """Whether replicas take different batches, whose labels all weigh the same."""
        return self._model.replica.batch_split is not None

    @torch.no_grad()
    def numbers(self) -> tuple[Tensor, ...]:
        """See `StepCheck`; what is known on the host is not sent to a device."""
        step, self._step = self._step, _Step()
        self._number += 1
        parts = [*_totals(step, self._model.replica.replica_id)]
        for slot in range(self._slots):
            seen = step.forwards[slot] if slot < len(step.forwards) else None
            # Values belong to forwards where each forward has one backward, in order.
            in_order = len(step.values) == step.num_forwards and self._stride == 1
            value = step.values[slot] if in_order and slot < len(step.values) else None
            parts += [_NO_FORWARD] if seen is None else _numbers_of(seen, value)
        return tuple(parts)

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        totals = [_Totals(*row[: len(_Totals._fields)]) for row in rows]
        by_slot = [[_forward_of(row, slot) for row in rows] for slot in range(self._slots)]
        replicas = list(ranks_by_value((rank, total.replica) for rank, total in enumerate(totals)).values())
        verdict = self._judge_values(totals, replicas) or self._judge_items(totals)
        if verdict is not None:
            return verdict
        by_forward = [self._judge_forward(forwards, totals, replicas) for forwards in by_slot]
        undecided = [one for one in by_forward if isinstance(one, Undecided)]
        self._in_a_row = self._in_a_row + 1 if any(one.text.startswith(_BY_RANK) for one in undecided) else 0
        self._earlier = [*self._earlier[:1], [forward.labels for forward in by_slot[0]]]
        wrong = next((one for one in by_forward if one is not None and not isinstance(one, Undecided)), None)
        is_known = any(forward.samples for forwards in by_slot for forward in forwards) and not undecided
        if (wrong is not None or not is_known) and self._contradicts_key(totals, replicas):
            return ConfigError(
                f'"heterogeneity.loss" is "{self._convention}", but the loss given to backward is the same on all '
                f"ranks of each replica (by rank {_means(totals)}), as it is by handle.loss and by the recipe. Leave "
                "the key out."
            )
        if wrong is not None or not undecided:
            return wrong
        if self._in_a_row > _STEPS_UNDECIDED:
            return ConfigError(f"{undecided[0].text} So it was in {self._in_a_row} steps in a row. {_REMEDY}")
        return undecided[0]

    def _contradicts_key(self, totals: Sequence[_Totals], replicas: Sequence[Sequence[int]]) -> bool:
        """Whether the section declares a rank's own loss, and the ranks of each replica give one value."""
        shared = [[totals[rank] for rank in ranks] for ranks in replicas if len(ranks) > 1]
        if self._convention in (None, "replica_mean") or not all(total.unscaled for total in totals):
            return False
        return bool(shared) and all(_one_value(of_replica) and of_replica[0].size > 0 for of_replica in shared)

    def _judge_values(self, totals: Sequence[_Totals], replicas: Sequence[Sequence[int]]) -> Verdict:
        """By the recipe, all ranks of a replica give the same values to backward, at every step."""
        if not any(total.unscaled for total in totals) or self._convention not in (None, "replica_mean"):
            return None
        if all(_one_value([totals[rank] for rank in ranks]) for ranks in replicas):
            return None
        return ConfigError(
            f"the loss given to backward differs between the ranks of a replica (by rank {_means(totals)}), so it is "
            "not the mean over the replica's tokens. Use handle.loss, or say what it is: "
            '"heterogeneity": {"loss": "local_mean"}, a mean over the rank\'s own labels; "local_sum", their sum; '
            '"local_share", their sum over the number of labels in the replica.'
        )

    def _judge_items(self, totals: Sequence[_Totals]) -> Verdict:
        """Where the loader's count divides the loss, it has to be that of the labels that the model was given."""
        if not self._weighs_by_items or any(total.items < 0 for total in totals):
            return None
        if any(total.forwards != self._accumulation or total.backwards != total.forwards for total in totals):
            return None
        labels, items = sum(total.labels for total in totals), totals[0].items
        if labels == items:
            return None
        return BatchError(
            f"the loss of this step is divided by {items:.0f} labels, which the loader counted over all ranks, but the "
            f"model was given {labels:.0f} labels that count (by rank {[int(total.labels) for total in totals]}). "
            "Change labels in the dataset or the collator, before the loader counts them."
        )

    def _judge_forward(
        self, forwards: Sequence[_Forward], totals: Sequence[_Totals], replicas: Sequence[Sequence[int]]
    ) -> Verdict:
        is_half = any(total.is_half or total.has_half_logits for total in totals)
        rtol = _RTOL_HALF if is_half else _RTOL
        known = [rank for rank, forward in enumerate(forwards) if forward.samples > 0]
        if not known:
            return None
        is_own = any(total.unscaled for total in totals)
        if max(forwards[rank].residual for rank in known) > (_RESIDUAL_HALF if is_half else _RESIDUAL):
            return Undecided(_OF_ANOTHER_KIND) if is_own else None
        if any(not _alike(forwards[rank].least, forwards[rank].most, rtol) for rank in known):
            return Undecided(_BY_TOKEN) if is_own else None
        for ranks in replicas:
            of_replica = [rank for rank in ranks if rank in known]
            weights = [forwards[rank].mean for rank in of_replica]
            if of_replica and not _alike(min(weights), max(weights), rtol):
                return self._judge_weights(forwards, of_replica, rtol)
        return self._judge_replicas(forwards, replicas, known, rtol) or self._judge_scale(
            forwards, totals, replicas, known, rtol
        )

    def _judge_weights(self, forwards: Sequence[_Forward], ranks: Sequence[int], rtol: float) -> Verdict:
        """The weights of a replica's ranks differ, and are equal inside each."""
        weights = [forwards[rank].mean for rank in ranks]
        labels, tokens = [forwards[rank].labels for rank in ranks], [forwards[rank].tokens for rank in ranks]
        shares = [f"{weight / max(weights, key=abs):.4g}" for weight in weights]
        seen = (
            f"{_BY_RANK}: {shares} on ranks {list(ranks)}, relative to the largest, with {[int(n) for n in labels]} "
            "labels each, where one process weighs every label of a batch alike."
        )
        if any(_goes_with(weights, [1 / n for n in labels], rtol)):
            why = "They go with one over the rank's own labels, as of a mean over these that is averaged over ranks."
            return ConfigError(f"{seen} {why} {self._remedy()}")
        # Mistakes seen in scripts: with the weights that each gives, a fault is told from a loss that weighs by rank on
        # purpose. A rank of 28 labels among 30 tokens beside one of 8 among 10 has tokens over labels of 1.07 and 1.25.
        known_ways = [
            labels,  # a sum, weighed by labels
            tokens,  # a sum, weighed by tokens
            [1 / n for n in tokens],  # a mean over tokens, those without a label too
            [t / n for t, n in zip(tokens, labels, strict=True)],  # a mean over labels, weighed by tokens
            [n / t for t, n in zip(tokens, labels, strict=True)],  # a mean over tokens, weighed by labels
            # A mean over labels, weighed by those of an earlier batch.
            *([before[rank] / forwards[rank].labels for rank in ranks] for before in self._earlier),
        ]
        equals_mean = all(_alike(forwards[rank].value, forwards[rank].expected, rtol) for rank in ranks)
        if (
            equals_mean
            or self._convention is not None
            or any(any(_goes_with(weights, way, rtol)) for way in known_ways)
        ):
            return ConfigError(f"{seen} {self._remedy()}")
        return Undecided(seen)

    def _judge_replicas(
        self, forwards: Sequence[_Forward], replicas: Sequence[Sequence[int]], known: Sequence[int], rtol: float
    ) -> Verdict:
        """Replicas weigh all labels of the step alike, or all their means alike."""
        shown = [next(rank for rank in ranks if rank in known) for ranks in replicas if set(ranks) & set(known)]
        of_all = {
            rank: sum(forwards[other].labels for other in ranks)
            for ranks in replicas
            for rank in ranks
            if rank in shown
        }
        weights = [forwards[rank].mean for rank in shown]
        means = [forwards[rank].mean * of_all[rank] for rank in shown]
        by_labels = _alike(min(weights), max(weights), rtol)
        by_means = _alike(min(means), max(means), rtol) and not self._weighs_by_items
        if len(shown) < 2 or by_labels or by_means:
            return None
        shares = [f"{weight / max(weights, key=abs):.4g}" for weight in weights]
        text = (
            f"the loss given to backward weighs labels by replica: {shares} relative to the largest, with "
            f"{[int(of_all[rank]) for rank in shown]} labels each. One process weighs every label alike, or the mean "
            "of every batch."
        )
        return ConfigError(f"{text} {_REMEDY}") if self._weighs_by_items else Undecided(text)

    def _judge_scale(
        self,
        forwards: Sequence[_Forward],
        totals: Sequence[_Totals],
        replicas: Sequence[Sequence[int]],
        known: Sequence[int],
        rtol: float,
    ) -> Verdict:
        """A loss that has the value of the batch's mean has its gradient, too."""
        if self._scales or self._weighs_by_items:
            return None
        for ranks in replicas:
            of_replica = [rank for rank in ranks if rank in known]
            if not of_replica:
                continue
            shares = [forwards[rank].value / (forwards[rank].expected or float("nan")) for rank in ranks]
            if all(_alike(share, 1 / len(totals), 10 * _SAME) for share in shares):
                return Undecided(_DIVIDED.format(len(totals)))
            if not all(_alike(share, 1.0, 10 * _SAME) for share in shares):
                continue
            labels = sum(forwards[rank].labels for rank in ranks)
            expected = len(totals) / (len(replicas) * labels * totals[0].divisor)
            scale = forwards[of_replica[0]].mean / expected
            if not _alike(scale, 1.0, rtol):
                return ConfigError(
                    f"the loss given to backward has the value of the mean over the batch's labels, and {scale:.4g} "
                    "times its gradient. A sum over ranks by torch.distributed.all_reduce carries no gradient. "
                    f"{_REMEDY}"
                )
        return None

    def _remedy(self) -> str:
        if self._convention is None:
            return _REMEDY
        return (
            f'"heterogeneity.loss" is "{self._convention}", and this loss is something else, or of other labels than '
            "the batch has. Use handle.loss, which needs no key; or change labels before the loader counts them."
        )


_BY_RANK = "the loss given to backward weighs labels by rank"
_BY_TOKEN = (
    "the loss given to backward weighs tokens unlike each other, as losses with weights by class or by position do: "
    "that it is divided by the same on all ranks is checked by its value and by the sums in it alone"
)
_DIVIDED = (
    "the loss given to backward is the mean over the batch's labels, divided by {}, which is the number of ranks. "
    "If it is divided for the ranks, training is that of one process with smaller gradients: leave the "
    "division out, the engine averages over the ranks by itself"
)
_OF_ANOTHER_KIND = (
    "the loss given to backward is not the cross entropy of single tokens, or more than that: that it weighs tokens of "
    "all ranks alike is checked by its value and by the sums in it alone"
)
_REMEDY = (
    "Use engine(**batch).loss or handle.loss; give terms of your own to handle.mean(per_token, batch); or say what the "
    'loss is: "heterogeneity": {"loss": "local_mean"}, a mean over the rank\'s own labels; "local_sum", their sum; '
    '"local_share", their sum over the number of labels in the replica.'
)


def _draw(counts: Tensor, number: int) -> Tensor:
    """[T] -> [K], places of labels that count, spread over the tokens, other ones for every ``number``.

    Where fewer than K count, others are drawn too. No size depends on a value, so that no device is waited for.
    """
    order = torch.arange(1, len(counts) + 1, device=counts.device, dtype=torch.float64)
    score = torch.frac(order * _GOLDEN + (number * _GOLDEN * _GOLDEN) % 1.0) + 1.0
    return (score * counts).topk(min(_DRAWN, len(counts))).indices


@torch.no_grad()
def _keep(seen: _Seen, gradient: Tensor) -> None:
    """Keep the rows of the drawn tokens; the gradient itself goes on as it is."""
    rows = gradient.detach().reshape(-1, gradient.shape[-1])[seen.places]
    seen.gradient = rows if seen.gradient is None else seen.gradient + rows


_NAN = float("nan")
_NO_FORWARD = torch.tensor([0.0] * 4 + [_NAN] * 6, dtype=torch.float64)  # see `_Forward`


def _numbers_of(seen: _Seen, value: Tensor | None) -> list[Tensor]:
    """Summarize a forward as the numbers of `_Forward`: [1] known on the host, [9] computed on the device."""
    # In double, so that p - y of a learned token is not rounding alone.
    error = torch.softmax(seen.rows.double(), dim=-1)
    counted = seen.labels.ne(_IGNORED)
    error.scatter_add_(-1, seen.labels.clamp(min=0)[:, None], error.new_full((len(error), 1), -1.0))
    size = torch.linalg.vector_norm(error, dim=-1)
    if seen.gradient is None:
        gradient, believed = torch.zeros_like(error), torch.zeros_like(counted)
    else:
        gradient, believed = seen.gradient.double(), counted & (size > _LEAST_ERROR)
    norm = torch.linalg.vector_norm(gradient, dim=-1)
    weights = (gradient * error).sum(-1) / size.square().clamp(min=1e-30)
    rest = torch.linalg.vector_norm(gradient - weights[:, None] * error, dim=-1)
    residual = rest / norm.clamp(min=1e-30)
    used = believed & (norm != 0)
    count = used.sum()
    unused = ~used
    infinity = float("inf")
    nan = size.new_full((), _NAN)
    return [
        torch.tensor([float(seen.tokens)], dtype=torch.float64),
        torch.stack(
            [
                seen.counts.double(),
                count.double(),
                believed.sum().double() - count,
                weights.masked_fill(unused, 0.0).sum() / count.clamp(min=1),
                weights.masked_fill(unused, infinity).min(),
                weights.masked_fill(unused, -infinity).max(),
                residual.masked_fill(unused, 0.0).max(),
                nan if seen.expected is None else seen.expected.to(nan.device).reshape(()),
                nan if value is None else value.to(nan.device),
            ]
        ),
    ]


def _totals(step: _Step, replica_id: int) -> tuple[Tensor, Tensor]:
    """Sum up a step's losses as the numbers of `_Totals`: [8] known on the host, [4] computed on the device."""
    items = -1 if step.items is None else step.items
    of_losses = len(step.values), step.num_forwards, step.unscaled, step.is_half, step.has_half_logits, step.divisor
    on_host = torch.tensor([replica_id, *of_losses, items], dtype=torch.float64)
    if not step.values and step.labels is None:
        return on_host, torch.zeros(4, dtype=torch.float64)
    device = step.values[0].device if step.values else step.labels.device  # type: ignore[union-attr]
    values = (
        torch.stack([one.to(device) for one in step.values])
        if step.values
        else torch.zeros(1, dtype=torch.float64, device=device)
    )
    is_nan = values.isnan()
    factors = 1 + torch.frac(torch.arange(len(values), device=device, dtype=torch.float64) * _GOLDEN)
    products = factors * values.masked_fill(is_nan, 0.0)
    labels = is_nan.new_zeros(()) if step.labels is None else step.labels.to(device)
    return on_host, torch.stack([products.sum(), products.abs().sum(), is_nan.sum().double(), labels.double()])


def _forward_of(row: Sequence[float], slot: int) -> _Forward:
    start = len(_Totals._fields) + slot * len(_Forward._fields)
    return _Forward(*row[start : start + len(_Forward._fields)])


def _one_value(totals: Sequence[_Totals]) -> bool:
    """Whether ranks gave the same losses to backward; NaN is that of no label at all."""
    values, size = [total.values for total in totals], max(total.size for total in totals)
    same = _SAME_HALF if any(total.is_half for total in totals) else _SAME
    return max(values) - min(values) <= same * size and len({total.unknown for total in totals}) == 1


def _means(totals: Sequence[_Totals]) -> list[str]:
    """Sizes of the losses of a step, by rank, for a message."""
    return [f"{total.values / max(total.backwards, 1):.6g}" for total in totals]


def _alike(a: float, b: float, rtol: float) -> bool:
    """Whether two numbers are equal to rounding; NaN is equal to nothing."""
    return not isnan(a) and not isnan(b) and abs(a - b) <= rtol * max(abs(a), abs(b))


def _goes_with(weights: Sequence[float], way: Sequence[float], rtol: float) -> Sequence[bool]:
    """Whether ``weights`` are proportional to ``way``, which is not the same on all ranks; one element, or none."""
    if min(way) <= 0 or _alike(min(way), max(way), rtol):
        return []
    ratios = [weight / each for weight, each in zip(weights, way, strict=True)]
    return [_alike(min(ratios), max(ratios), rtol)]
