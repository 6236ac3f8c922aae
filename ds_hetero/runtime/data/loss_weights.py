"""Factors of every rank's terms of a loss, by which the engine's average of gradients is that of one process.

Of a term that rank r computes as A_r / D_r, one process on all samples computes (sum of A_r) / (sum of D_r), and of a
sum A_r the sum of all. The engine averages over W ranks, so that the factors are

    mean      W D_r / (sum of D_r)
    sum       W
    common    1, of parameters alone

What a sum is divided by may be a count of its batch, as of boxes, or a number that stands for itself, which nothing but
evidence tells apart: a number that differs between ranks, and is whole, counts; one that a probe of the first batch has
found to grow with the rows counts, or to be the same. What stays open is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ds_hetero.errors import ConfigError, ModelError
from ds_hetero.runtime.data.loss_graph import Term
from ds_hetero.runtime.data.loss_units import UnitCounts
from ds_hetero.runtime.data.probe_pace import ProbeTimes
from ds_hetero.values.section import SECTION

RTOL_OF_SUMS = 1e-6  # relative difference up to which numbers of ranks are equal, by the order of sums in fp32
_WHOLE = 1e-4  # as much as a number differs from a whole one that has an epsilon added, or is a sum of fp32

DivisorKind = Literal["count", "number"]

REMEDY = (
    "Give backward such a term by handle.ratio(total, count) (handle = ds_hetero.register()): a sum over this rank's "
    f'samples, and the number that it is divided by; or declare what the whole loss is a mean over, "{SECTION}": '
    '{"loss": "sample_mean"}, "label_mean" or "token_mean"; or use equal batches.'
)


class RankLoss(NamedTuple):
    """Description of a rank's loss, for the other ranks."""

    terms: list[Term]
    problem: str | None
    rows: int
    counts: UnitCounts
    explained: list[list[str]]  # by term, the entries of the batch whose total, or number of non-zeros, is its divisor
    buffers: dict[str, float]  # totals of those that have changed since the micro-batch before
    has_new_nodes: bool  # kinds of operations that no loss before had
    mixing: str | None  # an operation of the loop by which samples see each other
    probe_times: ProbeTimes = ProbeTimes()

    @property
    def is_filler(self) -> bool:
        """Whether the micro-batch only fills the step up."""
        return not any(self.counts)


@dataclass(frozen=True)
class TermWeight:
    """A term of all ranks: this rank's share of it, and whether it is a mean."""

    factor: float
    kind: Literal["mean", "sum", "common", "items"]
    counts: tuple[float, ...] = ()  # by rank, of a mean


def weigh_terms(
    of_ranks: Sequence[RankLoss],
    rank: int,
    name: str,
    divisors: dict[str, DivisorKind],
    items: float | None = None,
) -> list[TermWeight]:
    """Return this rank's factor of each term, see the table at the top.

    Args:
        name: of the module.
        divisors: by path what divisors of sums are known to be; added to.
        items: what the Trainer divides a sum by, so that parts of a step add up.

    Raises:
        ConfigError: a term is not known to be a sum, or a mean over something, or ranks have other terms; the same on
            every rank.
    """
    problems = [rank_loss.problem for rank_loss in of_ranks if rank_loss.problem is not None]
    if problems:
        raise ConfigError(
            f"the ranks take different batches, and the loss of {name} {problems[0]}: what one process computes on the "
            f"global batch cannot be made of the ranks' losses. {REMEDY}"
        )
    mixing = [rank_loss.mixing for rank_loss in of_ranks if rank_loss.mixing]
    if mixing and not all(rank_loss.is_filler for rank_loss in of_ranks):
        raise ConfigError(
            f"the ranks take different batches, and the loss that the loop makes of outputs of {name} has {mixing[0]}, "
            "which is not known to keep samples apart. Return the loss from the module, whose samples are "
            f"probed; or {REMEDY[0].lower()}{REMEDY[1:]}"
        )
    paths_of_ranks = [[term.path for term in rank_loss.terms] for rank_loss in of_ranks]
    if any(paths != paths_of_ranks[0] for paths in paths_of_ranks):
        shown = "; ".join(f"rank {number}: {_show(paths)}" for number, paths in enumerate(paths_of_ranks))
        raise ConfigError(
            f"the ranks take different batches, and their losses of {name} are made of different terms ({shown}). "
            "Compute every term on every rank, also where no sample of its batch has one: a sum over nothing is zero. "
            f"{REMEDY}"
        )
    weights = []
    for index in range(len(paths_of_ranks[0])):
        term_of_ranks = [rank_loss.terms[index] for rank_loss in of_ranks]
        weights.append(_weigh(term_of_ranks, index, of_ranks, rank, name, divisors, items))
    return weights


