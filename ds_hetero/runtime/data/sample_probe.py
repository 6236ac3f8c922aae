"""Probe whether a module in training computes each sample alone, and whether its loss is divided by a count.

    findings = probe_samples(run, batch, rows, model)    # on every rank
    divisors = raise_if_mixed(findings_of_all_ranks, name)

Two rows x and y of a batch are run as (x, x), (y, y), (x, y) and (y, x) in training mode, all from one random state, so
that dropout masks are the same; then again from other states. If each row is computed alone, two equations hold:

    outputs    the outputs of x are the same in (x, x) and in (x, y)
    loss       the totals A of its terms, before they are divided, add up: A(x, x) + A(y, y) = A(x, y) + A(y, x)

The second is checked on gradients of a few small parameters. Example: the sum of squares of the rows has A(x, y) = x^2
+ y^2, and both sides are 2 x^2 + 2 y^2. The square of the mean row has A(x, y) = (x + y)^2 / 4, and the sides differ by
(x - y)^2 / 2. So the probe finds batch statistics, mixed samples, a running mean that is subtracted, and losses that
compare samples. In evaluation mode (x, x) is compared with x alone: a total is twice as large, and so is a divisor that
is a count.

A probe changes nothing: random states, buffers, and the numbers, lists and generators of modules are restored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ds_hetero.errors import ModelError
from ds_hetero.runtime.data.loss_graph import LossTerms, multiply_gradients, read_terms
from ds_hetero.runtime.data.loss_reductions import Term
from ds_hetero.runtime.data.loss_units import Batch, UnitCounts, loss_in, take_rows, tensors_in
from ds_hetero.runtime.data.loss_weights import RTOL_SUMS, DivisorKind
from ds_hetero.runtime.data.restored_state import restoring_state
from ds_hetero.runtime.evaluation_mode import evaluation_mode
from ds_hetero.values.section import SECTION

# Relative differences up to which rows are equal: the order of sums in float32 and in 16 bits. Chosen, never measured.
_RTOL_ROWS, _RTOL_HALF_ROWS = 1e-4, 2e-2
_MAX_PROBED_PARAMETERS = 24  # the gradients of the smallest parameters are compared; chosen, never measured
# Norms of gradients below this share of the largest one are rounding, as those of biases of keys, whose gradient is
# zero in exact arithmetic. Chosen, never measured.
_MIN_NORM_SHARE = 0.01
_NUM_RANDOM_STATES = 4  # a module that permutes two rows at random leaves them in place every second time
_MAX_NAMED_NODES = 20_000  # nodes of a graph whose names are collected; chosen, never measured


@dataclass
class SampleFindings:
    """Findings of one rank's probe.

    Attributes:
        mixed: text on a difference that shows that samples see each other; None without such a difference.
        divisors: kind of the divisor of each sum, by the path of the sum in the loss; see `loss_weights`.
        is_open: the loss could not be compared, so nothing is known of it.
    """

    mixed: str | None = None
    divisors: dict[str, DivisorKind] = field(default_factory=dict)
    is_open: bool = False


@dataclass
class _Run:
    """Outputs, loss and gradients of the forward and backward of one or two rows.

    Attributes:
        outputs: by name.
        loss: None if the module returned none.
        terms: of the loss.
        has_terms: the terms of the loss could be read.
        counts: `UnitCounts` of the rows.
        is_half: an output or the loss has 16 bits, or autocast was on, so that comparisons need a wide tolerance.
        gradients: of the sum of the terms before they are divided, for each parameter; None if they are not known.
    """

    outputs: dict[str, Tensor]
    loss: float | None
    terms: list[Term]
    has_terms: bool
    counts: UnitCounts
    is_half: bool
    gradients: list[_Gradient] | None = None


class _Gradient(NamedTuple):
    """Two numbers that stand for the gradient of a parameter."""

    projection: float  # the scalar product with a fixed vector
    norm: float


def probe_samples(
    run: Callable[[Batch], object],
    batch: Batch,
    rows: int,
    model: nn.Module,
    after_run: Callable[[], None] = lambda: None,
) -> SampleFindings:
    """Probe the first and last row of a batch, as described at the top of this module.

    Args:
        run: returns the outputs of the model for a batch, or its loss.
        batch: a batch of this rank.
        rows: its number of samples.
        after_run: called after every forward and its backward; the backward reaches a few parameters only.

    Caller: every rank that shares parameters of the model.
    Collectives: the model's, in 3 + 4 * `_NUM_RANDOM_STATES` forwards of at most two samples, and in a backward to a
        few parameters for each forward that returns a loss. Their number does not depend on the findings of a rank.
    """
    is_split = any(entry.dim() and entry.shape[0] == rows for entry in tensors_in(batch))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = sorted(trained, key=_num_elements)[:_MAX_PROBED_PARAMETERS]

    def run_rows(chosen: list[int], seed: int = 0) -> _Run:
        part = take_rows(batch, chosen, rows) if is_split else batch
        with restoring_state(model), torch.enable_grad():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            record = _record(run(part), part, len(chosen), parameters)
            after_run()
            return record

    with evaluation_mode(model):
        twice, once, once_again = run_rows([0, 0]), run_rows([0]), run_rows([0], 1)
    findings = SampleFindings()
    _find_divisors(findings, twice, once)
    last = rows - 1
    for seed in range(_NUM_RANDOM_STATES):
        runs = [run_rows(chosen, seed) for chosen in ([0, 0], [last, last], [0, last], [last, 0])]
        mixed = findings.mixed or _mixed_outputs(runs[0], runs[1], runs[2], once)
        findings.mixed = mixed or _mixed_loss(findings, *runs)
    # A model that draws random numbers in evaluation mode as well draws others for two rows than for one.
    is_deterministic = once.loss == once_again.loss
    if is_deterministic:
        findings.mixed = findings.mixed or _undoubled_gradient(twice, once)
    return findings if is_split else SampleFindings()


def raise_if_mixed(findings_of_ranks: Sequence[SampleFindings], name: str) -> dict[str, DivisorKind]:
    """Return the kinds of divisors on which all ranks agree, by the path of the sum.

    Raises:
        ModelError: samples see each other on a rank; the same error on every rank.
    """
    mixed = next((findings.mixed for findings in findings_of_ranks if findings.mixed is not None), None)
    if mixed is not None:
        raise ModelError(
            f"the ranks take different batches, and {name} computes a sample otherwise beside others: {mixed}. One "
            "process would have other samples beside it, and so other gradients. Normalize by nn.GroupNorm or "
            "nn.LayerNorm, mix or compare samples in the dataset or not at all, make the loss a sum over samples "
            f'divided by a number, or take equal batches in place of "{SECTION}.batch".'
        )
    divisors: dict[str, DivisorKind] = {}
    for findings in findings_of_ranks:
        for path, kind in findings.divisors.items():
            if divisors.setdefault(path, kind) != kind:
                divisors.pop(path)
                break
    return divisors


def _num_elements(parameter: nn.Parameter) -> int:
    """Return the number of elements of a parameter, of all its partitions under ZeRO-3."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def newest_node(result: Tensor) -> int:
    """Return the sequence number of the node that made ``result``; autograd numbers the nodes that a thread makes."""
    node: Any = result.grad_fn
    return int(node._sequence_nr()) if node is not None else 0


