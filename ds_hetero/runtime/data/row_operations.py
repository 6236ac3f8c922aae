"""Find operations in a training loop's loss that let the samples of a batch see each other.

The loop computes a loss from the outputs of a module by a few operations. Those that are known to compute each row of
the first dimension from that row alone are listed here. The first other operation is named, or the first that works
along the first dimension, or that pairs rows by broadcasting, as contrastive losses do. The module itself is probed,
see `sample_probe`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from torch.autograd.graph import Node

from ds_hetero.runtime.data.graph_nodes import LEAF, dim_of, is_identity, operands, shape_of, trained_operands

_ELEMENTWISE_NAMES = """
    Abs Add Clamp ClampMax ClampMin Clone Cos Div Elu Erf Exp Expm1 Gelu Hardtanh LeakyRelu Log Log10 Log1P Log2
    LogSigmoid Logit MaskedFill Maximum Minimum Mul NanToNum NativeDropout Neg Pow Reciprocal Relu Rsqrt Rsub Sgn
    Sigmoid Silu Sin Softplus Sqrt Square Sub Tan Tanh Threshold ToCopy Where Xlogy
"""
_WITH_NUMBERS = (
    "Add Clamp ClampMin ClampMax Div MaskedFill Mul Pow Rsub Sub"  # these take a number in place of a tensor as well
)
_ELEMENTWISE = frozenset(
    [f"{name}Backward0" for name in _ELEMENTWISE_NAMES.split()] + [f"{name}Backward1" for name in _WITH_NUMBERS.split()]
)
_SHAPE_NAMES = """
    Alias AsStrided Contiguous Expand Permute ReshapeAlias Squeeze T Transpose Unsqueeze UnsafeView View
