"""Compute the factor by which each rank multiplies the gradient of each term of its loss.

With these factors, the engine's average over the ranks is the gradient of one process on all samples. If rank r
computes a term as A_r / D_r, one process computes (sum of A_r) / (sum of D_r); for a sum A_r, it computes the sum of
all A_r. The engine averages over W ranks, so the factors of rank r are

    mean      W D_r / (sum of D_r)
    sum       W
    common    1, a term of parameters alone

The divisor of a sum may be a count of its batch, such as the number of boxes, or a constant:

    divisor on the ranks   it is a count if                              it is a constant if
    equal                  it grew with the rows in a probe of the       it stayed the same in that probe
                           first batch, or differed at an earlier step
    different              it is proportional to the rows, or to the     never
                           total of the term's weights; it is the
                           total of an entry of the batch; or it is
                           a whole number above 1 on every rank

Any other divisor is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.runtime.data.loss_reductions import Term
from ds_hetero.runtime.data.loss_units import UnitCounts
from ds_hetero.runtime.data.probe_pace import ProbeTimes
from ds_hetero.values.section import SECTION

RTOL_SUMS = 1e-6  # relative difference up to which numbers of ranks are equal: the order of sums in fp32
_MAX_FRACTION = 1e-4  # distance to a whole number that an added epsilon or sums in fp32 explain

DivisorKind = Literal["count", "number"]

REMEDY = (
    "Give backward such a term by handle.ratio(total, count) (handle = ds_hetero.register()): a sum over this rank's "
    f'samples, and the number that it is divided by; or declare what the whole loss is a mean over, "{SECTION}": '
    '{"loss": "sample_mean"}, "label_mean" or "token_mean"; or use equal batches.'
)


class RankLoss(NamedTuple):
    """Description of one rank's loss, which all ranks exchange."""

    terms: list[Term]
    problem: str | None  # why the loss cannot be read; None if it can
    rows: int  # samples of the micro-batch
    counts: UnitCounts
    # For each term, the entries of the batch with a total, or a number of non-zeros, that is equal to a divisor.
    divisor_entries: list[list[str]]
    buffers: dict[str, float]  # totals of the buffers that have changed since the micro-batch before
    has_new_nodes: bool  # the loss has kinds of operations that no loss before had
    mixing_operation: str | None  # an operation of the loop that lets samples see each other
    probe_times: ProbeTimes = ProbeTimes()

    @property
    def is_filler(self) -> bool:
        """Whether the micro-batch is a filler, without samples that count."""
        return not any(self.counts)


@dataclass(frozen=True)
class TermWeight:
    """The factor of this rank for one term of the loss.

    Attributes:
        factor: by which this rank multiplies the term's gradient.
        kind: of the term; ``"items"``: a sum that the Trainer divides by its number of items.
        counts: for a mean, the divisor on each rank.
    """

    factor: float
    kind: Literal["mean", "sum", "common", "items"]
    counts: tuple[float, ...] = ()


def weigh_terms(
    rank_losses: Sequence[RankLoss],
    rank: int,
    name: str,
    divisors: dict[str, DivisorKind],
    items: float | None = None,
) -> list[TermWeight]:
    """Return this rank's factor for each term by the table at the top of this module.

    Args:
        rank_losses: the losses, by rank.
        name: of the module's class, for messages.
        divisors: kinds of divisors that are known, by the path of the sum; kinds that are found here are added.
        items: the number by which the Trainer divides a sum, so that the micro-batches of a step add up.

    Raises:
        ConfigError: a term is not known to be a sum, or a mean over something, or ranks have other terms; the same on
            every rank.
    """
    problems = [rank_loss.problem for rank_loss in rank_losses if rank_loss.problem is not None]
    if problems:
        raise ConfigError(
            f"the ranks take different batches, and the loss of {name} {problems[0]}: what one process computes on the "
            f"global batch cannot be computed from the ranks' losses. {REMEDY}"
        )
    mixing_operations = [rank_loss.mixing_operation for rank_loss in rank_losses if rank_loss.mixing_operation]
    if mixing_operations and not all(rank_loss.is_filler for rank_loss in rank_losses):
        raise ConfigError(
            f"the ranks take different batches, and the loss that the loop makes of outputs of {name} has "
            f"{mixing_operations[0]}, which is not known to keep samples apart. Return the loss from the module, whose "
            f"samples are probed; or {REMEDY[0].lower()}{REMEDY[1:]}"
        )
    paths_of_ranks = [[term.path for term in rank_loss.terms] for rank_loss in rank_losses]
    if any(paths != paths_of_ranks[0] for paths in paths_of_ranks):
        text = "; ".join(f"rank {number}: {_show(paths)}" for number, paths in enumerate(paths_of_ranks))
        raise ConfigError(
            f"the ranks take different batches, and their losses of {name} are made of different terms ({text}). "
            "Compute every term on every rank, also where no sample of its batch has one: a sum over nothing is zero. "
            f"{REMEDY}"
        )
    weights = []
    for index in range(len(paths_of_ranks[0])):
        term = _TermOfRanks(index=index, rank_losses=rank_losses, name=name)
        weights.append(_weigh(term, rank, divisors, items))
    return weights