def names_of_nodes(loss: Tensor) -> set[str]:
    """Return the names of the nodes in the graph of a loss, such as "MulBackward0"."""
    names: set[str] = set()
    todo: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while todo and len(seen) < _MAX_NAMED_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.add(node.name())
        todo += [below for below, _ in node.next_functions]
    return names


def _record(outputs: object, batch: Batch, rows: int, parameters: list[nn.Parameter]) -> _Run:
    """Record the outputs of a run, its loss, and the gradients of the loss's terms for ``parameters``."""
    tensors = {}
    for name, output in _named(outputs):
        if output.is_floating_point() and output.dim():
            tensors[name] = output.detach()
    loss = loss_in(outputs)
    compared = [*tensors.values()] if loss is None else [*tensors.values(), loss]
    has_halves = any(tensor.element_size() < 4 for tensor in compared)
    read = read_terms(loss, rows) if loss is not None and parameters and loss.requires_grad else None
    has_terms = read is not None and read.problem is None
    gradients = None if loss is None or read is None else _gradients(loss, read, parameters)
    return _Run(
        outputs=tensors,
        loss=None if loss is None else float(loss.detach()),
        terms=[] if read is None else read.terms,
        has_terms=has_terms,
        counts=UnitCounts.of(batch, rows),
        is_half=has_halves or torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"),
        gradients=gradients if has_terms else None,
    )


