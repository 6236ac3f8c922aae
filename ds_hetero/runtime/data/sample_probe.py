"""Whether the samples of a batch see each other in a module that trains, and what its loss is divided by.

    found = probe_samples(run, batch, rows, model)       # on every rank, and `raise_if_mixed` with those of all

Two rows x and y of a batch are run as (x, x), (y, y), (x, y) and (y, x) in training mode, all from one random state, so
that masks of dropout are the same; and from others. A module that computes each row alone gives x the same outputs
beside x and beside y. The totals A of a loss that it makes itself, of every term before it is divided, add up:
A(x, x) + A(y, y) = A(x, y) + A(y, x). That is seen in their gradients with respect to a few small parameters. Batch
statistics, mixed samples, a running mean that is subtracted and losses that compare samples show. In
evaluation, (x, x) is compared with x alone: a total, and a divisor that counts, are twice as large.

Nothing is left behind: random states, buffers, and the numbers, lists and generators that modules keep are put back.
"""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ds_hetero.errors import ModelError
from ds_hetero.runtime.data.loss_graph import LossTerms, Term, on_nodes, read_terms
from ds_hetero.runtime.data.loss_units import Batch, UnitCounts, loss_in, take_rows, tensors_in
from ds_hetero.runtime.data.loss_weights import RTOL_OF_SUMS, DivisorKind
from ds_hetero.values.section import SECTION

# Relative differences of results by the order and the type of their sums; those of a half type are of the larger.
_RTOL_OF_ROWS, _RTOL_OF_HALF_ROWS = 1e-4, 2e-2
_MOST_PARAMETERS = 24  # the smallest, whose gradients are looked at
_SMALL = 0.01  # norm of a gradient beside the largest: below are rounding, as of the biases of keys, which have none
_NUM_DRAWS = 4  # by which samples are mixed; two rows are left as they are by every second permutation
_MOST_NAMED = 20_000  # nodes of a graph whose kinds are noted


@dataclass
class SampleFindings:
    """What a rank's probe has shown.

    Attributes:
        mixed: what shows that samples see each other; None where nothing does.
        divisors: by the path of a sum what it is divided by, see `loss_weights`.
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
    can_tell: bool  # the terms are known
    counts: UnitCounts
    is_half: bool
    gradients: list[tuple[float, float]] | None = None  # of all totals: projections and norms, by parameter


def probe_samples(
    run: Callable[[Batch], object],
    batch: Batch,
    rows: int,
    model: nn.Module,
    after_run: Callable[[], None] = lambda: None,
) -> SampleFindings:
    """Run rows of a batch, see the top.

    Args:
        run: outputs of the model of a batch, or its loss.
        after_run: called after every forward and its backward, which reaches a few parameters only.

    Caller: every rank that shares parameters of the model; 3 + 4 `_NUM_DRAWS` forwards of two samples, and backwards to
        a few parameters of those that return a loss.
    """
    is_split = any(one.dim() and one.shape[0] == rows for one in tensors_in(batch))
    last = rows - 1
    trained = sorted((one for one in model.parameters() if one.requires_grad), key=_elements)
    parameters = trained[:_MOST_PARAMETERS]

    def result(chosen: list[int], seed: int = 0) -> _Run:
        part = take_rows(batch, chosen, rows) if is_split else batch
        with leaving_nothing(model), torch.enable_grad():
            for of_library in (torch.manual_seed, random.seed, np.random.seed):
                of_library(seed)
            seen = _seen(run(part), part, len(chosen), parameters)
            after_run()
            return seen

    with _without_training(model):
        twice, once, again = result([0, 0]), result([0]), result([0], 1)
    found = SampleFindings()
    _find_divisors(found, twice, once)
    for seed in range(_NUM_DRAWS):
        runs = [result(chosen, seed) for chosen in ([0, 0], [last, last], [0, last], [last, 0])]
        found.mixed = found.mixed or _mixed_outputs(runs[0], runs[1], runs[2], once) or _mixed_loss(found, *runs)
    if once.loss == again.loss:  # and not by chance in evaluation too, of which two rows draw other than one
        found.mixed = found.mixed or _no_total(twice, once)
    return found if is_split else SampleFindings()


def raise_if_mixed(of_ranks: Sequence[SampleFindings], name: str) -> dict[str, DivisorKind]:
    """Return what is known of divisors. Raises `ModelError` on every rank: samples see each other on one."""
    if (mixed := next((one.mixed for one in of_ranks if one.mixed is not None), None)) is not None:
        raise ModelError(
            f"the ranks take different batches, and {name} computes a sample otherwise beside others: {mixed}. One "
            "process has other samples beside it, so that its gradients are others. Normalize by nn.GroupNorm or "
            "nn.LayerNorm, mix or compare samples in the dataset or not at all, make the loss a sum over samples "
            f'divided by a number, or take equal batches in place of "{SECTION}.batch".'
        )
    divisors: dict[str, DivisorKind] = {}
    for one in of_ranks:
        for path, kind in one.divisors.items():
            if divisors.setdefault(path, kind) != kind:
                divisors.pop(path)
                break
    return divisors


def _elements(parameter: nn.Parameter) -> int:
    """Of a parameter; of one that ZeRO-3 has partitioned, those of all ranks."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def newest_node(result: Tensor) -> int:
    """Number of the node of a result; autograd counts the nodes that a thread makes."""
    node: Any = result.grad_fn
    return int(node._sequence_nr()) if node is not None else 0


