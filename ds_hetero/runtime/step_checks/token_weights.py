"""Check at every step that the gradient weighs each label as one process would.

One process gives all labels of a micro-batch the same weight. A loss that a script computes itself on parts of
sequences may not do so (means of ranks' means, sums over the wrong count, an all_reduce without a gradient), while its
value looks right, or is right in the first steps. So a few tokens are drawn at every forward, other ones at every step,
and a hook on the logits sees the gradient that reaches them, after all scaling. For token cross entropy this gradient
is, at token t,

    g_t = w_t (p_t - y_t)        p_t softmax of its logits, y_t one-hot of its label

so the weight is w_t = <g_t, p_t - y_t> / |p_t - y_t|^2. The residual |g_t - w_t (p_t - y_t)| / |g_t| is 0 if the loss
is token cross entropy. Then the weights of all ranks of a replica have to be equal. A loss that weighs tokens by class
or by position has unlike weights inside a rank. For such a loss, and for one that is not token cross entropy, only the
values on the ranks are compared here; `ds_hetero.runtime.step_checks.token_factors` compares the sums in it.

    token_weight_records   draws tokens, and summarizes them as numbers
    token_weight_rules     judges the numbers of all ranks

All numbers stay on the device until the one exchange of the step.

Dimension key: B batch, s tokens of this rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ds_hetero.common.text import ranks_by_value
from ds_hetero.errors import ConfigError, HeteroError
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_checks.protocol import Undecided, Verdict
from ds_hetero.runtime.step_checks.token_weight_records import (
    NO_FORWARD,
    ForwardNumbers,
    StepRecord,
    StepTotals,
    count_labels,
    forward_numbers,
    record_forward,
    step_numbers,
)
from ds_hetero.runtime.step_checks.token_weight_rules import (
    BY_RANK,
    StepOfRanks,
    check_declared_key,
    check_forward,
    check_label_count,
    check_values,
)

_MAX_FORWARDS = 8  # of a step that are recorded, spread over its accumulation; 10 numbers each
# Steps in a row in which each rank has one weight and ranks have unlike ones, in no known way, before that is an error.
_MAX_STEPS_UNDECIDED = 3


class Trained(Protocol):
    """What `TokenWeights` reads of a model whose sequences are split over ranks."""

    convention: str | None  # ``"loss"`` of the section

    @property
    def replica(self) -> Replica:
        """This rank's replica, which may change between steps."""


class TokenWeights:
    """Checks the loss of one split model, as a step check.

    Args:
        model: whose replica may change between steps.
        accumulation: micro-batches of an optimizer step.
        scales: whether the engine multiplies losses by a factor of its own, as for fp16.
    """

    def __init__(self, model: Trained, accumulation: int, *, scales: bool = False) -> None:
        self._model, self._accumulation, self._scales = model, accumulation, scales
        self._slots = min(accumulation, _MAX_FORWARDS)
        self._stride = -(-accumulation // _MAX_FORWARDS)
        self.width = len(StepTotals._fields) + self._slots * len(ForwardNumbers._fields)
        self._step = StepRecord()
        self._num_steps = 0
        self._num_undecided = 0  # steps in a row, see `_MAX_STEPS_UNDECIDED`
        self._earlier_labels: list[list[float]] = []  # see `StepOfRanks`

    @torch.no_grad()
    def note_forward(self, logits: Tensor, labels: Tensor, expected: Tensor | None, items: int | None) -> None:
        """Note a forward of training that made ``logits`` [B, s, V]; does not wait for the device.

        Args:
            labels: [B, s], of the tokens.
            expected: the loss that the engine computed from the logits, if any.
            items: labels of the step over all ranks, if the loader counted them.
        """
        step = self._step
        index = step.num_forwards
        step.num_forwards += 1
        num_labels = count_labels(labels)
        step.labels = num_labels if step.labels is None else step.labels + num_labels
        step.items = items
        step.has_half_logits |= logits.element_size() < 4
        is_skipped = (index + self._num_steps) % self._stride != 0
        if len(step.forwards) >= self._slots or is_skipped or not logits.requires_grad:
            return
        draw = self._num_steps * self._accumulation + index
        step.forwards.append(record_forward(logits, labels, expected, draw))

    def note_backward(self, loss: Tensor, divisor: int, *, is_scaled: bool) -> None:
        """Note the ``loss`` that the script gives to backward.

        Args:
            divisor: by which the engine divides the loss.
            is_scaled: the engine computed the loss.
        """
        self._step.values.append(loss.detach().double().reshape(()))
        self._step.unscaled += not is_scaled
        self._step.is_half |= loss.element_size() < 4
        self._step.divisor = divisor

    @torch.no_grad()
    def numbers(self) -> tuple[Tensor, ...]:
        """Return `StepTotals` and a `ForwardNumbers` per recorded forward; numbers known on the host stay there."""
        step, self._step = self._step, StepRecord()
        self._num_steps += 1
        parts = [*step_numbers(step, self._model.replica.replica_id)]
        # Losses belong to forwards if each forward has one backward, in order.
        in_order = len(step.values) == step.num_forwards and self._stride == 1
        for slot in range(self._slots):
            if slot >= len(step.forwards):
                parts.append(NO_FORWARD)
                continue
            value = step.values[slot] if in_order and slot < len(step.values) else None
            parts += forward_numbers(step.forwards[slot], value)
        return tuple(parts)

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Return an error if the step's losses do not weigh every label as one process would.

        Returns:
            A warning (`Undecided`) if that cannot be decided, an error after too many such steps in a row; None if the
            losses are right. The rules are in `token_weight_rules`.
        """
        step = self._step_of_ranks(rows)
        by_slot = [[ForwardNumbers.of_slot(row, slot) for row in rows] for slot in range(self._slots)]
        verdict = check_values(step) or check_label_count(step)
        if verdict is not None:
            return verdict
        undecided: list[Undecided] = []
        errors: list[HeteroError] = []
        for forwards in by_slot:
            verdict_of_forward = check_forward(step, forwards)
            if isinstance(verdict_of_forward, Undecided):
                undecided.append(verdict_of_forward)
            elif verdict_of_forward is not None:
                errors.append(verdict_of_forward)
        by_rank = [warning for warning in undecided if warning.subject == BY_RANK]
        self._num_undecided = self._num_undecided + 1 if by_rank else 0
        self._earlier_labels = [*self._earlier_labels[:1], [forward.labels for forward in by_slot[0]]]
        has_weights = any(forward.samples for forwards in by_slot for forward in forwards)
        is_right = has_weights and not undecided and not errors
        wrong_key = None if is_right else check_declared_key(step)
        if wrong_key is not None:
            return wrong_key
        if errors:
            return errors[0]
        if not undecided:
            return None
        if self._num_undecided > _MAX_STEPS_UNDECIDED:
            text = f"{by_rank[0].text} So it was in {self._num_undecided} steps in a row."
            return ConfigError(f"{text} {step.remedy()}")
        return undecided[0]

    def _step_of_ranks(self, rows: Sequence[Sequence[float]]) -> StepOfRanks:
        """Return the numbers of all ranks, with what the configuration says of the losses."""
        totals = [StepTotals.of(row) for row in rows]
        return StepOfRanks(
            totals=totals,
            replicas=list(ranks_by_value((rank, total.replica) for rank, total in enumerate(totals)).values()),
            convention=self._model.convention,
            accumulation=self._accumulation,
            weighs_by_items=self._model.replica.batch_split is not None,
            scales=self._scales,
            earlier_labels=self._earlier_labels,
        )
