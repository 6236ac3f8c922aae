"""Probes whether the samples of a batch see each other in a module that trains, and what its loss is divided by.

    found = probe_samples(run, batch, rows, model)       # on every rank, and `raise_if_mixed` with those of all

Two rows x and y of a batch are run as (x, x), (y, y), (x, y) and (y, x) in training mode, all from one random state, so
that masks of dropout are the same; then again from other states. Two things hold where each row is computed alone:

    outputs    x has the same outputs beside x and beside y
    loss       the totals A of its terms, before they are divided, add up: A(x, x) + A(y, y) = A(x, y) + A(y, x)

The second is seen in gradients of a few small parameters. Example: the sum of squares of the rows has A(x, y) = x^2 +
y^2, and both sides are 2 x^2 + 2 y^2. The square of the mean row has A(x, y) = (x + y)^2 / 4, and the sides differ by
(x - y)^2 / 2. So batch statistics, mixed samples, a running mean that is subtracted, and losses that compare samples
are found. In evaluation (x, x) is compared with x alone: a total is twice as large, and so is a divisor that counts.

Nothing is left behind: random states, buffers, and the numbers, lists and generators that modules keep are put back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ds_hetero.errors import ModelError
from ds_hetero.runtime.data.leaving_nothing import leaving_nothing
from ds_hetero.runtime.data.loss_graph import LossTerms, Term, on_nodes, read_terms
from ds_hetero.runtime.data.loss_units import Batch, UnitCounts, loss_in, take_rows, tensors_in
from ds_hetero.runtime.data.loss_weights import RTOL_OF_SUMS, DivisorKind
from ds_hetero.runtime.evaluation_mode import evaluation_mode
from ds_hetero.values.section import SECTION

# Relative differences that the order of a sum makes, in float32 and in 16 bits. Chosen, never measured.
_RTOL_OF_ROWS, _RTOL_OF_HALF_ROWS = 1e-4, 2e-2
_MOST_PARAMETERS = 24  # the smallest ones: their gradients are compared; chosen, never measured
# Smallest norm of a gradient that counts, over the largest norm. Below it is rounding, as for biases of keys, whose
# gradient is zero in exact arithmetic. Chosen, never measured.
_SMALL = 0.01
_NUM_DRAWS = 4  # random states: a module that permutes two rows leaves them as they are in every second one
_MOST_NAMED = 20_000  # nodes of a graph whose kinds are noted; chosen, never measured


@dataclass
class SampleFindings:
    """Findings of a rank's probe.

    Attributes:
        mixed: the observation that shows that samples see each other; None where there is none.
        divisors: kind of the divisor of each sum, by the path of the sum in the loss; see `loss_weights`.
        is_open: a loss could not be compared.
    """

    mixed: str | None = None
    divisors: dict[str, DivisorKind] = field(default_factory=dict)
    is_open: bool = False


@dataclass
class _Run:
    """Outputs and loss of a run."""

    outputs: dict[str, Tensor]
    loss: float | None
    terms: list[Term]
    can_tell: bool  # the terms of the loss are known
    counts: UnitCounts
    is_half: bool
    gradients: list[tuple[float, float]] | None = None  # of the totals: a projection and the norm, by parameter


def probe_samples(
    run: Callable[[Batch], object],
    batch: Batch,
    rows: int,
    model: nn.Module,
    after_run: Callable[[], None] = lambda: None,
) -> SampleFindings:
    """Probe rows of a batch, as the module's docstring says.

    Args:
        run: returns the outputs of the model of a batch, or its loss.
        batch: of this rank.
        rows: samples of it.
        after_run: called after every forward and its backward, which reaches a few parameters only.

    Caller: every rank that shares parameters of the model.
    Collectives: those of 3 + 4 `_NUM_DRAWS` forwards of two samples at most, and of a backward to a few parameters for
        each forward that returns a loss. Their number does not depend on what a rank finds.
    """
    is_split = any(entry.dim() and entry.shape[0] == rows for entry in tensors_in(batch))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = sorted(trained, key=_elements)[:_MOST_PARAMETERS]

    def result(chosen: list[int], seed: int = 0) -> _Run:
        part = take_rows(batch, chosen, rows) if is_split else batch
        with leaving_nothing(model), torch.enable_grad():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            record = _recorded(run(part), part, len(chosen), parameters)
            after_run()
            return record

    with evaluation_mode(model):
        twice, once, again = result([0, 0]), result([0]), result([0], 1)
    findings = SampleFindings()
    _find_divisors(findings, twice, once)
    last = rows - 1
    for seed in range(_NUM_DRAWS):
        runs = [result(chosen, seed) for chosen in ([0, 0], [last, last], [0, last], [last, 0])]
        mixed = findings.mixed or _mixed_outputs(runs[0], runs[1], runs[2], once)
        findings.mixed = mixed or _mixed_loss(findings, *runs)
    # Not where the model draws in evaluation, too: two rows draw other numbers than one.
    if once.loss == again.loss:
        findings.mixed = findings.mixed or _no_total(twice, once)
    return findings if is_split else SampleFindings()


def raise_if_mixed(of_ranks: Sequence[SampleFindings], name: str) -> dict[str, DivisorKind]:
    """Return the kinds of divisors on which all ranks agree.

    Raises:
        ModelError: on every rank, where samples see each other on one of them.
    """
    mixed = next((findings.mixed for findings in of_ranks if findings.mixed is not None), None)
    if mixed is not None:
        raise ModelError(
            f"the ranks take different batches, and {name} computes a sample otherwise beside others: {mixed}. One "
            "process has other samples beside it, so that its gradients are others. Normalize by nn.GroupNorm or "
            "nn.LayerNorm, mix or compare samples in the dataset or not at all, make the loss a sum over samples "
            f'divided by a number, or take equal batches in place of "{SECTION}.batch".'
        )
    divisors: dict[str, DivisorKind] = {}
    for findings in of_ranks:
        for path, kind in findings.divisors.items():
            if divisors.setdefault(path, kind) != kind:
                divisors.pop(path)
                break
    return divisors


def _elements(parameter: nn.Parameter) -> int:
    """Return the elements of a parameter; if ZeRO-3 has partitioned it, those of all ranks."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def newest_node(result: Tensor) -> int:
    """Return the number of the node that made a result; autograd counts the nodes that a thread makes."""
    node: Any = result.grad_fn
    return int(node._sequence_nr()) if node is not None else 0


