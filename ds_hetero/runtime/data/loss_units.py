"""Find the unit over which a loss is a mean: the samples, labels or next tokens of a micro-batch.

    unit = unit_of_probes([probe(compute, batch)] of all ranks)      # "token_mean", from two rows and each alone

Ranks that take different micro-batches have to weigh their losses by the counts of that unit, which no framework tells.
So the loss of two rows of the first batch is computed for both together and for each alone. With the counts of the
right unit as weights, the weighted mean of the rows' losses is the loss of both. Example: losses 1 and 4 of rows with 2
and 1 labels make (2 * 1 + 1 * 4) / 3 = 2 together; as a mean over samples they would make 2.5. The rows get unlike
numbers of labels, so that no two units fit. A loss that is not a mean over its rows (contrastive, a sum, with an
auxiliary loss) fits none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.values.section import SECTION

_RTOL_LOSS_FP32, _RTOL_LOSS_HALF = 2e-5, 4e-3  # of equal losses: the order and the data type of their sums
_LABELS_OF_ROWS = (2, 3)  # labels that the two rows of a probe get
_MIN_LABELS = 6  # labels that both rows must have, so that some can be taken away


Batch: TypeAlias = Any
"""Tensors in nested mappings and sequences, as a loader yields them."""


class UnitCounts(NamedTuple):
    """Counts of each unit in a micro-batch, or in all micro-batches of a step."""

    sample_mean: int  # samples; with one class per sample, those whose class counts
    label_mean: int = 0  # labels that count, of outputs at the same position; 0 without a row of labels per sample
    token_mean: int = 0  # labels that count, of outputs one position before

    @classmethod
    def of(cls, batch: Batch, rows: int) -> UnitCounts:
        """Count the units of a micro-batch with ``rows`` samples; labels of -100 do not count."""
        labels, is_shifted = labels_of(batch)
        if labels is None:
            return cls(rows)
        if labels.dim() == 1:
            return cls(int(labels.ne(IGNORE_INDEX).sum()))
        tokens = labels if is_shifted else labels[..., 1:]
        return cls(rows, int(labels.ne(IGNORE_INDEX).sum()), int(tokens.ne(IGNORE_INDEX).sum()))

    @classmethod
    def total(cls, parts: Iterable[Sequence[int]]) -> UnitCounts:
        """Return the sum of several counts."""
        return cls(*map(sum, zip(cls(0), *parts, strict=True)))


def labels_of(batch: Batch) -> tuple[Tensor | None, bool]:
    """Return the labels of a batch, integers of shape [B] or [B, ...], and whether they are moved left already.

    The labels are None if the batch is not a mapping, or has none.
    """
    if isinstance(batch, Mapping):
        for name, is_shifted in (("shift_labels", True), ("labels", False)):
            labels = batch.get(name)
            if isinstance(labels, Tensor) and labels.dim() and not labels.is_floating_point():
                return labels, is_shifted
    return None, False


@dataclass(frozen=True)
class Probe:
    """Losses of two rows of a rank's batch, together and alone."""

    together: float  # loss of both rows; NaN without a loss
    alone: tuple[float, float]  # loss of the first, and of the second
    counts: tuple[UnitCounts, UnitCounts]  # of the first row, and of the second
    is_conclusive: bool  # the rows are unlike, so the losses show the unit
    tolerance: float  # relative difference of equal losses of this data type

    @property
    def has_loss(self) -> bool:
        """Whether the model computed a loss."""
        return not math.isnan(self.together)

    def fits(self, unit: str) -> bool:
        """Whether the loss of both rows is the mean of the rows' losses, weighed by their counts of ``unit``."""
        first, second = (getattr(counts, unit) for counts in self.counts)
        if not first or not second:
            return False
        weighted_mean = (self.alone[0] * first + self.alone[1] * second) / (first + second)
        scale = max(abs(self.together), *map(abs, self.alone))
        return bool(abs(weighted_mean - self.together) <= self.tolerance * scale)