@dataclass(frozen=True, kw_only=True)
class _TermOfRanks:
    """One term of the loss as all ranks have read it.

    Attributes:
        index: of the term in the loss.
        rank_losses: the losses, by rank.
        name: of the module's class, for messages.
    """

    index: int
    rank_losses: Sequence[RankLoss]
    name: str

    @property
    def by_rank(self) -> list[Term]:
        return [rank_loss.terms[self.index] for rank_loss in self.rank_losses]

    @property
    def path(self) -> str:
        return self.by_rank[0].path

    @property
    def rows(self) -> list[int]:
        """Samples of the micro-batch of each rank."""
        return [rank_loss.rows for rank_loss in self.rank_losses]

    def refusal(self, why: str) -> ConfigError:
        """Return the error for a term that one process may compute differently; ``why`` ends its first clause."""
        return ConfigError(
            f"the ranks take different batches, and a term of the loss of {self.name} ({_short(self.path)}) {why}, so "
            f"what one process computes on the global batch is not known. {REMEDY}"
        )


def _weigh(term: _TermOfRanks, rank: int, divisors: dict[str, DivisorKind], items: float | None) -> TermWeight:
    """Return this rank's factor for one term.

    The engine averages the ranks' gradients, so every factor is multiplied by the number of ranks. Example: a mean with
    counts 3 and 1 on two ranks has the factors 2 * 3 / 4 and 2 * 1 / 4.
    """
    terms, world_size = term.by_rank, len(term.rank_losses)
    kind = terms[0].kind
    if any(rank_term.kind != kind for rank_term in terms):
        kinds = sorted({rank_term.kind for rank_term in terms})
        raise term.refusal(f"is a {' on one rank, a '.join(kinds)} on another")
    rank_factor = terms[rank].rank_factor
    if kind == "common":
        fingerprints = [rank_term.fingerprint for rank_term in terms]
        factors = [rank_term.factor for rank_term in terms]
        if not _are_equal(fingerprints) or not _are_equal(factors):
            raise term.refusal("is of parameters, and of numbers that differ between ranks")
        are_fillers = all(rank_loss.is_filler for rank_loss in term.rank_losses)
        return TermWeight(0.0 if are_fillers else 1.0 / rank_factor, "common")
    if all(rank_term.factor == 0 for rank_term in terms):  # an annealed term that has not begun
        return TermWeight(1.0, kind)
    if kind == "mean":
        counts = _counts_of_mean(term)
    else:
        factor_of_sum = 0.0 if term.rank_losses[rank].is_filler else world_size
        if items is not None and all(_is_divided_by(rank_term, items) for rank_term in terms):
            return TermWeight(factor_of_sum / rank_factor, "items")
        divided_by = [math.inf if rank_term.factor == 0 else 1 / rank_term.factor for rank_term in terms]
        if _kind_of_divisor(term, divided_by, divisors) == "number":
            return TermWeight(factor_of_sum / rank_factor, "sum")
        counts = [0.0 if rank_term.is_empty else value for rank_term, value in zip(terms, divided_by, strict=True)]
    counts = [0.0 if rank_loss.is_filler else count for rank_loss, count in zip(term.rank_losses, counts, strict=True)]
    total = math.fsum(counts)
    factor = world_size * counts[rank] / total / rank_factor if total else 0.0
    return TermWeight(factor, "mean", tuple(counts))


def _is_divided_by(term: Term, number: float) -> bool:
    """Whether ``number`` is one of the divisors of a term."""
    return any(math.isclose(divisor, number, rel_tol=RTOL_SUMS) for divisor in term.divisors)