"""
_CHANGES_OF_SHAPE = frozenset(
    [f"{name}Backward0" for name in _SHAPE_NAMES.split()]
    + ["SqueezeBackward1", "SqueezeBackward2", "CopyBackwards", "CopySlices"]
)
_ALONG_A_DIM = {  # and the name under which the node saves the dimensions
    "CumsumBackward0": "dim",
    "CatBackward0": "dim",
    "GatherBackward0": "dim",
    "RollBackward0": "dims",
    "IndexSelectBackward0": "dim",
    "LogSoftmaxBackward0": "dim",
    "LogsumexpBackward0": "dim",
    "LinalgVectorNormBackward0": "dim",
    "MaxBackward0": "dim",
    "MeanBackward1": "dim",
    "MinBackward0": "dim",
    "AmaxBackward0": "dim",
    "AminBackward0": "dim",
    "NormBackward1": "dim",
    "SelectBackward0": "dim",
    "SliceBackward0": "dim",
    "SoftmaxBackward0": "dim",
    "SplitBackward0": "dim",
    "StackBackward0": "dim",
    "StdBackward0": "dim",
    "SumBackward1": "dim",
    "UnbindBackward0": "dim",
    "VarBackward0": "dim",
}
_BY_ROW = frozenset(  # losses that are not reduced, layers, and products of one batch
    {
        "AddmmBackward0",
        "BinaryCrossEntropyBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
        "BmmBackward0",
        "BaddbmmBackward0",
        "ConvolutionBackward0",
        "CtcLossBackward0",
        "CtcLossBackward1",  # lengths stay tensors: under a dispatch mode, and where the next ones run
        "CudnnCtcLossBackward0",
        "CudnnCtcLossBackward1",
        "EmbeddingBackward0",
        "HuberLossBackward0",
        "IndexBackward0",
        "KlDivBackward0",
        "MaskedSelectBackward0",
        "MseLossBackward0",
        "MultiMarginLossBackward0",
        "MultilabelMarginLossBackward0",
        "NativeLayerNormBackward0",
        "NativeGroupNormBackward0",
        "NllLossBackward0",
        "NllLoss2DBackward0",
        "SmoothL1LossBackward0",
        "SoftMarginLossBackward0",
        "MvBackward0",
        "_RatioBackward",
    }
)
_LINEAR = frozenset({"SumBackward0", "MeanBackward0"})
_MAX_ROW_NODES = 2000


def mixing_node(loss: Node, linear: Collection[Node], outputs: Collection[Node], rows: int) -> str | None:
    """Name an operation between a loss and a module's outputs that may let samples see each other; None: there is none.

    Args:
        linear: nodes of sums and means over samples of which the loss consists, see `loss_graph.LossTerms`.
        outputs: nodes that made the module's outputs, at which the search ends.
        rows: samples of the batch.
    """
    todo: list[Node] = [loss]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or node in outputs or node.name() == LEAF:
            continue
        seen.add(node)
        if len(seen) > _MAX_ROW_NODES:
            return f"more than {_MAX_ROW_NODES} operations"
        is_harmless = node in linear or is_identity(node) or math.prod(shape_of(node)) == 1
        problem = None if is_harmless else _problem_of(node, outputs, rows)
        if problem is not None:
            return problem
        todo += trained_operands(node)
    return None


def _problem_of(node: Node, outputs: Collection[Node], rows: int) -> str | None:
    """Name a node that may compute a row from other rows, and say how; None for a node that does not."""
    name = node.name()
    if name in _ELEMENTWISE:
        sizes = [math.prod(shape_of(operand)) for operand in trained_operands(node)]
        # Broadcasting [rows, 1] against [rows] gives [rows, rows]: larger than both.
        pairs_rows = len(sizes) > 1 and math.prod(shape_of(node)) > max(sizes) and min(sizes) > 1
        return f"{name}, which pairs all rows with all" if pairs_rows else None
    if name in _CHANGES_OF_SHAPE or name in _LINEAR or name in _BY_ROW:
        return None
    if name == "MmBackward0":
        factors = operands(node)
        if all(factor is not None and _reaches(factor, outputs) for factor in factors):
            return f"{name}, a product of two outputs of the batch"
        is_by_data = factors[1] is None  # the second factor has no gradient
        is_square = is_by_data and rows > 1 and shape_of(node) == (rows, rows)
        return f"{name}, a product with as many columns as there are samples" if is_square else None
    if name in _ALONG_A_DIM:
        return f"{name} along the first axis" if _works_along_rows(node, rows) else None
    return name


def _works_along_rows(node: Any, rows: int) -> bool:
    """Whether a node of `_ALONG_A_DIM` works along the first dimension of a tensor of samples."""
    name = node.name()
    operand = next(iter(trained_operands(node)), None)
    shape = shape_of(operand) if operand is not None else ()
    if not shape or operand is None:
        return False
    saved = getattr(node, f"_saved_{_ALONG_A_DIM[name]}", None)
    saved_dims = [saved] if isinstance(saved, int) else list(saved or [])
    dims = [dim_of(dim, len(shape)) for dim in saved_dims]
    if dims and 0 not in dims:
        return False
    # These take the first dimension apart or make it, so its size may differ from the number of samples.
    resizes_rows = name in ("StackBackward0", "SplitBackward0", "UnbindBackward0", "CatBackward0", "SliceBackward0")
    if shape[0] != rows and not resizes_rows:
        return False
    if _is_stack_of_scalars(node):
        return False
    is_whole_slice = name == "SliceBackward0" and shape_of(node) == shape
    return not is_whole_slice


def _is_stack_of_scalars(node: Node) -> bool:
    sizes = [math.prod(shape_of(operand)) for operand in trained_operands(node)]
    return node.name() in ("StackBackward0", "CatBackward0") and all(size == 1 for size in sizes)


def _reaches(node: Node, outputs: Collection[Node]) -> bool:
    """Whether a node was computed from one of ``outputs``."""
    todo: list[Node] = [node]
    seen: set[Node] = set()
    while todo:
        current = todo.pop()
        if current in outputs:
            return True
        if current in seen or len(seen) > _MAX_ROW_NODES:
            continue
        seen.add(current)
        todo += trained_operands(current)
    return False