def probe(compute: Callable[[Batch], Tensor | None], batch: Batch, rows: int) -> Probe:
    """Compute the loss of two rows of a batch, and of each alone: three forwards.

    Args:
        compute: returns the loss of a batch, without gradients and randomness; None if the model computes none.
        batch: with ``rows`` samples.

    Caller: every rank that shares parameters of the model.
    Collectives: those of ``compute``.
    """
    row_indices = [0, rows - 1]
    both_rows, is_unlike = _unlike_rows(take_rows(batch, row_indices, rows))
    parts = [take_rows(both_rows, [row], 2) for row in (0, 1)]
    losses = [compute(part) for part in (both_rows, *parts)]
    values = [float("nan") if loss is None else float(loss.detach()) for loss in losses]
    is_half = any(loss is not None and loss.element_size() < 4 for loss in losses)
    counts = UnitCounts.of(parts[0], 1), UnitCounts.of(parts[1], 1)
    tolerance = _RTOL_LOSS_HALF if is_half or torch.is_autocast_enabled() else _RTOL_LOSS_FP32
    return Probe(values[0], (values[1], values[2]), counts, is_unlike or rows > 1, tolerance)


def unit_of_probes(probes: Sequence[Probe], name: str) -> str:
    """Return the unit over which a loss is a mean, from the probes of all ranks.

    Args:
        name: of the module's class, for messages.

    Raises:
        ConfigError: no unit fits all probes, or several do.
    """
    conclusive = [probe_of_rank for probe_of_rank in probes if probe_of_rank.is_conclusive] or list(probes)
    fitting = [unit for unit in UnitCounts._fields if all(probe_of_rank.fits(unit) for probe_of_rank in conclusive)]
    if len(fitting) == 1:
        return fitting[0]
    first = conclusive[0]
    seen = f"two rows together {first.together:.6g}, alone {first.alone[0]:.6g} and {first.alone[1]:.6g}"
    if not fitting:
        raise ConfigError(
            f"the ranks take different batches, but the loss of {name} is not a mean over the samples or labels of a "
            f"batch ({seen}): one process would compute another on the global batch. Contrastive losses, sums, and "
            "losses with an auxiliary loss of routers are not: use equal batches for them. A mean that this engine "
            f"cannot see, since rows are not the first axis of the batch, can be declared: {_DECLARE}."
        )
    raise ConfigError(
        f"the ranks take different batches, but whether the loss of {name} is a mean over {' or '.join(fitting)} does "
        f"not show in the first batch ({seen}). Say which: {_DECLARE}."
    )


def expect_documents_apart(compute: Callable[[Batch], Tensor | None], batch: Batch, name: str) -> None:
    """Refuse a model in which the documents of a packed row see each other.

    If a rank's batch is a row of several documents, the loss of the last document is computed twice, with different
    tokens in the documents before it. It must not change.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`; if a rank has such a row, also the collectives of two forwards, and another
        `on_all_ranks`.

    Raises:
        ModelError: the loss changed on a rank; the same error on every rank.
    """
    pair = _with_other_documents(batch)
    if not any(on_all_ranks(lambda: pair is not None)):
        return

    def unlike_losses() -> tuple[float, float] | None:
        """Return this rank's two losses if they differ; else None."""
        # Ranks without such a row run forwards as well, whose collectives the others need.
        losses = [compute(row) for row in pair or (batch, batch)]
        if pair is None or any(loss is None for loss in losses):
            return None
        loss_before, loss_after = (float(loss) for loss in losses if loss is not None)
        is_half = any(loss is not None and loss.element_size() < 4 for loss in losses)
        tolerance = _RTOL_LOSS_HALF if is_half or torch.is_autocast_enabled() else _RTOL_LOSS_FP32
        is_unlike = abs(loss_before - loss_after) > tolerance * abs(loss_before)
        return (loss_before, loss_after) if is_unlike else None

    changed = [unlike for unlike in on_all_ranks(unlike_losses) if unlike is not None]
    if changed:
        raise ModelError(
            f"the ranks take different batches, and {name} lets the documents of a packed row see each other: the loss "
            f"of the last one is {changed[0][0]:.6g}, and {changed[0][1]:.6g} after other tokens. One process puts "
            "other documents into a row, so its loss differs. Set config.use_cache to False (transformers does not "
            'look for documents where there is a cache), use attn_implementation="flash_attention_2" or its like, '
            "leave packing and padding_free out, or share sequences by a schedule in place of "
            f'"{SECTION}.batch", where documents do not see each other.'
        )


