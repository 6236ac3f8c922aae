"""Whether a loss that a loop makes of a module's outputs lets the samples of a batch see each other.

Between the reductions of a loss and the outputs of its module stand a few nodes. Those that are known to compute every
row of the first axis from that row alone are listed here; any other is named, and so are those that work along the
first axis, or pair rows by broadcasting, as contrastive losses do. The module itself is probed, see `sample_probe`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from torch.autograd.graph import Node

from ds_hetero.runtime.data.loss_graph import is_identity

_LEAF = "torch::autograd::AccumulateGrad"
_ELEMENTWISE_NAMES = """
    Abs Add Clamp ClampMax ClampMin Clone Cos Div Elu Erf Exp Expm1 Gelu Hardtanh LeakyRelu Log Log10 Log1P Log2
    LogSigmoid Logit MaskedFill Maximum Minimum Mul NanToNum NativeDropout Neg Pow Reciprocal Relu Rsqrt Rsub Sgn
    Sigmoid Silu Sin Softplus Sqrt Square Sub Tan Tanh Threshold ToCopy Where Xlogy
"""
_OTHERS = "Add Clamp ClampMin ClampMax Div MaskedFill Mul Pow Rsub Sub"  # with numbers in the place of tensors
_ELEMENTWISE = frozenset(
    [f"{name}Backward0" for name in _ELEMENTWISE_NAMES.split()] + [f"{name}Backward1" for name in _OTHERS.split()]
)
_SHAPE_NAMES = """
    Alias AsStrided Contiguous Expand Permute ReshapeAlias Squeeze T Transpose Unsqueeze UnsafeView View
"""
_OF_SHAPE = frozenset(
    [f"{name}Backward0" for name in _SHAPE_NAMES.split()]
    + ["SqueezeBackward1", "SqueezeBackward2", "CopyBackwards", "CopySlices"]
)
_ALONG_AN_AXIS = {  # and what the node keeps that axis as
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
    """Name what may let samples see each other between a loss and a module's outputs; None: nothing.

    Args:
        linear: nodes of means and sums over samples that the loss is made of, see `loss_graph.LossTerms`.
        outputs: nodes that made the module's outputs, at which the search ends.
    """
    todo: list[Node] = [loss]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or node in outputs or node.name() == _LEAF:
            continue
        seen.add(node)
        if len(seen) > _MAX_ROW_NODES:
            return f"more than {_MAX_ROW_NODES} operations"
        is_free = node in linear or is_identity(node) or math.prod(_shape(node)) == 1
        if not is_free and (found := _mixes(node, outputs, rows)) is not None:
            return found
        todo += [below for below, _ in node.next_functions if below is not None]
    return None


def _mixes(node: Any, outputs: Collection[Node], rows: int) -> str | None:
    name: str = node.name()
    operands = [below for below, _ in node.next_functions]
    if name in _ELEMENTWISE:
        size, sizes = math.prod(_shape(node)), [math.prod(_shape(one)) for one in operands if one is not None]
        is_paired = len(sizes) > 1 and size > max(sizes) and min(sizes) > 1
        return f"{name}, which pairs all rows with all" if is_paired else None
    if name in _OF_SHAPE or name in _LINEAR or name in _BY_ROW:
        return None
    if name == "MmBackward0":
        if all(one is not None and _reaches(one, outputs) for one in operands):
            return f"{name}, a product of two outputs of the batch"
        is_by_data = operands[1] is None  # the second factor has no gradients
        square = is_by_data and rows > 1 and _shape(node) == (rows, rows)
        return f"{name}, a product with as many columns as there are samples" if square else None
    if name in _ALONG_AN_AXIS:
        axes = getattr(node, f"_saved_{_ALONG_AN_AXIS[name]}", None)
        axes = [axes] if isinstance(axes, int) else list(axes or [])
        below = next((one for one in operands if one is not None), None)
        dims = len(_shape(below)) if below is not None else 0
        along = [axis - 2**64 if axis >= 2**63 else axis for axis in axes]
        is_first = not along or any((axis % dims if dims else axis) == 0 for axis in along)
        takes_whole = name in ("StackBackward0", "SplitBackward0", "UnbindBackward0", "CatBackward0", "SliceBackward0")
        if is_first and dims and (_shape(below)[0] == rows or takes_whole) and not _is_scalar_stack(node, operands):
            same = name == "SliceBackward0" and below is not None and _shape(node) == _shape(below)
            return None if same else f"{name} along the first axis"
        return None
    return name


def _is_scalar_stack(node: Node, operands: Sequence[Node | None]) -> bool:
    return node.name() in ("StackBackward0", "CatBackward0") and all(
        one is None or math.prod(_shape(one)) == 1 for one in operands
    )


def _shape(node: Any) -> tuple[int, ...]:
    metadata = node._input_metadata
    return tuple(int(size) for size in metadata[0].shape) if metadata else ()


def _reaches(node: Node, outputs: Collection[Node]) -> bool:
    todo: list[Node] = [node]
    seen: set[Node] = set()
    while todo:
        one = todo.pop()
        if one in outputs:
            return True
        if one in seen or len(seen) > _MAX_ROW_NODES:
            continue
        seen.add(one)
        todo += [below for below, _ in one.next_functions if below is not None]
    return False
