"""Recognize terms of a loss that are made of parameters and numbers alone, such as a penalty on weights.

Such a term is the same on all ranks, as long as its numbers are. Example: 0.1 * sum(p.square().sum()) is one. So is the
squared distance (p - p_0).square().sum() from earlier weights p_0, which are a tensor without a gradient; here a total
of p - p_0 stands for the number, and must be the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from ds_hetero.runtime.data.graph_nodes import (
    ELEMENT_LOSSES,
    LEAF,
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

# Elementwise, of shape, reductions, or products; every tensor that they take is one of their operands.
_OPERATIONS = (
    SUMS
    | SAME_VALUES
    | frozenset(
        {
            "AbsBackward0",
            "AmaxBackward0",
            "AminBackward0",
            "CatBackward0",
            "ClampBackward0",
            "ClampBackward1",
            "ClampMaxBackward0",
            "ClampMinBackward0",
            "CosBackward0",
            "DivBackward0",
            "DivBackward1",
            "ErfBackward0",
            "ExpBackward0",
            "Expm1Backward0",
            "GeluBackward0",
            "LinalgVectorNormBackward0",
            "Log10Backward0",
            "Log1PBackward0",
            "Log2Backward0",
            "LogBackward0",
            "LogSigmoidBackward0",
            "LogSoftmaxBackward0",
            "LogsumexpBackward0",
            "MaxBackward0",
            "MaxBackward1",
            "MeanBackward0",
            "MeanBackward1",
            "MedianBackward0",
            "MinBackward0",
            "MinBackward1",
            "MmBackward0",
            "MulBackward0",
            "MulBackward1",
            "NormBackward0",
            "NormBackward1",
            "PowBackward0",
            "ProdBackward0",
            "ProdBackward1",
            "ReciprocalBackward0",
            "ReluBackward0",
            "RsqrtBackward0",
            "SelectBackward0",
            "SigmoidBackward0",
            "SiluBackward0",
            "SinBackward0",
            "SliceBackward0",
            "SoftmaxBackward0",
            "SoftplusBackward0",
            "SqrtBackward0",
            "StackBackward0",
            "StdBackward0",
            "StdMeanBackward0",
            "SumBackward0",
            "SumBackward1",
            "TanhBackward0",
            "VarBackward0",
            "VarMeanBackward0",
        }
    )
)
_DISTANCES = ("PowBackward0", "AbsBackward0")  # of a difference from a tensor without a gradient
_MAX_OPERATIONS = 64  # in one penalty; a graph with more is that of a model

_PARTITIONED = (
    "has a term of parameters that ZeRO-3 has partitioned; make it in the forward of their module, or inside "
    "deepspeed.zero.GatheredParameters"
)


def parameter_fingerprint(node: Node) -> float | None:
    """Return a fingerprint of the constants in a term of parameters alone; None for any other term."""
    constants: list[float] = []
    return sum(constants) if is_of_parameters(node, constants) else None


def may_be_of_parameters(node: Node) -> bool:
    """Whether a sum or mean may be one of parameters and numbers alone; reads nothing that nodes have saved.

    Takes operands without a gradient for numbers, except in matrix products, where they are data.
    """
    # A distance from earlier weights is an element loss whose first operand is the parameter.
    starts = trained_operands(node) if node.name() in ELEMENT_LOSSES else [node]
    _, are_alone = _parameter_operations(starts)
    return are_alone


def is_of_parameters(node: Node, constants: list[float] | None = None) -> bool:
    """Whether a result is made of parameters and numbers alone.

    Args:
        constants: gets the numbers in the term, and a total of each difference from a tensor without a gradient. If
            left out, a term with such a difference is not one of parameters alone.

    Raises:
        UnreadableLossError: ZeRO-3 has partitioned one of the parameters.
    """
    # Look at operations before any saved tensor is read, since activations may be among these.
    operations, are_alone = _parameter_operations([node])
    if any(map(_has_lost_its_elements, operations)):
        raise UnreadableLossError(_PARTITIONED)
    if not are_alone:
        return False
    todo: list[Node] = [node]
    seen: set[Node] = set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.name() == LEAF:
            if _is_partitioned(current):
                raise UnreadableLossError(_PARTITIONED)
            continue
        for operand in operands(current):
            if operand is not None:
                todo.append(operand)
            elif not _has_number(current) and (constants is None or current.name() not in SUMS):
                return False
        if constants is not None:
            constants += _constants_of(current)
        is_elementwise = current.name() in ("MulBackward0", "AddBackward0", "SubBackward0")
        if is_elementwise and not _has_operand_of_same_size(current):
            return False
    return _are_all_differences_in_distances(seen)


def _constants_of(node: Node) -> list[float]:
    """Return the number in a product or quotient, and the total of a difference whose power or absolute value it is."""
    constants = []
    if None in operands(node) and node.name().startswith(("Mul", "Div")):
        constants.append(as_number(read_saved(node, "other" if operands(node)[0] is not None else "self")))
    if node.name() in _DISTANCES and any(operand.name() in SUMS for operand in trained_operands(node)):
        constants.append(float(read_saved(node, "self").detach().double().sum()))
    return constants


def _are_all_differences_in_distances(nodes: set[Node]) -> bool:
    """Whether each difference of several elements from a constant tensor is the operand of a power or absolute value.

    Only then its total is among the constants, so that it is compared between ranks.
    """
    in_distances = []
    for node in nodes:
        if node.name() in _DISTANCES:
            in_distances += trained_operands(node)
    for node in nodes:
        is_difference = node.name() in SUMS and None in operands(node) and math.prod(shape_of(node)) > 1
        if is_difference and node not in in_distances:
            return False
    return True


def _parameter_operations(starts: Iterable[Node]) -> tuple[set[Node], bool]:
    """Return the nodes of operations that may lead to parameters, and whether ``starts`` lead to nothing else.

    Reads nothing that nodes have saved. The walk ends at an operation that is not in `_OPERATIONS`, such as a layer.
    """
    todo = [*starts]
    operations: set[Node] = set()
    are_alone = True
    while todo:
        node = todo.pop()
        if node in operations or node.name() == LEAF:
            continue
        is_product_with_data = node.name() == "MmBackward0" and None in operands(node)
        if is_product_with_data or (node.name() not in _OPERATIONS and not is_identity(node)):
            are_alone = False
            continue
        if len(operations) == _MAX_OPERATIONS:
            return operations, False
        operations.add(node)
        todo += trained_operands(node)
    return operations, are_alone


def _has_lost_its_elements(node: Node) -> bool:
    """Whether a result was computed from a parameter that ZeRO-3 had partitioned, so that it has no elements.

    In the forward of their module parameters are gathered, and results of them have their shapes. A script that uses
    parameters before or after that forward sees tensors without elements.
    """
    return shape_of(node) == (0,) and any(map(_is_partitioned, trained_operands(node)))


def _is_partitioned(node: Any) -> bool:
    """Whether a node is the leaf of a parameter whose elements ZeRO-3 has spread over the ranks."""
    return node.name() == LEAF and hasattr(node.variable, "ds_id") and not node.variable.numel()


def _has_number(node: Any) -> bool:
    """Whether a node has an operand without a gradient that is a number, or a tensor of one element.

    Additions do not save their operands: for these, whether the result has one element.
    """
    for name in ("other", "self"):
        has_raw = hasattr(node, f"_raw_saved_{name}")
        value = read_saved(node, name) if has_raw else getattr(node, f"_saved_{name}", None)
        if isinstance(value, int | float):
            return True
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
            return True
    return node.name() in SUMS and math.prod(shape_of(node)) == 1


def _has_operand_of_same_size(node: Node) -> bool:
    """Whether an operand is as large as the result, so that it is not broadcast over data of a batch."""
    size = math.prod(shape_of(node))
    return any(math.prod(shape_of(operand)) == size for operand in trained_operands(node))