def _with_other_documents(batch: Batch) -> tuple[Batch, Batch] | None:
    """Return two copies of a row of several documents, of which the second has other tokens before the last document.

    Both have labels in the last document only.

    Returns:
        None if the batch is not such a row, or has images or sounds, which belong to certain tokens.
    """
    labels, is_shifted = labels_of(batch)
    if any(part.is_floating_point() for part in tensors_in(batch)):
        return None
    if labels is None:
        return None
    tokens, positions = batch.get("input_ids"), batch.get("position_ids")
    if not isinstance(tokens, Tensor) or not isinstance(positions, Tensor):
        return None
    if not labels.shape == tokens.shape == positions.shape == (1, labels.shape[-1]):
        return None
    counting = labels[0].ne(IGNORE_INDEX)
    for start in reversed(positions[0].eq(0).nonzero()[:, 0].tolist()):
        first = start if is_shifted else start + 1
        if start > 1 and bool(counting[first:].any()):
            labels_of_last, other_tokens = labels.clone(), tokens.clone()
            labels_of_last[0, :first] = IGNORE_INDEX
            other_tokens[0, :start] = tokens[0, start]
            row = {**batch, "shift_labels" if is_shifted else "labels": labels_of_last}
            return row, {**row, "input_ids": other_tokens}
    return None


_DECLARE = (
    f'"{SECTION}": {{"loss": ...}} with "sample_mean" over samples, "label_mean" over labels that count, or '
    '"token_mean" over next tokens'
)


def loss_in(outputs: object) -> Tensor | None:
    """Return the loss in a module's outputs: ``outputs.loss``, or the output itself; None if it is not a scalar."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point() else None


def tensors_in(entry: Batch) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings and sequences."""
    if isinstance(entry, Tensor):
        yield entry
    elif isinstance(entry, Mapping | list | tuple):
        for part in entry.values() if isinstance(entry, Mapping) else entry:
            yield from tensors_in(part)


def num_rows(batch: Batch, others: Batch = ()) -> int:
    """Return the samples of a micro-batch: the rows of its labels, or of the first tensor in ``others`` and ``batch``.

    Returns 1 if no tensor has rows.
    """
    labels, _ = labels_of(batch)
    if labels is not None:
        return labels.shape[0]
    return next((part.shape[0] for part in tensors_in((others, batch)) if part.dim()), 1)


def take_rows(entry: Batch, row_indices: list[int], rows: int) -> Batch:
    """Return a batch with some rows of every tensor and list that has ``rows`` rows; other entries stay as they are.

    Args:
        row_indices: the rows, in the order of the result; an index may occur several times.
    """
    if isinstance(entry, Tensor):
        return entry[row_indices] if entry.dim() and entry.shape[0] == rows else entry
    if isinstance(entry, Mapping):
        return {name: take_rows(part, row_indices, rows) for name, part in entry.items()}
    if isinstance(entry, list | tuple):
        if len(entry) == rows and not any(isinstance(part, Tensor) for part in entry):
            return type(entry)(entry[row] for row in row_indices)
        return type(entry)(take_rows(part, row_indices, rows) for part in entry)
    return entry


def _unlike_rows(batch: Batch) -> tuple[Batch, bool]:
    """Return two rows with 2 and 3 labels left, and whether that was possible; else the same rows.

    One label of the first row is at its first position, where it counts for "label_mean" and not for "token_mean". So
    the rows have unlike shares of every unit: samples 1 : 1, labels 2 : 3, next tokens 1 : 3.
    """
    labels, _ = labels_of(batch)
    if labels is None or labels.dim() != 2 or int(labels.ne(IGNORE_INDEX).sum(dim=1).min()) < _MIN_LABELS:
        return batch, False
    few = torch.full_like(labels, IGNORE_INDEX)
    for row, num_kept in enumerate(_LABELS_OF_ROWS):
        kept_positions = labels[row].ne(IGNORE_INDEX).nonzero()[-num_kept:, 0]
        few[row, kept_positions] = labels[row, kept_positions]
    # Move the first label of the first row to the row's first position.
    few[0, few[0].ne(IGNORE_INDEX).nonzero()[0]] = IGNORE_INDEX
    few[0, 0] = labels[0][labels[0].ne(IGNORE_INDEX)][0]
    name = "shift_labels" if isinstance(batch.get("shift_labels"), Tensor) else "labels"
    return {**batch, name: few}, True