def names_of_nodes(loss: Tensor) -> set[str]:
    """Return the kinds of the nodes in the graph of a loss."""
    names: set[str] = set()
    todo: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while todo and len(seen) < _MOST_NAMED:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.add(node.name())
        todo += [below for below, _ in node.next_functions]
    return names


def _recorded(outputs: object, batch: Batch, rows: int, parameters: list[nn.Parameter]) -> _Run:
    """Record a run; a loss is differentiated with respect to ``parameters``."""
    tensors = {}
    for name, output in _named(outputs):
        if output.is_floating_point() and output.dim():
            tensors[name] = output.detach()
    loss = loss_in(outputs)
    compared = [*tensors.values()] if loss is None else [*tensors.values(), loss]
    has_halves = any(tensor.element_size() < 4 for tensor in compared)
    read = read_terms(loss, rows) if loss is not None and parameters and loss.requires_grad else None
    can_tell = read is not None and read.problem is None
    gradients = None if loss is None or read is None else _gradients(loss, read, parameters)
    return _Run(
        outputs=tensors,
        loss=None if loss is None else float(loss.detach()),
        terms=[] if read is None else read.terms,
        can_tell=can_tell,
        counts=UnitCounts.of(batch, rows),
        is_half=has_halves or torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"),
        gradients=gradients if can_tell else None,
    )


def _gradients(loss: Tensor, read: LossTerms, parameters: list[nn.Parameter]) -> list[tuple[float, float]] | None:
    """Return a projection and the norm of the gradients of all terms before they are divided, by parameter.

    It runs where terms are not known, too: on ZeRO-3 a backward is a collective, and what ranks know may differ.

    Returns:
        None where torch refuses gradients of some parameters alone.
    """
    factors = []  # what undoes the division of each term; 0 for terms that are the same on all ranks
    for term in read.terms:
        factors.append(0.0 if term.kind == "common" or not term.factor else _divisor(term))
    on_nodes(read, factors)
    try:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError:  # reentrant checkpoints allow only a backward to all parameters
        return None
    results = []
    for gradient in gradients:
        values = torch.zeros(1) if gradient is None else gradient.detach().double().flatten()
        # Cosines of 0, 1, 2 ...: weights of both signs, the same on every run, that no sum cancels by chance.
        weights = torch.cos(torch.arange(values.numel(), device=values.device, dtype=torch.float64))
        results.append((float((values * weights).sum()), float(values.norm())))
    return results


