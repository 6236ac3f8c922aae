"""Terms of a scalar loss, and whether each is a mean or a sum over tokens or samples, read from its autograd graph.

    read_terms(F.cross_entropy(logits, labels, weight=w) + 0.1 * boxes.sum() / num_boxes)
        # a mean over 11.0, the weights of the labels that count; and a sum times 0.1 divided by num_boxes, 6

A loss is a sum of terms, each a sum over a batch divided by a number: of its elements, of labels that count, of the
weights of their classes, of boxes. PyTorch's nodes keep that number: ``total_weight`` of a negative log-likelihood, the
sizes of a mean, the denominator of a division. So the terms are found by a walk from the loss down through additions
and multiplications by numbers, to the reductions over the batch. The walk sees a few dozen nodes, never the model.

A term that is something else (the root of a mean, a ratio whose denominator has gradients as that of Dice, an operation
that is not known here) is a problem, which names the node.

A term of parameters alone, such as a penalty on weights, is the same on all ranks.

What nodes keep may have hooks (activations that are offloaded, checkpoints), which reading runs. torch's own give it as
often as they are asked. Others may give it once, so that the backward finds nothing: what they keep is not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

# Nodes by name; torch.autograd's derivatives.yaml says what they save.
_SUMS = frozenset({"AddBackward0", "SubBackward0", "AddBackward1", "SubBackward1", "RsubBackward1", "RsubBackward0"})
SAME_VALUES = frozenset(
    {
        "AliasBackward0",
        "AsStridedBackward0",
        "CloneBackward0",
        "CopyBackwards",
        "ExpandBackward0",
        "NegBackward0",
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
_PRODUCTS = frozenset({"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"})
LINEAR = _SUMS | SAME_VALUES | _PRODUCTS  # of scalars: sums, and products with numbers
# What puts scalars together to one, or takes them apart, besides; NaN as a number is a guard.
_OF_SCALARS = frozenset(
    {
        "CatBackward0",
        "MeanBackward0",
        "MeanBackward1",
        "NanToNumBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "StackBackward0",
        "SumBackward0",
        "SumBackward1",
    }
)
LINEAR_OF_SCALARS = LINEAR | _OF_SCALARS
MEANS_OF_ELEMENTS = frozenset(  # with a ``reduction``: 0 none, 1 mean, 2 sum (aten/src/ATen/core/Reduction.h)
    {
        "MseLossBackward0",
        "SmoothL1LossBackward0",
        "HuberLossBackward0",
        "BinaryCrossEntropyBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
        "SoftMarginLossBackward0",
        "KlDivBackward0",
    }
)
_MEANS_OF_ROWS = frozenset({"MultiMarginLossBackward0", "MultilabelMarginLossBackward0"})
LIKELIHOODS = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_CHOICES = frozenset({"IndexBackward0", "MaskedSelectBackward0", "IndexSelectBackward0"})
_OF_PARAMETERS = (  # elementwise, of shape, or products; every tensor that they take is seen as a following node
    _SUMS
    | SAME_VALUES
    | frozenset(
        {
            "AbsBackward0",
            "CatBackward0",
            "ClampBackward0",
            "ClampMinBackward0",
            "DivBackward0",
            "DivBackward1",
            "ExpBackward0",
            "LinalgVectorNormBackward0",
            "LogBackward0",
            "MeanBackward0",
            "MeanBackward1",
            "MmBackward0",
            "MulBackward0",
            "MulBackward1",
            "NormBackward0",
            "NormBackward1",
            "PowBackward0",
            "ReluBackward0",
            "SigmoidBackward0",
            "SelectBackward0",
            "SliceBackward0",
            "SoftplusBackward0",
            "SqrtBackward0",
            "StackBackward0",
            "SumBackward0",
            "SumBackward1",
            "TanhBackward0",
        }
    )
)
_MOST_OF_PARAMETERS = 64  # nodes of one penalty; more are a model
_MAX_GRAPH_NODES = 4096  # of all terms: penalties on the weights of some hundred layers
_SCANNED = 12  # nodes below a reduction that are looked at for masks and shapes
_VARIES = 1e-4  # relative difference from which totals of rows are unlike, beyond rounding in fp32 and softmax
_LEAF = "torch::autograd::AccumulateGrad"
# Modules whose hooks on saved tensors can be run before the backward: `torch.autograd.graph.save_on_cpu`, and
# checkpoints without reentrance.
_READABLE_HOOKS = ("torch.autograd.graph", "torch.utils.checkpoint")
RATIO = "_RatioBackward"  # of `ds_hetero.runtime.loss.ratio`


class Weights(NamedTuple):
    """A tensor without gradients that elements of a sum or mean are multiplied with."""

    total: float
    elements: int
    is_mask: bool  # of zeros and ones alone
    varies: bool  # between rows of the first axis, by their totals


@dataclass(kw_only=True)
class Term:
    """A term of a loss: ``factor`` times a sum over ``count``.

    Attributes:
        path: names of the nodes from the loss to the reduction, the same on ranks whose losses are made alike.
        kind: ``"mean"``: divided by ``count``, which its node says; ``"sum"``: not divided, but by what ``factor`` has;
            ``"common"``: of parameters alone.
        factor: product of the numbers that the term is multiplied with and divided by.
        has_factor: there were such numbers.
        extra: product of numbers that one process does not multiply with.
        of_elements: ``count`` is the number of elements of a tensor, of which ``inner`` are the sizes but the first.
        is_chosen: of elements that were chosen by a mask or by indices.
        divisors: of ``factor``, the numbers that the term is divided by.
        is_empty: of a sum: no element counts, whatever it is divided by.
        weights: what elements are multiplied with.
        fingerprint: of constants in a term of parameters, which must be equal on all ranks.
    """

    path: str
    kind: Literal["mean", "sum", "common"]
    count: float = 1.0
    factor: float = 1.0
    has_factor: bool = False
    extra: float = 1.0
    of_elements: bool = False
    is_chosen: bool = False
    divisors: tuple[float, ...] = ()
    is_empty: bool = False
    inner: tuple[int, ...] = ()
    weights: Weights | None = None
    fingerprint: float = 0.0


@dataclass(kw_only=True)
class LossTerms:
    """The terms of a loss on this rank.

    Attributes:
        nodes: by term, the node whose gradient is that of the term.
        zero_divisions: nodes that divide by zero, whose gradient is not a number.
        linear: nodes of the means, sums and multiples that terms are.
        problem: why it is no sum of such terms; None where it is.
    """

    terms: list[Term] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    zero_divisions: list[Node] = field(default_factory=list)
    linear: set[Node] = field(default_factory=set)
    problem: str | None = None


class _Unreadable(Exception):
    """The loss is not a sum of means, sums and terms of parameters."""


@dataclass(frozen=True)
class _Way:
    """Path from the loss to a node."""

    names: tuple[str, ...] = ()
    factor: float = 1.0
    has_factor: bool = False
    divisors: tuple[float, ...] = ()
    extra: float = 1.0
    outer: Node | None = None  # the topmost product with a factor that is trained

    def through(self, node: Node, factor: float = 1.0) -> _Way:
        """Return the way on, below a multiplication by a number."""
        return replace(
            self,
            names=(*self.names, node.name()),
            factor=self.factor * factor,
            has_factor=self.has_factor or abs(factor) != 1,
        )

    def divided(self, node: Node, number: float) -> _Way:
        """Return the way on, below a division by a number."""
        return replace(
            self,
            names=(*self.names, node.name()),
            factor=self.factor * (1 / number if number else math.inf),
            has_factor=True,
            divisors=(*self.divisors, number),
        )


_identities: set[str] = set()  # names of nodes of a framework's own functions whose results are their inputs


def note_identities(functions: Iterable[str]) -> None:
    """Let the walk pass functions of autograd, by their names, that return what they are given."""
    _identities.update(f"{function}Backward" for function in functions)


def is_identity(node: Node) -> bool:
    """Whether `note_identities` has named a node."""
    return node.name() in _identities


def read_terms(loss: Tensor, rows: int, of_trainer: Collection[Node] = ()) -> LossTerms:
    """Read what a loss is made of.

    Args:
        loss: a scalar with a graph.
        rows: samples of the batch that it is of.
        of_trainer: nodes of multiplications by the number of ranks, which one process does not do.
    """
    read = LossTerms()
    if loss.grad_fn is None:
        read.problem = "has no gradient"
        return read
    todo = [(loss.grad_fn, _Way())]
    seen = 0
    try:
        while todo:
            node, way = todo.pop()
            seen += 1
            if seen > _MAX_GRAPH_NODES:
                raise _Unreadable(f"has more than {_MAX_GRAPH_NODES} additions and multiplications")
            todo.extend(reversed(list(_visit(node, way, read, rows, of_trainer))))
    except _Unreadable as found:
        read.problem = str(found)
    return read


def _visit(
    node: Node, way: _Way, read: LossTerms, rows: int, of_trainer: Collection[Node]
) -> Iterator[tuple[Node, _Way]]:
    """Yield the nodes below one whose result is a scalar; a reduction is added to ``read``."""
    name = node.name()
    if name in _SUMS or name in SAME_VALUES or is_identity(node):
        yield from ((below, way.through(node)) for below in _below(node))
    elif name in _PRODUCTS:
        if (common := _common(node)) is not None:
            _add(read, node, way, Term(path="", kind="common", fingerprint=common))
            return
        yield _through_number(node, way, read, of_trainer)
    elif (scalar := _of_one_scalar(node)) is not None:
        yield scalar, way.through(node)
    elif (parts := _vector_of_scalars(node)) is not None:
        share = 1 / len(parts) if name == "MeanBackward0" else 1.0
        yield from ((part, way.through(node, share)) for part in parts)
    elif (common := _common(node)) is not None:
        _add(read, node, way, Term(path="", kind="common", fingerprint=common))
    else:
        _add(read, node, way, _reduction(node, read, rows))


def _add(read: LossTerms, node: Node, way: _Way, term: Term) -> None:
    term.path = "/".join((*way.names, node.name()))
    term.factor *= way.factor
    term.has_factor |= way.has_factor
    term.divisors = (*way.divisors, *term.divisors)
    term.extra = way.extra
    read.terms.append(term)
    read.nodes.append(way.outer or node)


def _through_number(node: Node, way: _Way, read: LossTerms, of_trainer: Collection[Node]) -> tuple[Node, _Way]:
    """Return the node below a product with, or a division by, a number or a trained factor."""
    first, second = (*(below for below, _ in node.next_functions), None)[:2]
    is_division = node.name().startswith("Div")
    kept: Node | None
    if first is not None and second is not None:
        trained = _of_parameters(second), not is_division and _of_parameters(first)
        if not any(trained):
            what = "a ratio whose denominator has gradients, as Dice" if is_division else "a product of two terms"
            raise _Unreadable(f"is {what} ({node.name()}): no sum over samples divided by their number")
        kept = first if trained[0] else second
        number = _number(_saved(node, "other" if trained[0] else "self"))
        way = replace(way, outer=way.outer or node)
    elif first is None and is_division:
        raise _Unreadable(f"divides by a mean or a sum over the batch ({node.name()})")
    else:
        kept = first if first is not None else second
        number = _number(_saved(node, "other" if first is not None else "self"))
    assert kept is not None
    if any(node is other for other in of_trainer):
        return kept, replace(way, names=(*way.names, node.name()), extra=way.extra * number)
    if not is_division:
        return kept, way.through(node, number)
    if number == 0:
        read.zero_divisions.append(node)
    return kept, way.divided(node, number)


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _below(node: Node) -> list[Node]:
    return [below for below, _ in node.next_functions if below is not None]


def _shape(node: Node, index: int = 0) -> tuple[int, ...]:
    """Return the shape of a result of a node."""
    metadata: Any = node._input_metadata
    return tuple(int(size) for size in metadata[index].shape) if len(metadata) > index else ()


def _of_one_scalar(node: Node) -> Node | None:
    """Return the node of the scalars that a sum or mean over one number is made of; None for any other.

    A loss of shape [1] comes of a learned weight of that shape. One sample's losses have it too, but are made of no
    scalar of shape [].
    """
    if node.name() not in ("SumBackward0", "MeanBackward0"):
        return None
    saved: Any = node
    if math.prod(saved._saved_self_sym_sizes) != 1:
        return None
    top = node.next_functions[0][0]
    todo: list[Node | None] = [top]
    seen: set[Node] = set()
    while todo and len(seen) < _SCANNED:
        one = todo.pop()
        if one is None or one in seen or one.name() == _LEAF or math.prod(_shape(one)) != 1:
            continue
        seen.add(one)
        if not _shape(one) and not _of_parameters(one, []):
            return top
        todo += _below(one)
    return None


def _vector_of_scalars(node: Node) -> list[Node] | None:
    """The scalars of a sum or mean over a stack of them, each perhaps with a weight of its own; None of any other."""
    if node.name() not in ("SumBackward0", "MeanBackward0", "SumBackward1"):
        return None
    below = node.next_functions[0][0]
    while below is not None and below.name() in ("MulBackward0", "DivBackward0", *SAME_VALUES):
        following = _below(below)
        if len(following) != 1:
            return None
        below = following[0]
    if below is None or below.name() not in ("StackBackward0", "CatBackward0"):
        return None
    parts = _below(below)
    return parts if all(math.prod(_shape(part)) == 1 for part in parts) else None


def _common(node: Node) -> float | None:
    """Return a fingerprint of the constants in a term of parameters alone; None: it is another."""
    constants: list[float] = []
    return sum(constants) if _of_parameters(node, constants) else None


def may_be_of_parameters(node: Node) -> bool:
    """Whether a sum or mean may be of parameters and numbers alone; reads nothing that nodes keep.

    Operands without gradients are taken for numbers, but those of matrix products, which are data.
    """
    starts = _below(node) if node.name() in MEANS_OF_ELEMENTS else [node]  # a distance from earlier weights
    _, are_alone = _operations_of_parameters(starts)
    return are_alone


def _of_parameters(node: Node, constants: list[float] | None = None) -> bool:
    """Whether a result is made of parameters and numbers alone.

    Args:
        constants: is given the numbers in it, and a total of every difference from a tensor without gradients; left
            out, there may be no such difference.
    """
    # Operations are looked at before what nodes keep, of which activations are part.
    operations, are_alone = _operations_of_parameters([node])
    if any(map(_is_made_of_no_elements, operations)):
        raise _Unreadable(_PARTITIONED)
    if not are_alone:
        return False
    todo: list[Node] = [node]
    seen: set[Node] = set()
    while todo:
        one: Any = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.name() == _LEAF:
            if _is_partitioned(one):
                raise _Unreadable(_PARTITIONED)
            continue
        for following in _operands(one):
            if following is not None:
                todo.append(following)
            elif not _is_number(one) and (constants is None or one.name() not in _SUMS):
                return False
        if constants is not None and None in _operands(one) and one.name().startswith(("Mul", "Div")):
            constants.append(_number(_saved(one, "other" if _operands(one)[0] is not None else "self")))
        if constants is not None and one.name() in ("PowBackward0", "AbsBackward0"):
            if any(below.name() in _SUMS for below in _below(one)):
                constants.append(float(_saved(one, "self").detach().double().sum()))
        elif one.name() in ("MulBackward0", "AddBackward0", "SubBackward0") and not _pairs_alike(one):
            return False
    differences = [one for one in seen if one.name() in _SUMS and None in _operands(one) and math.prod(_shape(one)) > 1]
    saved = [below for one in seen if one.name() in ("PowBackward0", "AbsBackward0") for below in _below(one)]
    return all(one in saved for one in differences)


def _operations_of_parameters(starts: Iterable[Node]) -> tuple[set[Node], bool]:
    """Return the nodes of operations that lead to parameters, and whether nothing else is reached from ``starts``.

    Nothing that nodes keep is read. Beyond an operation that leads to none, such as a layer, nothing is looked at.
    """
    todo = [*starts]
    operations: set[Node] = set()
    are_alone = True
    while todo:
        one = todo.pop()
        if one in operations or one.name() == _LEAF:
            continue
        is_product_with_data = one.name() == "MmBackward0" and None in _operands(one)
        if is_product_with_data or (one.name() not in _OF_PARAMETERS and not is_identity(one)):
            are_alone = False
            continue
        if len(operations) == _MOST_OF_PARAMETERS:
            return operations, False
        operations.add(one)
        todo += _below(one)
    return operations, are_alone


def _is_made_of_no_elements(node: Node) -> bool:
    """Whether a result is made of a partitioned parameter while it was partitioned.

    Within the forward of their module parameters are whole, and so are the shapes of what it makes of them. What the
    script itself reads, before or after it, has no elements.
    """
    return _shape(node) == (0,) and any(map(_is_partitioned, _below(node)))


_PARTITIONED = (
    "has a term of parameters that ZeRO-3 has partitioned; make it in the forward of their module, or inside "
    "deepspeed.zero.GatheredParameters"
)


def _is_partitioned(node: Any) -> bool:
    """Whether a node is a parameter whose elements ZeRO-3 has on other ranks, too."""
    return node.name() == _LEAF and hasattr(node.variable, "ds_id") and not node.variable.numel()


def _operands(node: Node) -> list[Node | None]:
    return [below for below, _ in node.next_functions]


def _is_number(node: Any) -> bool:
    """Whether the operand of a node that has no gradient is a number."""
    for name in ("other", "self"):
        value = _saved(node, name) if hasattr(node, f"_raw_saved_{name}") else getattr(node, f"_saved_{name}", None)
        if isinstance(value, int | float):
            return True
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
            return True
    return node.name() in _SUMS and math.prod(_shape(node)) == 1


def _pairs_alike(node: Node) -> bool:
    """Whether no operand of a node is spread over another, as data of a batch over a parameter would be."""
    size = math.prod(_shape(node))
    return any(math.prod(_shape(below)) == size for below in _below(node))


def _reduction(node: Node, read: LossTerms, rows: int) -> Term:
    """Return the mean or sum that a node is. Raises `_Unreadable`: it is another."""
    saved: Any = node
    name = node.name()
    if name == RATIO:
        return Term(path="", kind="mean", count=float(saved.unit))
    if name in LIKELIHOODS and saved._saved_reduction in (1, 2):
        if saved._saved_reduction == 1:
            return Term(path="", kind="mean", count=float(total_weight(saved, _saved)))
        return Term(path="", kind="sum", is_empty=float(_saved(node, "total_weight")) == 0)
    if name in MEANS_OF_ELEMENTS and saved._saved_reduction in (1, 2):
        sizes = _shape_of_operand(node)
        if saved._saved_reduction == 1:
            return _of_elements(node, math.prod(sizes), sizes, rows)
        return Term(path="", kind="sum", is_empty=not math.prod(sizes))
    if name in _MEANS_OF_ROWS and saved._saved_reduction in (1, 2):
        sizes = _shape_of_operand(node)
        count = sizes[0] if len(sizes) > 1 else 1
        return Term(path="", kind="mean" if saved._saved_reduction == 1 else "sum", count=float(count))
    if name in ("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1"):
        return _linear(node, read, rows)
    raise _Unreadable(
        f"has a term that ends in {name}, which is not known to be a sum over samples, or such a sum divided by their "
        "number"
    )


def _shape_of_operand(node: Node) -> tuple[int, ...]:
    """Of what a loss by element was made of: of its operands, which have one shape, one that has gradients."""
    below, index = next((one, index) for one, index in node.next_functions if one is not None)
    return _shape(below, index)


def _saved(node: Any, name: str) -> Any:
    """What a node keeps for its backward, a tensor or a number. Raises `_Unreadable`: hooks may give it but once."""
    hook = getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None)
    owner = getattr(hook, "__module__", None) or str(hook)
    if hook is not None and owner not in _READABLE_HOOKS:
        raise _Unreadable(
            f"is made of tensors ({node.name()}) that hooks of {owner} keep for the backward, as activation offloading "
            "does, so that what it is divided by cannot be read; compute it outside of these hooks"
        )
    return getattr(node, f"_saved_{name}")


def total_weight(node: Any, saved: Callable[[Any, str], Any]) -> Tensor:
    """[] in float64 on the device, without a wait: weights of the labels of a likelihood's mean that count.

    They are counted again where the node has rounded them to a half type.

    Args:
        node: of the likelihood.
        saved: reads what a node keeps, by its name.
    """
    total: Tensor = saved(node, "total_weight")
    if total.element_size() >= 4:
        return total.double()
    ignored = node._saved_ignore_index  # unsigned in the node: -100 is 2^64 - 100
    labels: Tensor = saved(node, "target")
    counts = labels.ne(ignored - 2**64 if ignored >= 2**63 else ignored)
    weight: Tensor | None = saved(node, "weight")
    if weight is None:
        return counts.sum().double()
    # Any index of a label that does not count: picking those that do would wait for the device.
    return (weight.double()[labels.masked_fill(~counts, 0)] * counts).sum()


def _of_elements(node: Node, count: float, sizes: tuple[int, ...], rows: int) -> Term:
    is_chosen, inner = False, sizes[1:] if sizes and sizes[0] == rows else ()
    for below in _chain(node):
        shape = _shape(below)
        is_chosen |= below.name() in _CHOICES
        if not inner and not is_chosen and len(shape) > 1 and shape[0] == rows:
            inner = shape[1:]
    return Term(path="", kind="mean", count=float(count), of_elements=True, is_chosen=is_chosen, inner=inner)


def _chain(node: Node) -> Iterator[Node]:
    """Yield the nodes below, by their first operands."""
    below = next(iter(_below(node)), None)
    for _ in range(_SCANNED):
        if below is None or below.name() == _LEAF:
            return
        yield below
        below = next(iter(_below(below)), None)


def _linear(node: Node, read: LossTerms, rows: int) -> Term:
    """Read a mean or sum over means, sums and multiples by numbers."""
    count, way = 1.0, _Way()
    weights: Weights | None = None
    averages, sums_rows = False, False  # over the first axis, or over all
    is_empty = False
    sizes: tuple[int, ...] = ()
    top: Node = node
    one: Any = node
    while True:
        name = one.name()
        if name in ("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1"):
            sizes = tuple(int(size) for size in one._saved_self_sym_sizes)
            dims = range(len(sizes)) if name.endswith("0") else [_axis(dim, len(sizes)) for dim in one._saved_dim]
            dims = list(dims) or list(range(len(sizes)))
            is_empty |= 0 in sizes
            if name.startswith("Mean"):
                count *= math.prod(sizes[dim] for dim in dims)
                averages |= 0 in dims or not sizes
            elif 0 in dims:
                sums_rows, averages = True, averages and one is node
        elif name in _PRODUCTS:
            value = _constant(one)
            if value is None:
                break
            if isinstance(value, Weights):
                weights, is_empty = value, is_empty or (value.is_mask and value.total == 0)
            elif name.startswith("Div"):
                way = way.divided(one, value)
            else:
                way = way.through(one, value)
        elif name not in SAME_VALUES and not is_identity(one):
            break
        read.linear.add(one)
        top = one
        following = _below(one)
        if len(following) != 1:
            break
        one = following[0]
    if sums_rows and node.name().startswith("Mean") and not _averages_rows_below(node):
        averages = False
    if averages and sums_rows:
        raise _Unreadable(f"sums and averages over the first axis ({node.name()})")
    if averages:
        term = _of_elements(top, count, sizes, rows)
        term.factor, term.has_factor, term.divisors = way.factor, way.has_factor, way.divisors
        term.weights = weights
        return term
    is_chosen = False
    for below in _chain(top):
        is_chosen |= below.name() in _CHOICES
        is_empty |= 0 in _shape(below)
        if below.name() == "WhereBackward0":
            is_empty |= not bool(_saved(below, "condition").any())
        elif below.name() == "MaskedFillBackward0":
            is_empty |= bool(_saved(below, "mask").all())
    return Term(
        path="",
        kind="sum",
        factor=way.factor / (count or 1.0),
        has_factor=way.has_factor,
        divisors=way.divisors,
        is_chosen=is_chosen,
        is_empty=is_empty,
        weights=weights,
    )


def _averages_rows_below(node: Node) -> bool:
    """Whether a mean of all elements is of a mean over the first axis, and not of a sum over it."""
    for below in _chain(node):
        saved: Any = below
        if below.name() in ("MeanBackward1", "SumBackward1"):
            dims = [_axis(dim, len(saved._saved_self_sym_sizes)) for dim in saved._saved_dim]
            if 0 in dims:
                return below.name() == "MeanBackward1"
    return True


def _axis(dim: int, dims: int) -> int:
    """Return an axis as a number >= 0; nodes keep -1 as 2**64 - 1."""
    dim = dim - 2**64 if dim >= 2**63 else dim
    return dim % dims if dims else 0


def _constant(node: Any) -> float | Weights | None:
    """Return the number that multiplies or divides a result, where it has no gradients; None where none does."""
    operands = _operands(node)
    is_division = node.name().startswith("Div")
    if len([one for one in operands if one is not None]) != 1 or (is_division and operands[0] is None):
        return None
    value = _saved(node, "other" if operands[0] is not None else "self")
    # Of a rank with one sample the weights of samples are one number, too, as many as there are results.
    if not isinstance(value, Tensor) or (value.numel() == 1 and (not value.dim() or math.prod(_shape(node)) > 1)):
        return _number(value)
    if is_division:
        return None
    value = value.detach()
    is_mask = value.dtype == torch.bool or bool(((value == 0) | (value == 1)).all())
    by_row = value.double().reshape(value.shape[0], -1).sum(1) if value.numel() else value.double()
    varies = bool(by_row.numel() and by_row.max() - by_row.min() > _VARIES * by_row.abs().max())
    return Weights(float(by_row.sum()), value.numel(), is_mask, varies)


def on_nodes(read: LossTerms, factors: list[float]) -> list[Callable[[], None]]:
    """Multiply the gradient of every term by its factor when the backward comes by; return what takes that back."""
    handles = []
    by_node: dict[Node, float] = {}
    for node, factor in zip(read.nodes, factors, strict=True):
        by_node.setdefault(node, factor)

    def multiply(factor: float) -> Callable[..., tuple[Tensor | None, ...]]:
        return lambda grads: tuple(None if grad is None else grad * factor for grad in grads)

    for node, factor in by_node.items():
        if factor != 1:
            handles.append(node.register_prehook(multiply(factor)))
        if factor == 0:
            handles.append(node.register_hook(_zeros))
    return [*(handle.remove for handle in handles), *no_nans(read)]


def no_nans(read: LossTerms) -> list[Callable[[], None]]:
    """Let divisions by zero have no gradient; return what takes that back."""
    return [node.register_hook(_zeros).remove for node in read.zero_divisions]


def _zeros(grad_inputs: tuple[Tensor | None, ...], grad_outputs: object) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grad_inputs)