def names_of_nodes(loss: Tensor) -> set[str]:
    """Kinds of the nodes in the graph of a loss."""
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


def _seen(outputs: object, batch: Batch, rows: int, parameters: list[nn.Parameter]) -> _Run:
    loss = loss_in(outputs)
    read = read_terms(loss, rows) if loss is not None and parameters and loss.requires_grad else None
    tensors = {name: one.detach() for name, one in _named(outputs) if one.is_floating_point() and one.dim()}
    compared = [*tensors.values()] if loss is None else [*tensors.values(), loss]
    halves = [one.element_size() < 4 for one in compared]
    can_tell = read is not None and read.problem is None
    gradients = None if loss is None or read is None else _gradients(loss, read, parameters)
    return _Run(
        tensors,
        None if loss is None else float(loss.detach()),
        [] if read is None else read.terms,
        can_tell,
        UnitCounts.of(batch, rows),
        any(halves) or torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"),
        gradients if can_tell else None,
    )


def _gradients(loss: Tensor, read: LossTerms, parameters: list[nn.Parameter]) -> list[tuple[float, float]] | None:
    """Of all terms before they are divided, by parameter a projection and a norm; None where there is no way to.

    Of terms that are not known, too: on ZeRO-3 a backward is a collective, and what ranks know may differ.
    """
    totals = [0.0 if one.kind == "common" or not one.factor else _divisor(one) for one in read.terms]
    on_nodes(read, totals)
    try:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError:  # of checkpoints that are reentrant, which take a backward of all alone
        return None
    found = []
    for gradient in gradients:
        values = torch.zeros(1) if gradient is None else gradient.detach().double().flatten()
        signs = torch.cos(torch.arange(values.numel(), device=values.device, dtype=torch.float64))
        found.append((float((values * signs).sum()), float(values.norm())))
    return found