def _counts_of_mean(term: _TermOfRanks) -> list[float]:
    """Return the count of a mean on each rank. Raises `ConfigError`: they do not make one mean of the global batch."""
    terms, rows = term.by_rank, term.rows
    counts, factors = [rank_term.count for rank_term in terms], [rank_term.factor for rank_term in terms]
    if not _are_equal(factors):
        # A script may turn one mean into another: a mean over samples, times their number, divided by the number of
        # boxes, is a mean over boxes.
        counts = [math.inf if factor == 0 else count / factor for count, factor in zip(counts, factors, strict=True)]
        if not all(map(_is_whole, counts)) or _are_equal(counts):
            raise term.refusal(
                f"is a mean times a number that differs between ranks ({_show(factors)}), and that is not a count"
            )
        return counts
    if _has_normalized_weights(term):
        raise term.refusal(
            "is a weighted mean, and each rank has normalized the weights over its own batch (they have the same mean "
            "on every rank), where one process would normalize them over the global batch"
        )
    if not terms[0].counts_elements or any(rank_term.is_selected for rank_term in terms):
        return counts
    # A mean over all elements of a tensor: its size shows whether each sample has as many of them.
    by_row = [count / row for count, row in zip(counts, rows, strict=True)]
    if not _are_equal(rows) and _are_equal(counts):
        raise term.refusal(
            f"is a mean over {counts[0]:g} numbers on every rank, whose batches have {_show(rows)} samples, so each "
            "number was computed from all samples of a batch"
        )
    inner_sizes = [rank_term.inner_sizes for rank_term in terms]
    if not _are_equal(by_row) and len(set(inner_sizes)) > 1 and all(inner_sizes):
        raise term.refusal(
            f"is a mean over all positions of its samples, which the ranks have padded to different sizes "
            f"({'; '.join(map(_show, inner_sizes))}), and one process would pad to one size. Count no padding, as by "
            "ignore_index or a mask and its sum, or pad to one size"
        )
    return counts


def _kind_of_divisor(term: _TermOfRanks, divided_by: Sequence[float], divisors: dict[str, DivisorKind]) -> DivisorKind:
    """Return whether the divisor of a sum is a count of the batch or a constant, and note it in ``divisors``.

    Args:
        divided_by: one over the factor of the sum, by rank.

    Raises:
        ConfigError: it is not known.
    """
    terms, known_kind = term.by_rank, divisors.get(term.path)
    if not any(rank_term.has_factor for rank_term in terms):
        if _has_normalized_weights(term):
            raise term.refusal(
                "is a weighted sum, and each rank has normalized the weights over its own batch (they have the same "
                "total on every rank), where one process would normalize them over the global batch"
            )
        return "number"
    if _are_equal(divided_by):
        if known_kind is not None:
            return known_kind
        raise term.refusal(
            f"is a sum divided by {divided_by[0]:g} on every rank, whose batches have {_show(term.rows)} samples: "
            "whether that is a number, or counts something of a batch, does not show"
        )
    if known_kind == "number":
        raise term.refusal(
            f"is a sum divided by {_show(divided_by)} on the ranks, but was divided by one number on all ranks before"
        )
    if len({len(rank_term.divisors) for rank_term in terms}) > 1:
        raise term.refusal("is a sum divided by more numbers on one rank than on another")
    # A sum may be divided several times: each divisor that differs between ranks has to be a count, and so has the rest
    # of the factor that the divisors do not explain. Example: factor 1/12 with the divisor 4 leaves 3.
    rest_of_factor = []
    for rank_term in terms:
        is_finite = rank_term.factor and all(rank_term.divisors)
        rest_of_factor.append(1 / (rank_term.factor * math.prod(rank_term.divisors)) if is_finite else 1.0)
    for values in [*zip(*(rank_term.divisors for rank_term in terms), strict=True), tuple(rest_of_factor)]:
        if not _are_equal(values):
            _expect_count(values, term)
    divisors[term.path] = "count"
    return "count"


def _expect_count(values: Sequence[float], term: _TermOfRanks) -> None:
    """Refuse one divisor of a sum, by rank, unless it is a count. Raises `ConfigError`.

    It is a count if it is proportional to the total of the term's weights or to the rows of the batch, if it is the
    total, or the number of non-zeros, of an entry of the batch, or if it is a whole number above 1 on every rank.
    """
    terms = term.by_rank
    is_present = [not rank_term.is_empty for rank_term in terms]
    if all(rank_term.weights is not None for rank_term in terms):
        over_weights = []
        for value, rank_term, is_here in zip(values, terms, is_present, strict=True):
            if is_here and rank_term.weights is not None and rank_term.weights.total:
                over_weights.append(value / rank_term.weights.total)
        if _are_equal(over_weights):
            return
    entries_by_rank = [set(rank_loss.divisor_entries[term.index]) for rank_loss in term.rank_losses]
    goes_with_rows = _are_equal([value / row for value, row in zip(values, term.rows, strict=True)])
    if goes_with_rows or set.intersection(*entries_by_rank):
        return
    present_values = [value for value, is_here in zip(values, is_present, strict=True) if is_here]
    if not all(map(_is_whole, present_values)):
        raise term.refusal(
            f"is a sum divided by {_show(values)} on the ranks, and ds_hetero does not know what these numbers count"
        )
    # Scripts divide by max(count, 1), which hides whether a rank has one or none.
    if any(abs(value) == 1 for value in present_values):
        raise term.refusal(
            f"is a sum divided by {_show(values)} on the ranks, and a divisor of 1 does not show whether the rank "
            "counted one or none"
        )