def _gradients(loss: Tensor, read: LossTerms, parameters: list[nn.Parameter]) -> list[_Gradient] | None:
    """Return the gradients of the sum of all terms before they are divided, one for each parameter.

    Runs a backward even if the terms are not known: under ZeRO-3 a backward is a collective, and only some ranks may
    know their terms.

    Returns:
        None if torch refuses to differentiate with respect to some parameters only.
    """
    factors = []  # undo the division of each term; 0 for terms that are the same on all ranks
    for term in read.terms:
        factors.append(0.0 if term.kind == "common" or not term.factor else _divisor(term))
    multiply_gradients(read, factors)
    try:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError:  # reentrant checkpoints allow only a backward to all parameters
        return None
    results = []
    for gradient in gradients:
        values = torch.zeros(1) if gradient is None else gradient.detach().double().flatten()
        # The cosines of 0, 1, 2, ... are weights of both signs, the same in every run, which no sum cancels by chance.
        weights = torch.cos(torch.arange(values.numel(), device=values.device, dtype=torch.float64))
        results.append(_Gradient(float((values * weights).sum()), float(values.norm())))
    return results


def _named(entry: object, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested outputs, each with a name made of its keys and indices, such as "output[0]"."""
    if isinstance(entry, Tensor):
        yield name, entry
    elif isinstance(entry, Mapping):
        for key, part in entry.items():
            yield from _named(part, str(key))
    elif isinstance(entry, list | tuple):
        for number, part in enumerate(entry):
            yield from _named(part, f"{name}[{number}]")


def _mixed_outputs(first: _Run, second: _Run, mixed: _Run, once: _Run) -> str | None:
    """Describe an output of a row that changes with the other row of the batch; None if no output does.

    Args:
        first: run of (x, x).
        second: run of (y, y).
        mixed: run of (x, y).
        once: run of x alone, which shows the outputs that have one row per sample: one row there, two in the others.
    """
    rtol = _RTOL_HALF_ROWS if mixed.is_half else _RTOL_ROWS
    for name, both in mixed.outputs.items():
        alone = once.outputs.get(name)
        if both.shape[0] != 2 or alone is None or alone.shape[0] != 1:
            continue
        for row, run in enumerate((first, second)):
            twin = run.outputs.get(name)
            if twin is None or twin.shape != both.shape or not both[row].numel():
                continue
            values, others = both[row].double(), twin[row].double()
            scale = float(torch.maximum(values.abs().max(), others.abs().max()))
            moved = float((values - others).abs().max())
            if moved > rtol * scale and scale > 0:
                return f"a row of {name} changes by {moved:.3g} of {scale:.3g}"
    return None


def _divisor(term: Term) -> float:
    """Return the number by which a term is divided."""
    return term.count if term.kind == "mean" else 1 / term.factor


def _mixed_loss(findings: SampleFindings, *runs: _Run) -> str | None:
    """Describe a parameter for which the gradients of the totals do not add up; None if they do for all.

    Args:
        findings: gets ``is_open`` if the terms of the loss are not known, and it is not a mean over any unit either.
        runs: of (x, x), (y, y), (x, y) and (y, x).
    """
    if any(run.loss is None for run in runs):
        return None
    rtol = _RTOL_HALF_ROWS if runs[0].is_half else _RTOL_ROWS
    gradients = [run.gradients for run in runs if run.has_terms and run.gradients is not None]
    has_same_terms = len({_paths(run) for run in runs}) == 1
    if len(gradients) < len(runs) or not has_same_terms:
        findings.is_open |= not _adds_up_in_some_unit(runs, rtol)
        return None
    norms = [gradient.norm for of_run in gradients for gradient in of_run]
    floor = _MIN_NORM_SHARE * max(norms, default=0.0)
    for of_parameter in zip(*gradients, strict=True):  # its gradient in each run
        projections = [gradient.projection for gradient in of_parameter]
        scale = max(floor, *(gradient.norm for gradient in of_parameter))
        if not _add_up(projections, scale, rtol):
            xx, yy, xy, yx = projections
            return (
                f"a projection of the gradient of its loss, before it is divided, is {xx:.6g} and {yy:.6g} for two "
                f"samples, each twice, and {xy:.6g} and {yx:.6g} for both together"
            )
    return None


def _adds_up_in_some_unit(runs: Sequence[_Run], rtol: float) -> bool:
    """Whether the losses times the counts of some unit, which are totals if they are means over it, add up."""
    for unit in UnitCounts._fields:
        totals = [getattr(run.counts, unit) * (run.loss or 0.0) for run in runs]
        if any(totals) and _add_up(totals, max(map(abs, totals)), rtol):
            return True
    return False


def _paths(run: _Run) -> tuple[str, ...]:
    """Return the paths of the terms of a run's loss."""
    return tuple(term.path for term in run.terms)


def _add_up(totals: Sequence[float], scale: float, tolerance: float) -> bool:
    """Whether A(x, x) + A(y, y) = A(x, y) + A(y, x), up to ``tolerance`` times ``scale``; True if one is NaN."""
    xx, yy, xy, yx = totals
    return not abs(xx + yy - xy - yx) > tolerance * scale


def _find_divisors(findings: SampleFindings, twice: _Run, once: _Run) -> None:
    """Note for each sum whether its divisor doubles with the rows (a count) or stays the same (a constant).

    Args:
        findings: gets the kinds in ``divisors``.
        twice: run of (x, x).
        once: run of x alone.
    """
    if not (twice.has_terms and once.has_terms) or len(twice.terms) != len(once.terms):
        return
    for term_of_two, term_of_one in zip(twice.terms, once.terms, strict=True):
        is_divided_sum = term_of_two.kind == "sum" and term_of_two.has_factor
        if not is_divided_sum or term_of_two.path != term_of_one.path:
            continue
        if not term_of_two.factor or not term_of_one.factor:
            continue
        divisor_of_two, divisor_of_one = 1 / term_of_two.factor, 1 / term_of_one.factor
        tolerance = RTOL_SUMS * abs(divisor_of_two)
        if abs(divisor_of_two - 2 * divisor_of_one) <= tolerance:
            findings.divisors[term_of_two.path] = "count"
        elif abs(divisor_of_two - divisor_of_one) <= tolerance and abs(divisor_of_two) != 1:
            findings.divisors[term_of_two.path] = "number"


def _undoubled_gradient(twice: _Run, once: _Run) -> str | None:
    """Describe a parameter whose gradient for (x, x) is not twice that for x alone; None if there is none."""
    if twice.gradients is None or once.gradients is None or _paths(twice) != _paths(once):
        return None
    tolerance = _RTOL_HALF_ROWS if twice.is_half else _RTOL_ROWS
    floor = _MIN_NORM_SHARE * max((gradient.norm for gradient in twice.gradients), default=0.0)
    for of_two, of_one in zip(twice.gradients, once.gradients, strict=True):
        if abs(of_two.projection - 2 * of_one.projection) > tolerance * max(of_two.norm, floor):
            return (
                "a projection of the gradient of its loss, before it is divided, is "
                f"{of_one.projection:.6g} for a sample and {of_two.projection:.6g} for the same sample twice"
            )
    return None