def _named(entry: object, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    if isinstance(entry, Tensor):
        yield name, entry
    elif isinstance(entry, Mapping):
        for key, part in entry.items():
            yield from _named(part, str(key))
    elif isinstance(entry, list | tuple):
        for number, part in enumerate(entry):
            yield from _named(part, f"{name}[{number}]")


def _mixed_outputs(first: _Run, second: _Run, mixed: _Run, once: _Run) -> str | None:
    """An output of which a row is another beside other rows."""
    same = _RTOL_OF_HALF_ROWS if mixed.is_half else _RTOL_OF_ROWS
    for name, both in mixed.outputs.items():
        alone = once.outputs.get(name)
        if both.shape[0] != 2 or alone is None or alone.shape[0] != 1:
            continue
        for row, run in enumerate((first, second)):
            twin = run.outputs.get(name)
            if twin is None or twin.shape != both.shape:
                continue
            values, others = both[row].double(), twin[row].double()
            scale = float(torch.maximum(values.abs().max(), others.abs().max())) if values.numel() else 0.0
            moved = float((values - others).abs().max()) if values.numel() else 0.0
            if moved > same * scale and scale > 0:
                return f"of {name} a row moves by {moved:.3g} of {scale:.3g}"
    return None


def _divisor(term: Term) -> float:
    return term.count if term.kind == "mean" else 1 / term.factor


def _mixed_loss(found: SampleFindings, *runs: _Run) -> str | None:
    """A loss whose totals do not add up."""
    if any(run.loss is None for run in runs):
        return None
    parts = [run.gradients for run in runs]
    tolerance = _RTOL_OF_HALF_ROWS if runs[0].is_half else _RTOL_OF_ROWS
    if not all(run.can_tell for run in runs) or len({_paths(run) for run in runs}) > 1 or any(p is None for p in parts):
        losses = [[getattr(run.counts, unit) * (run.loss or 0.0) for run in runs] for unit in UnitCounts._fields]
        found.is_open |= not any(
            _add_up(of_unit, max(map(abs, of_unit)), tolerance) for of_unit in losses if any(of_unit)
        )
        return None
    floor = _SMALL * max((norm for part in parts for _, norm in part or ()), default=0.0)
    for of_runs in zip(*(part for part in parts if part is not None), strict=True):
        if not _add_up([one for one, _ in of_runs], max(floor, *(norm for _, norm in of_runs)), tolerance):
            xx, yy, xy, yx = (one for one, _ in of_runs)
            return (
                f"a projection of the gradient of its loss, before it is divided, is {xx:.6g} and {yy:.6g} of two "
                f"samples, each twice, and {xy:.6g} and {yx:.6g} of both"
            )
    return None


def _paths(run: _Run) -> tuple[str, ...]:
    return tuple(term.path for term in run.terms)


def _add_up(totals: Sequence[float], scale: float, tolerance: float) -> bool:
    xx, yy, xy, yx = totals
    return not abs(xx + yy - xy - yx) > tolerance * scale


def _find_divisors(found: SampleFindings, twice: _Run, once: _Run) -> None:
    """Find whether what sums are divided by grows with the rows."""
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
    """A loss of a row twice whose totals are not twice those of the row."""
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


@contextlib.contextmanager
def _without_training(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    for module in training:
        module.training = hasattr(module, "support_avx512bf16_for_cpu")  # see `whole_model.packs_in_evaluation`
    try:
        yield
    finally:
        for module in training:
            module.training = True


_OF_MODULE = frozenset(vars(nn.Module()))


@contextlib.contextmanager
def leaving_nothing(model: nn.Module) -> Iterator[None]:
    """Put back random states, buffers, and what modules keep beside their parameters."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    of_python, of_numpy = random.getstate(), np.random.get_state()
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    kept = [(module, name, _copied(value)) for module in model.modules() for name, value in _attributes(module)]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                buffer.copy_(before)
                module._buffers[name] = buffer
        for module, name, value in kept:
            _put_back(module, name, value)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    kinds = (bool, int, float, str, torch.Generator, Tensor, np.random.Generator, random.Random)
    for name, value in list(vars(module).items()):
        is_list = type(value) in (list, dict, set, collections.deque)
        if name == "training" or name in _OF_MODULE or not (value is None or is_list or isinstance(value, kinds)):
            continue
        yield name, value


def _copied(value: Any) -> tuple[Any, Any]:
    """A value and what it was."""
    if isinstance(value, torch.Generator):
        return value, value.get_state()
    if isinstance(value, np.random.Generator):
        return value, value.bit_generator.state
    if isinstance(value, random.Random):
        return value, value.getstate()
    if isinstance(value, Tensor):
        return value, value.detach().clone()
    if type(value) in (list, dict, set, collections.deque):
        return value, value.copy()
    return value, None


def _put_back(module: nn.Module, name: str, kept: tuple[Any, Any]) -> None:
    value, before = kept
    if isinstance(value, torch.Generator):
        value.set_state(before)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = before
    elif isinstance(value, random.Random):
        value.setstate(before)
    elif isinstance(value, Tensor):
        with torch.no_grad():
            value.detach().copy_(before)
    elif isinstance(value, list | collections.deque):
        value.clear()
        value.extend(before)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(before)
    vars(module)[name] = value