def _has_normalized_weights(term: _TermOfRanks) -> bool:
    """Whether every rank has divided the weights of its samples by their own total, or their own mean.

    Example: softmax over the samples of a batch makes weights whose total is 1 on every rank.
    """
    terms = term.by_rank
    weights = [rank_term.weights for rank_term in terms if rank_term.weights is not None]
    have_values = [weights_of_rank.varies and not weights_of_rank.is_mask for weights_of_rank in weights]
    if len(weights) < len(terms) or not any(have_values):
        return False
    totals, means = [], []
    for weights_of_rank in weights:
        totals.append(weights_of_rank.total)
        means.append(weights_of_rank.total / weights_of_rank.elements if weights_of_rank.elements else 0.0)
    has_same_totals = _are_equal(totals) and not _are_equal(term.rows)
    return has_same_totals or (_are_equal(means) and terms[0].kind == "mean")


def _are_equal(values: Sequence[float]) -> bool:
    """Whether all values are one number, up to rounding; NaN is equal to NaN."""
    return all(_is_equal(value, values[0]) for value in values)


def _is_equal(a: float, b: float) -> bool:
    are_nan = math.isnan(a) and math.isnan(b)
    return a == b or are_nan or math.isclose(a, b, rel_tol=RTOL_SUMS)


def _is_whole(value: float) -> bool:
    """Whether a value is a whole number other than 0, up to rounding."""
    return math.isfinite(value) and abs(value - round(value)) <= _MAX_FRACTION and abs(value) > 0.5


def _show(values: Sequence[object]) -> str:
    """Return the values as a list for a message."""
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values) or "none"


def _short(path: str) -> str:
    """Return the last three nodes of a path, such as "Mul of Sum of Pow"."""
    return " of ".join(node.removesuffix("Backward0") for node in path.split("/")[-3:])


def unit_of_counts(counts: Sequence[float], rank_losses: Sequence[RankLoss], units: Sequence[str]) -> str | None:
    """Return the first of ``units`` to which the counts of a mean are proportional on the ranks; None if none is."""
    for unit in units:
        unit_counts: list[int] = [getattr(rank_loss.counts, unit) for rank_loss in rank_losses]
        pairs = list(zip(counts, unit_counts, strict=True))
        ratios = [count / unit_count for count, unit_count in pairs if unit_count]
        have_same_zeros = all((count == 0) == (unit_count == 0) for count, unit_count in pairs)
        if ratios and _are_equal(ratios) and have_same_zeros:
            return unit
    return None


def expect_same_buffers(rank_losses: Sequence[RankLoss], name: str) -> None:
    """Refuse buffers that the ranks have changed to different values.

    Raises:
        ModelError: the ranks have changed a buffer differently; the same error on every rank.
    """
    changed = dict.fromkeys(buffer for rank_loss in rank_losses for buffer in rank_loss.buffers)
    for buffer in changed:
        totals = [rank_loss.buffers.get(buffer) for rank_loss in rank_losses]
        known_totals = [total for total in totals if total is not None]
        if len(known_totals) < len(totals) or not _are_equal(known_totals):
            text = ", ".join("unchanged" if total is None else f"{total:.6g}" for total in totals)
            raise ModelError(
                f"{name} updates its buffer {buffer} from its batch, and the ranks take different batches (totals by "
                f"rank: {text}). One process would update it from the global batch. Remove the update (a running mean "
                "or a moving average), put the layer into eval(), or give all ranks equal batches instead of "
                f'"{SECTION}.batch".'
            )


def explain_divisor(divisor: float, statistics: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return which totals of a batch equal ``divisor``, such as "weights total" or "mask non-zeros".

    Args:
        statistics: total and number of non-zeros of each entry, by its name.
    """
    explained = []
    for entry, values in statistics.items():
        for what, value in zip(("total", "non-zeros"), values, strict=True):
            if math.isclose(abs(divisor), value, rel_tol=RTOL_SUMS):
                explained.append(f"{entry} {what}")
    return explained