def _named(entry: object, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested outputs, each with a name by its keys and indices."""
    if isinstance(entry, Tensor):
        yield name, entry
    elif isinstance(entry, Mapping):
        for key, part in entry.items():
            yield from _named(part, str(key))
    elif isinstance(entry, list | tuple):
        for number, part in enumerate(entry):
            yield from _named(part, f"{name}[{number}]")


def _mixed_outputs(first: _Run, second: _Run, mixed: _Run, once: _Run) -> str | None:
    """Describe an output that differs for one row when another row is beside it; None where there is none.

    Args:
        first: run of (x, x).
        second: run of (y, y).
        mixed: run of (x, y).
        once: run of x alone; an output with one row there and two in the others has one row per sample.
    """
    rtol = _RTOL_OF_HALF_ROWS if mixed.is_half else _RTOL_OF_ROWS
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
                return f"of {name} a row moves by {moved:.3g} of {scale:.3g}"
    return None


def _divisor(term: Term) -> float:
    """Return the number that a term is divided by."""
    return term.count if term.kind == "mean" else 1 / term.factor


def _mixed_loss(found: SampleFindings, *runs: _Run) -> str | None:
    """Describe a gradient of the loss whose totals do not add up; None where there is none.

    Args:
        found: gets ``is_open`` where the terms of the loss are not known, and no unit of a batch makes it a total.
        runs: of (x, x), (y, y), (x, y) and (y, x).
    """
    if any(run.loss is None for run in runs):
        return None
    rtol = _RTOL_OF_HALF_ROWS if runs[0].is_half else _RTOL_OF_ROWS
    gradients = [run.gradients for run in runs if run.can_tell and run.gradients is not None]
    has_same_terms = len({_paths(run) for run in runs}) == 1
    if len(gradients) < len(runs) or not has_same_terms:
        found.is_open |= not _adds_up_in_some_unit(runs, rtol)
        return None
    norms = [norm for of_run in gradients for _, norm in of_run]
    floor = _SMALL * max(norms, default=0.0)
    for of_parameter in zip(*gradients, strict=True):  # in each run: projection and norm
        projections = [projection for projection, _ in of_parameter]
        scale = max(floor, *(norm for _, norm in of_parameter))
        if not _add_up(projections, scale, rtol):
            xx, yy, xy, yx = projections
            return (
                f"a projection of the gradient of its loss, before it is divided, is {xx:.6g} and {yy:.6g} of two "
                f"samples, each twice, and {xy:.6g} and {yx:.6g} of both"
            )
    return None


def _adds_up_in_some_unit(runs: Sequence[_Run], rtol: float) -> bool:
    """Whether the losses, as means over a unit of the batch, come of totals that add up."""
    for unit in UnitCounts._fields:
        totals = [getattr(run.counts, unit) * (run.loss or 0.0) for run in runs]
        if any(totals) and _add_up(totals, max(map(abs, totals)), rtol):
            return True
    return False


def _paths(run: _Run) -> tuple[str, ...]:
    return tuple(term.path for term in run.terms)


def _add_up(totals: Sequence[float], scale: float, tolerance: float) -> bool:
    """Whether A(x, x) + A(y, y) = A(x, y) + A(y, x), within a tolerance of ``scale``; with NaN, True."""
    xx, yy, xy, yx = totals
    return not abs(xx + yy - xy - yx) > tolerance * scale


def _find_divisors(found: SampleFindings, twice: _Run, once: _Run) -> None:
    """Find whether the divisor of a sum grows with the rows, a count, or stays, a number; see `DivisorKind`."""
    if not (twice.can_tell and once.can_tell) or len(twice.terms) != len(once.terms):
        return
    for both, one in zip(twice.terms, once.terms, strict=True):
        if both.kind != "sum" or not both.has_factor or both.path != one.path or not both.factor or not one.factor:
            continue
        wide, narrow = 1 / both.factor, 1 / one.factor
        if abs(wide - 2 * narrow) <= RTOL_OF_SUMS * abs(wide):
            found.divisors[both.path] = "count"
        elif abs(wide - narrow) <= RTOL_OF_SUMS * abs(wide) and abs(wide) != 1:
            found.divisors[both.path] = "number"


def _no_total(twice: _Run, once: _Run) -> str | None:
    """Describe a gradient of the loss of (x, x) that is not twice that of x alone; None where there is none."""
    if twice.gradients is None or once.gradients is None or _paths(twice) != _paths(once):
        return None
    tolerance = _RTOL_OF_HALF_ROWS if twice.is_half else _RTOL_OF_ROWS
    floor = _SMALL * max((norm for _, norm in twice.gradients), default=0.0)
    for (both, norm), (one, _) in zip(twice.gradients, once.gradients, strict=True):
        if abs(both - 2 * one) > tolerance * max(norm, floor):
            return (
                f"a projection of the gradient of its loss, before it is divided, is {one:.6g} of a sample and "
                f"{both:.6g} of the same twice"
            )
    return None