def _weigh(
    terms: Sequence[Term],
    index: int,
    of_ranks: Sequence[RankLoss],
    rank: int,
    name: str,
    divisors: dict[str, DivisorKind],
    items: float | None,
) -> TermWeight:
    """Return this rank's factor of one term.

    The engine takes the mean over the ranks of their gradients, so that each factor has the number of ranks in it.
    Example of a mean: counts 3 and 1 on two ranks make 2 * 3 / 4 and 2 * 1 / 4.

    Args:
        terms: the term on every rank.
        index: of the term.
        of_ranks: the losses that have it.
    """
    kind, path, world_size = terms[0].kind, terms[0].path, len(terms)
    if any(term.kind != kind for term in terms):
        kinds = sorted({term.kind for term in terms})
        raise _refusal(name, path, f"is a {' on one rank, a '.join(kinds)} on another")
    own = terms[rank]
    if kind == "common":
        if not _alike([term.fingerprint for term in terms]) or not _alike([term.factor for term in terms]):
            raise _refusal(name, path, "is of parameters, and of numbers that differ between ranks")
        are_fillers = all(rank_loss.is_filler for rank_loss in of_ranks)
        return TermWeight(0.0 if are_fillers else 1.0 / own.extra, "common")
    if all(term.factor == 0 for term in terms):  # an annealed term that has not begun
        return TermWeight(1.0, kind)
    if kind == "mean":
        counts = _counts_of_mean(terms, of_ranks, name)
    else:
        ranks_of_sum = 0.0 if of_ranks[rank].is_filler else world_size
        if items is not None and all(_divides_by(term, items) for term in terms):
            return TermWeight(ranks_of_sum / own.extra, "items")
        divided_by = [math.inf if term.factor == 0 else 1 / term.factor for term in terms]
        if _meaning(terms, divided_by, index, of_ranks, name, divisors) == "number":
            return TermWeight(ranks_of_sum / own.extra, "sum")
        counts = [0.0 if term.is_empty else value for term, value in zip(terms, divided_by, strict=True)]
    counts = [0.0 if rank_loss.is_filler else count for rank_loss, count in zip(of_ranks, counts, strict=True)]
    total = math.fsum(counts)
    factor = world_size * counts[rank] / total / own.extra if total else 0.0
    return TermWeight(factor, "mean", tuple(counts))


def _divides_by(term: Term, number: float) -> bool:
    """Whether a term is divided by this number, among others."""
    return any(math.isclose(one, number, rel_tol=RTOL_OF_SUMS) for one in term.divisors)


