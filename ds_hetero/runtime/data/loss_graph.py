"""Read the terms of a scalar loss from its autograd graph: for each, whether it is a mean or a sum, and its divisor.

    read_terms(F.cross_entropy(logits, labels, weight=w) + 0.1 * boxes.sum() / num_boxes)
        # a mean over 11.0, the weights of the labels that count; and a sum times 0.1 divided by num_boxes, 6

A loss is a sum of terms, each a sum over a batch divided by a number: of its elements, of labels that count, of the
weights of their classes, of boxes. PyTorch's nodes save that number: ``total_weight`` of a negative log-likelihood, the
sizes of a mean, the denominator of a division. So `read_terms` walks from the loss down through additions and
multiplications by numbers, to the reductions over the batch (`loss_reductions`). The walk sees a few dozen nodes, never
the model.

A term of parameters alone, such as a penalty on weights, is the same on all ranks (`parameter_terms`). A loss with any
other term cannot be read: the root of a mean, a ratio whose denominator has gradients as that of Dice, an operation
that is not listed. The reason names the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ds_hetero.runtime.data.graph_nodes import (
    LEAF,
    MAX_SCANNED_NODES,
    PRODUCTS,
    SAME_VALUES,
    SUMS,
    UnreadableLossError,
    as_number,
    is_identity,
    operands,
    read_saved,
    shape_of,
    trained_operands,
)
from ds_hetero.runtime.data.loss_reductions import GraphPath, Term, read_reduction
from ds_hetero.runtime.data.parameter_terms import is_of_parameters, parameter_fingerprint

_MAX_GRAPH_NODES = 4096  # of all terms: penalties on the weights of some hundred layers


@dataclass(kw_only=True)
class LossTerms:
    """The terms of a loss on this rank.

    Attributes:
        nodes: for each term, the node whose gradient is multiplied to weigh the term.
        zero_divisions: nodes that divide by zero, whose gradient is not a number.
        linear: the means, sums and products of which the reductions consist.
        problem: why the loss is not a sum of such terms; None if it is.
    """

    terms: list[Term] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    zero_divisions: list[Node] = field(default_factory=list)
    linear: set[Node] = field(default_factory=set)
    problem: str | None = None

    def add(self, node: Node, path: GraphPath, term: Term) -> None:
        """Add the term that ``node`` computes; ``path`` leads to the node."""
        term.path = "/".join((*path.names, node.name()))
        term.factor *= path.factor
        term.has_factor |= path.has_factor
        term.divisors = (*path.divisors, *term.divisors)
        term.rank_factor = path.rank_factor
        self.terms.append(term)
        self.nodes.append(path.outer or node)


def read_terms(loss: Tensor, rows: int, rank_products: Collection[Node] = ()) -> LossTerms:
    """Read the terms of a loss; a loss that cannot be read has a ``problem``.

    Args:
        loss: a scalar with a graph.
        rows: samples of the batch from which the loss was computed.
        rank_products: nodes that multiply by the number of ranks, which one process would not do.
    """
    terms_of_loss = LossTerms()
    if loss.grad_fn is None:
        terms_of_loss.problem = "has no gradient"
        return terms_of_loss
    todo = [(loss.grad_fn, GraphPath())]
    num_nodes = 0
    try:
        while todo:
            node, path = todo.pop()
            num_nodes += 1
            if num_nodes > _MAX_GRAPH_NODES:
                raise UnreadableLossError(f"has more than {_MAX_GRAPH_NODES} additions and multiplications")
            # Reversed, since `todo` is a stack: terms then have the order in which the script added them.
            todo.extend(reversed(list(_visit(node, path, terms_of_loss, rows, rank_products))))
    except UnreadableLossError as error:
        terms_of_loss.problem = str(error)
    return terms_of_loss


def _visit(
    node: Node, path: GraphPath, terms_of_loss: LossTerms, rows: int, rank_products: Collection[Node]
) -> Iterator[tuple[Node, GraphPath]]:
    """Yield the nodes below a node with a scalar result, and their paths; add a reduction to ``terms_of_loss``."""
    name = node.name()
    if name in SUMS or name in SAME_VALUES or is_identity(node):
        yield from ((operand, path.below(node)) for operand in trained_operands(node))
    elif name in PRODUCTS:
        if (fingerprint := parameter_fingerprint(node)) is not None:
            terms_of_loss.add(node, path, Term(kind="common", fingerprint=fingerprint))
            return
        yield _below_product(node, path, terms_of_loss, rank_products)
    elif (scalar := _scalar_below(node)) is not None:
        yield scalar, path.below(node)
    elif (scalars := _stacked_scalars(node)) is not None:
        share = 1 / len(scalars) if name == "MeanBackward0" else 1.0  # torch.stack(losses).mean()
        yield from ((part, path.below(node, share)) for part in scalars)
    elif (fingerprint := parameter_fingerprint(node)) is not None:
        terms_of_loss.add(node, path, Term(kind="common", fingerprint=fingerprint))
    else:
        terms_of_loss.add(node, path, read_reduction(node, rows, terms_of_loss.linear))


def _below_product(
    node: Node, path: GraphPath, terms_of_loss: LossTerms, rank_products: Collection[Node]
) -> tuple[Node, GraphPath]:
    """Return the node below a product or quotient of a term and a number or trained factor, and its path."""
    term, number, has_trained_factor = _term_and_number(node)
    if has_trained_factor:
        path = replace(path, outer=path.outer or node)
    if any(node is product for product in rank_products):
        return term, replace(path, names=(*path.names, node.name()), rank_factor=path.rank_factor * number)
    if not node.name().startswith("Div"):
        return term, path.below(node, number)
    if number == 0:
        terms_of_loss.zero_divisions.append(node)
    return term, path.below_division(node, number)


def _term_and_number(node: Node) -> tuple[Node, float, bool]:
    """Split a product or quotient: return its operand that is a term, the other operand's value, and its kind.

    The kind is True if the other operand is trained, such as a learned weight; False for a plain number.

    Raises:
        UnreadableLossError: both operands are terms, or the term is the denominator.
    """
    first, second = (*operands(node), None)[:2]
    is_division = node.name().startswith("Div")
    if first is not None and second is not None:
        is_second_trained = is_of_parameters(second)
        is_first_trained = not is_division and is_of_parameters(first)
        if is_second_trained:
            return first, as_number(read_saved(node, "other")), True
        if is_first_trained:
            return second, as_number(read_saved(node, "self")), True
        what = "a ratio whose denominator has gradients, as Dice" if is_division else "a product of two terms"
        raise UnreadableLossError(f"is {what} ({node.name()}): no sum over samples divided by their number")
    if first is not None:
        return first, as_number(read_saved(node, "other")), False
    if is_division:
        raise UnreadableLossError(f"divides by a mean or a sum over the batch ({node.name()})")
    assert second is not None
    return second, as_number(read_saved(node, "self")), False


def _scalar_below(node: Node) -> Node | None:
    """Return the operand of a sum or mean of a single number, if that number is a loss of shape [1]; else None.

    A loss has shape [1] if a scalar, of shape [], was multiplied by a learned weight of shape [1]. The vector of losses
    of a single sample has that shape as well, but is computed from no scalar.
    """
    if node.name() not in ("SumBackward0", "MeanBackward0"):
        return None
    saved: Any = node
    if math.prod(saved._saved_self_sym_sizes) != 1:
        return None
    # Search below it, through nodes of one element each, for a node of shape [].
    top = node.next_functions[0][0]
    todo: list[Node | None] = [top]
    seen: set[Node] = set()
    while todo and len(seen) < MAX_SCANNED_NODES:
        current = todo.pop()
        if current is None or current in seen or current.name() == LEAF or math.prod(shape_of(current)) != 1:
            continue
        seen.add(current)
        if not shape_of(current) and not is_of_parameters(current, []):
            return top
        todo += trained_operands(current)
    return None


def _stacked_scalars(node: Node) -> list[Node] | None:
    """Return the scalars of a sum or mean over a stack of them, perhaps weighted; None for any other node."""
    if node.name() not in ("SumBackward0", "MeanBackward0", "SumBackward1"):
        return None
    operand = node.next_functions[0][0]
    while operand is not None and operand.name() in ("MulBackward0", "DivBackward0", *SAME_VALUES):
        following = trained_operands(operand)
        if len(following) != 1:
            return None
        operand = following[0]
    if operand is None or operand.name() not in ("StackBackward0", "CatBackward0"):
        return None
    parts = trained_operands(operand)
    return parts if all(math.prod(shape_of(part)) == 1 for part in parts) else None


def multiply_gradients(terms_of_loss: LossTerms, factors: list[float]) -> list[Callable[[], None]]:
    """Let the backward multiply the gradient of every term by its factor.

    Returns:
        Functions that remove the hooks which do so.
    """
    handles = []
    factor_by_node: dict[Node, float] = {}  # a node that several terms share gets one hook
    for node, factor in zip(terms_of_loss.nodes, factors, strict=True):
        factor_by_node.setdefault(node, factor)

    def multiply(factor: float) -> Callable[..., tuple[Tensor | None, ...]]:
        return lambda grads: tuple(None if grad is None else grad * factor for grad in grads)

    for node, factor in factor_by_node.items():
        if factor != 1:
            handles.append(node.register_prehook(multiply(factor)))
        if factor == 0:  # a gradient below may be infinite, which 0 would not make zero
            handles.append(node.register_hook(_zeros))
    return [*(handle.remove for handle in handles), *zero_nan_gradients(terms_of_loss)]


def zero_nan_gradients(terms_of_loss: LossTerms) -> list[Callable[[], None]]:
    """Let divisions by zero return gradients of zero, not NaN; return functions that remove the hooks."""
    return [node.register_hook(_zeros).remove for node in terms_of_loss.zero_divisions]


def _zeros(grad_inputs: tuple[Tensor | None, ...], grad_outputs: object) -> tuple[Tensor | None, ...]:
    """Replace the gradients that a node returns by zeros."""
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grad_inputs)
