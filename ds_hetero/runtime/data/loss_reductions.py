"""Read one reduction in the graph of a loss: whether it is a sum or a mean, and the number by which it divides.

    (per_token * weights).sum() / 6        a sum, factor 1/6, with weights
    F.cross_entropy(logits, labels)        a mean, whose count is the number of labels that count

The nodes below a reduction that are linear (further sums and means, products with constants) belong to it. The walk
ends at the first node that is not, such as a square or a likelihood of single tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ds_hetero.runtime.data.graph_nodes import (
    ELEMENT_LOSSES,
    LIKELIHOODS,
    PRODUCTS,
    SAME_VALUES,
    UnreadableLossError,
    as_number,
    dim_of,
    first_operands,
    is_identity,
    operands,
    read_saved,
    shape_of,
    total_weight,
    trained_operands,
)

_TOTALS = ("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1")
_ROW_LOSSES = frozenset({"MultiMarginLossBackward0", "MultilabelMarginLossBackward0"})  # reduced over rows
_SELECTIONS = frozenset({"IndexBackward0", "MaskedSelectBackward0", "IndexSelectBackward0"})
_RATIO = "_RatioBackward"  # of `ds_hetero.runtime.loss.ratio`
# Relative difference from which totals of rows count as unlike: beyond rounding in fp32 and softmax.
_MIN_VARIATION = 1e-4


class Weights(NamedTuple):
    """A tensor without a gradient by which the elements of a sum or mean are multiplied."""

    total: float
    elements: int
    is_mask: bool  # has zeros and ones alone
    varies: bool  # its rows along the first dimension have unlike totals


@dataclass(kw_only=True)
class Term:
    """A term of a loss: ``factor`` times a sum divided by ``count``.

    Attributes:
        path: names of the nodes from the loss to the reduction, the same on ranks that compute their losses alike.
        kind: ``"mean"``: a sum divided by ``count``, which its node shows; ``"sum"``: a sum that only ``factor`` may
            divide; ``"common"``: of parameters alone, so the same on all ranks.
        factor: product of the numbers by which the term is multiplied, divided by the product of its ``divisors``.
        has_factor: the term is multiplied by a number other than 1 or -1, or divided by a number.
        rank_factor: product of the numbers by which the script multiplies for the ranks, and one process would not.
        counts_elements: ``count`` is the number of elements of a tensor.
        inner_sizes: sizes of that tensor, or of the tensor from which it was made, without the first dimension.
        is_selected: the elements were selected by a mask or by indices.
        divisors: the numbers in ``factor`` by which the term is divided.
        is_empty: for a sum: no element counts, so its divisor, which may be max(count, 1), says nothing.
        weights: the tensor by which elements are multiplied, if any.
        fingerprint: of the constants in a term of parameters, which must be equal on all ranks.
    """

    path: str = ""
    kind: Literal["mean", "sum", "common"]
    count: float = 1.0
    factor: float = 1.0
    has_factor: bool = False
    rank_factor: float = 1.0
    counts_elements: bool = False
    is_selected: bool = False
    divisors: tuple[float, ...] = ()
    is_empty: bool = False
    inner_sizes: tuple[int, ...] = ()
    weights: Weights | None = None
    fingerprint: float = 0.0


@dataclass(frozen=True)
class GraphPath:
    """Path from a loss down to a node, with the numbers by which the nodes on the path multiply and divide.

    Attributes:
        names: of the nodes above.
        factor: product of the numbers by which these nodes multiply, divided by the product of ``divisors``.
        has_factor: a node multiplies by a number other than 1 or -1, or divides by a number.
        divisors: the numbers by which these nodes divide.
        rank_factor: product of the numbers by which the script multiplies for the ranks.
        outer: the topmost product with a factor that is trained, such as a learned weight; None without one.
    """

    names: tuple[str, ...] = ()
    factor: float = 1.0
    has_factor: bool = False
    divisors: tuple[float, ...] = ()
    rank_factor: float = 1.0
    outer: Node | None = None

    def below(self, node: Node, factor: float = 1.0) -> GraphPath:
        """Return the path that goes on below ``node``, which multiplies by ``factor``."""
        return replace(
            self,
            names=(*self.names, node.name()),
            factor=self.factor * factor,
            has_factor=self.has_factor or abs(factor) != 1,
        )

    def below_division(self, node: Node, divisor: float) -> GraphPath:
        """Return the path that goes on below ``node``, which divides by ``divisor``."""
        return replace(
            self,
            names=(*self.names, node.name()),
            factor=self.factor * (1 / divisor if divisor else math.inf),
            has_factor=True,
            divisors=(*self.divisors, divisor),
        )


def read_reduction(node: Node, rows: int, linear: set[Node]) -> Term:
    """Return the mean or sum that a node computes, without its path.

    Args:
        rows: samples of the batch.
        linear: gets the nodes that belong to the reduction.

    Raises:
        UnreadableLossError: the node computes something else.
    """
    saved: Any = node
    name = node.name()
    if name == _RATIO:
        return Term(kind="mean", count=float(saved.unit))
    if name in LIKELIHOODS and saved._saved_reduction in (1, 2):
        if saved._saved_reduction == 1:
            return Term(kind="mean", count=float(total_weight(saved, read_saved)))
        return Term(kind="sum", is_empty=float(read_saved(node, "total_weight")) == 0)
    if name in ELEMENT_LOSSES and saved._saved_reduction in (1, 2):
        sizes = _sizes_of_operand(node)
        if saved._saved_reduction == 1:
            return _mean_over_elements(node, math.prod(sizes), sizes, rows)
        return Term(kind="sum", is_empty=not math.prod(sizes))
    if name in _ROW_LOSSES and saved._saved_reduction in (1, 2):
        sizes = _sizes_of_operand(node)
        count = sizes[0] if len(sizes) > 1 else 1
        return Term(kind="mean" if saved._saved_reduction == 1 else "sum", count=float(count))
    if name in _TOTALS:
        return _read_totals(node, rows, linear)
    raise UnreadableLossError(
        f"has a term that ends in {name}, which is not known to be a sum over samples, or such a sum divided by their "
        "number"
    )


def _sizes_of_operand(node: Node) -> tuple[int, ...]:
    """Return the sizes of the first operand with a gradient; all operands of an element loss have the same."""
    operand, index = next((operand, index) for operand, index in node.next_functions if operand is not None)
    return shape_of(operand, index)


def _mean_over_elements(node: Node, count: float, sizes: tuple[int, ...], rows: int) -> Term:
    """Return the term of a mean over ``count`` elements of a tensor of these sizes."""
    is_selected, inner_sizes = False, sizes[1:] if sizes and sizes[0] == rows else ()
    for operand in first_operands(node):
        shape = shape_of(operand)
        is_selected |= operand.name() in _SELECTIONS
        # Elements may have been flattened: then a tensor below shows the sizes of samples.
        if not inner_sizes and not is_selected and len(shape) > 1 and shape[0] == rows:
            inner_sizes = shape[1:]
    return Term(kind="mean", count=float(count), counts_elements=True, is_selected=is_selected, inner_sizes=inner_sizes)


@dataclass
class _LinearChain:
    """A chain of linear nodes below a sum or mean, each the only operand of the node above, and its properties.

    Attributes:
        top: the first node.
        lowest: the last node so far.
        count: elements over which the means among them average.
        path: the constants by which the nodes multiply and divide.
        weights: a tensor of constants by which a node multiplies.
        averages_rows: a node takes the mean over the first dimension, or over all dimensions.
        sums_rows: a node takes the sum over the first dimension, or over all dimensions.
        is_empty: no element counts.
        sizes: of the operand of the last sum or mean.
    """

    top: Node
    lowest: Node
    count: float = 1.0
    path: GraphPath = field(default_factory=GraphPath)
    weights: Weights | None = None
    averages_rows: bool = False
    sums_rows: bool = False
    is_empty: bool = False
    sizes: tuple[int, ...] = ()

    def add(self, node: Node) -> bool:
        """Take a node into account; False, and no change, if it is not linear."""
        if node.name() in _TOTALS:
            self._add_total(node)
            return True
        if node.name() in PRODUCTS:
            return self._add_product(node)
        return node.name() in SAME_VALUES or is_identity(node)

    def _add_total(self, node: Any) -> None:
        name = node.name()
        self.sizes = tuple(int(size) for size in node._saved_self_sym_sizes)
        num_dims = len(self.sizes)
        # Names that end in 1 are those of reductions over given dimensions; none given means all.
        dims = [] if name.endswith("0") else [dim_of(dim, num_dims) for dim in node._saved_dim]
        dims = dims or list(range(num_dims))
        self.is_empty |= 0 in self.sizes
        if name.startswith("Mean"):
            self.count *= math.prod(self.sizes[dim] for dim in dims)
            self.averages_rows |= 0 in dims or not self.sizes
        elif 0 in dims:
            self.sums_rows = True
            # A mean above a sum over rows averages what is left of them, not the rows.
            self.averages_rows = self.averages_rows and node is self.top

    def _add_product(self, node: Node) -> bool:
        constant = _constant_operand(node)
        if constant is None:
            return False
        if isinstance(constant, Weights):
            self.weights = constant
            self.is_empty |= constant.is_mask and constant.total == 0
        elif node.name().startswith("Div"):
            self.path = self.path.below_division(node, constant)
        else:
            self.path = self.path.below(node, constant)
        return True


def _read_totals(node: Node, rows: int, linear: set[Node]) -> Term:
    """Return the term of a sum or mean, with the linear nodes below it."""
    chain = _LinearChain(top=node, lowest=node)
    current = node
    while chain.add(current):
        linear.add(current)
        chain.lowest = current
        following = trained_operands(current)
        if len(following) != 1:
            break
        current = following[0]
    averages_rows = chain.averages_rows
    if chain.sums_rows and node.name().startswith("Mean") and not _averages_rows_below(node):
        averages_rows = False
    if averages_rows and chain.sums_rows:
        raise UnreadableLossError(f"sums and averages over the first axis ({node.name()})")
    if averages_rows:
        term = _mean_over_elements(chain.lowest, chain.count, chain.sizes, rows)
        term.factor = chain.path.factor
    else:
        is_selected, is_empty = _selection_below(chain.lowest)
        term = Term(kind="sum", is_selected=is_selected, is_empty=chain.is_empty or is_empty)
        term.factor = chain.path.factor / (chain.count or 1.0)
    term.has_factor, term.divisors = chain.path.has_factor, chain.path.divisors
    term.weights = chain.weights
    return term


def _selection_below(node: Node) -> tuple[bool, bool]:
    """Return whether nodes below ``node`` select elements by a mask or indices, and whether no element is left."""
    is_selected = is_empty = False
    for operand in first_operands(node):
        is_selected |= operand.name() in _SELECTIONS
        is_empty |= 0 in shape_of(operand)
        if operand.name() == "WhereBackward0":
            is_empty |= not bool(read_saved(operand, "condition").any())
        elif operand.name() == "MaskedFillBackward0":
            is_empty |= bool(read_saved(operand, "mask").all())
    return is_selected, is_empty


def _averages_rows_below(node: Node) -> bool:
    """Whether a mean of all elements averages over samples, too; False if a node below has summed over samples.

    Example: values.sum(0).mean() is a sum over the samples of the first dimension, values.mean(0).mean() a mean.
    """
    for operand in first_operands(node):
        saved: Any = operand
        if operand.name() in ("MeanBackward1", "SumBackward1"):
            dims = [dim_of(dim, len(saved._saved_self_sym_sizes)) for dim in saved._saved_dim]
            if 0 in dims:
                return operand.name() == "MeanBackward1"
    return True


def _constant_operand(node: Any) -> float | Weights | None:
    """Return the number or weights without a gradient that multiply or divide a result; None if there are none."""
    is_division = node.name().startswith("Div")
    if len(trained_operands(node)) != 1 or (is_division and operands(node)[0] is None):
        return None
    value = read_saved(node, "other" if operands(node)[0] is not None else "self")
    # On a rank with one sample, the weights of samples are one number as well: as many as the result has elements.
    is_number = not isinstance(value, Tensor) or (
        value.numel() == 1 and (not value.dim() or math.prod(shape_of(node)) > 1)
    )
    if is_number:
        return as_number(value)
    if is_division:
        return None
    return _weights_of(value.detach())


def _weights_of(values: Tensor) -> Weights:
    """Summarize a tensor of weights."""
    is_mask = values.dtype == torch.bool or bool(((values == 0) | (values == 1)).all())
    by_row = values.double().reshape(values.shape[0], -1).sum(1) if values.numel() else values.double()
    varies = bool(by_row.numel() and by_row.max() - by_row.min() > _MIN_VARIATION * by_row.abs().max())
    return Weights(float(by_row.sum()), values.numel(), is_mask, varies)