def _counts_of_mean(terms: Sequence[Term], of_ranks: Sequence[RankLoss], name: str) -> list[float]:
    """Return the counts of a mean by rank. Raises `ConfigError`: they do not make one mean of the global batch."""
    path, counts = terms[0].path, [term.count for term in terms]
    rows = [rank_loss.rows for rank_loss in of_ranks]
    factors = [term.factor for term in terms]
    if not _alike(factors):
        # A mean may be turned into another: multiplied by the number of samples and divided by that of boxes, it is one
        # over boxes.
        counts = [math.inf if factor == 0 else count / factor for count, factor in zip(counts, factors, strict=True)]
        if not all(map(_is_whole, counts)) or _alike(counts):
            raise _refusal(
                name,
                path,
                f"is a mean times a number that differs between ranks ({_show(factors)}), and is not a count",
            )
        return counts
    if _are_shares(terms, rows):
        raise _refusal(
            name,
            path,
            "is a mean with weights whose mean is the same on every rank: each rank has normalized them over its own "
            "batch, one process over the global batch",
        )
    if not terms[0].of_elements or any(term.is_chosen for term in terms):
        return counts
    # A mean over all elements of a tensor: its size says whether each sample has as many of them.
    by_row = [count / row for count, row in zip(counts, rows, strict=True)]
    if not _alike(rows) and _alike(counts):
        raise _refusal(
            name,
            path,
            f"is a mean over {counts[0]:g} numbers on every rank, whose samples are {_show(rows)}: a mean of "
            "what their samples have been put together to",
        )
    inner_sizes = [term.inner for term in terms]
    if not _alike(by_row) and len(set(inner_sizes)) > 1 and all(inner_sizes):
        raise _refusal(
            name,
            path,
            f"is a mean over all places of its samples, which are padded to different lengths: of sizes "
            f"{'; '.join(map(_show, inner_sizes))} on the ranks, and to one length on one process. Count no "
            "padding, as by ignore_index or a mask and its sum, or pad to one length",
        )
    return counts


def _meaning(
    terms: Sequence[Term],
    divided_by: Sequence[float],
    index: int,
    of_ranks: Sequence[RankLoss],
    name: str,
    divisors: dict[str, DivisorKind],
) -> DivisorKind:
    """Return whether the divisor of a sum is a count of the batch or a number, and note it in ``divisors``.

    A divisor that differs between ranks must be a count. One that is equal on all ranks may be either; earlier steps,
    or a probe, have shown which. Raises `ConfigError`: it is not known.
    """
    path, rows = terms[0].path, [rank_loss.rows for rank_loss in of_ranks]
    known = divisors.get(path)
    if not any(term.has_factor for term in terms):
        if _are_shares(terms, rows):
            raise _refusal(
                name,
                path,
                "is a sum with weights whose total is the same on every rank: each rank has normalized them over its "
                "own batch, one process over the global batch",
            )
        return "number"
    if _alike(divided_by):
        if known is not None:
            return known
        raise _refusal(
            name,
            path,
            f"is a sum divided by {divided_by[0]:g} on every rank, whose samples are {_show(rows)}: whether "
            "that is a number, or counts something of a batch, does not show",
        )
    if known == "number":
        raise _refusal(
            name, path, f"is a sum divided by {_show(divided_by)} on the ranks, and was by one number before"
        )
    if len({len(term.divisors) for term in terms}) > 1:
        raise _refusal(name, path, "is a sum divided by more numbers on one rank than on another")
    # A sum may be divided several times; each divisor that differs between ranks has to be a count, and so has what
    # the divisors that were read leave of the whole factor.
    rest = []
    for term in terms:
        is_known = term.factor and all(term.divisors)
        rest.append(1 / (term.factor * math.prod(term.divisors)) if is_known else 1.0)
    for values in [*zip(*(term.divisors for term in terms), strict=True), tuple(rest)]:
        if not _alike(values):
            _expect_count(values, terms, index, of_ranks, name)
    divisors[path] = "count"
    return "count"


def _expect_count(
    values: Sequence[float], terms: Sequence[Term], index: int, of_ranks: Sequence[RankLoss], name: str
) -> None:
    """Refuse the divisors of a sum, by rank, unless they are counts. Raises `ConfigError`.

    They are if they go by the total of the term's weights, by the rows of the batch, or by an entry of the batch.
    """
    path, rows = terms[0].path, [rank_loss.rows for rank_loss in of_ranks]
    is_any = [not term.is_empty for term in terms]
    if all(term.weights is not None for term in terms):
        over_weights = []
        for value, term, is_present in zip(values, terms, is_any, strict=True):
            if is_present and term.weights is not None and term.weights.total:
                over_weights.append(value / term.weights.total)
        if _alike(over_weights):
            return
    explained = [set(rank_loss.explained[index]) for rank_loss in of_ranks]
    if _alike([value / row for value, row in zip(values, rows, strict=True)]) or set.intersection(*explained):
        return
    present_values = [value for value, is_present in zip(values, is_any, strict=True) if is_present]
    if not all(map(_is_whole, present_values)):
        raise _refusal(
            name, path, f"is a sum divided by {_show(values)} on the ranks, which count nothing that is known here"
        )
    # Scripts divide by max(count, 1), which hides whether a rank has one or none.
    if any(abs(value) == 1 for value in present_values):
        raise _refusal(
            name,
            path,
            f"is a sum divided by {_show(values)} on the ranks: whether one was counted where that is 1, or "
            "none, does not show",
        )


def _are_shares(terms: Sequence[Term], rows: Sequence[int]) -> bool:
    """Whether weights of samples were divided by their own total, or mean, on every rank."""
    weights = [one.weights for one in terms if one.weights is not None]
    if len(weights) < len(terms) or not any(one.varies and not one.is_mask for one in weights):
        return False
    totals, means = (
        [one.total for one in weights],
        [one.total / one.elements if one.elements else 0.0 for one in weights],
    )
    return (_alike(totals) and not _alike(rows)) or (_alike(means) and terms[0].kind == "mean")


def _refusal(name: str, path: str, what: str) -> ConfigError:
    return ConfigError(
        f"the ranks take different batches, and a term of the loss of {name} ({_short(path)}) {what}, so what one "
        f"process computes on the global batch is not known. {REMEDY}"
    )


def _alike(values: Sequence[float]) -> bool:
    """Whether all are one number, up to rounding."""
    return not values or all(
        one == values[0]
        or math.isclose(one, values[0], rel_tol=RTOL_OF_SUMS)
        or (one != one and values[0] != values[0])
        for one in values
    )


def _is_whole(value: float) -> bool:
    return math.isfinite(value) and abs(value - round(value)) <= _WHOLE and abs(value) > 0.5


def _show(values: Sequence[object]) -> str:
    return ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values) or "none"


def _short(path: str) -> str:
    """Return the last nodes of a path."""
    return " of ".join(node.removesuffix("Backward0") for node in path.split("/")[-3:])


def unit_of_counts(counts: Sequence[float], of_ranks: Sequence[RankLoss], units: Sequence[str]) -> str | None:
    """Return the first of ``units`` by which a mean's counts go on all ranks; None where they go by none."""
    for unit in units:
        wanted: list[int] = [getattr(one.counts, unit) for one in of_ranks]
        shares: list[float] = [count / want for count, want in zip(counts, wanted, strict=True) if want]
        if (
            shares
            and _alike(shares)
            and all((count == 0) == (want == 0) for count, want in zip(counts, wanted, strict=True))
        ):
            return unit
    return None


def expect_same_buffers(of_ranks: Sequence[RankLoss], name: str) -> None:
    """Refuse buffers that ranks change to different values. Raises `ModelError` on every rank: there is one."""
    for buffer in dict.fromkeys(buffer for one in of_ranks for buffer in one.buffers):
        values = [one.buffers.get(buffer) for one in of_ranks]
        known = [value for value in values if value is not None]
        if len(known) < len(values) or not _alike(known):
            raise ModelError(
                f"the ranks take different batches, and {name} changes its buffer {buffer} by them (totals by rank "
                f"{', '.join('unchanged' if one is None else f'{one:.6g}' for one in values)}): one process would make "
                "it of the global batch. Leave out what follows the batch, such as running means and moving averages "
                "of data, put the layer into eval(), or take equal batches in place of "
                f'"{SECTION}.batch".'
            )


def explain(divisor: float, statistics: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the entries of a batch whose total or number of non-zeros is a divisor."""
    return [
        f"{entry} {what}"
        for entry, values in statistics.items()
        for what, value in zip(("total", "non-zeros"), values, strict=True)
        if math.isclose(abs(divisor), value, rel_tol=RTOL_OF_SUMS)
    ]
