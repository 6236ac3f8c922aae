"""Read autograd nodes: their shapes, operands and saved values, and sets of node names by kind of operation.

A node's name is its class's name, such as "MulBackward0". torch's derivatives.yaml lists the values that a node saves.

Saved tensors may have hooks (offloaded activations, checkpoints), and reading a saved tensor runs them. The hooks of
torch itself return the tensor as often as it is read. Other hooks may return it once, so that the backward would not
find it: tensors with such hooks are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from ds_hetero.runtime.data.saved_hooks import hook_of

SUMS = frozenset({"AddBackward0", "SubBackward0", "AddBackward1", "SubBackward1", "RsubBackward1", "RsubBackward0"})
SAME_VALUES = frozenset(  # copies, changes of shape or sign: the elements of the operand
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
PRODUCTS = frozenset({"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"})
LINEAR = SUMS | SAME_VALUES | PRODUCTS  # for scalars: sums, and products with numbers
# Nodes that combine scalars to one tensor, or take one out of it; NaN as a number (nan_to_num) is a guard.
_COMBINE_SCALARS = frozenset(
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
LINEAR_OF_SCALARS = LINEAR | _COMBINE_SCALARS
ELEMENT_LOSSES = frozenset(  # with a ``reduction``: 0 none, 1 mean, 2 sum (aten/src/ATen/core/Reduction.h)
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
LIKELIHOODS = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
LEAF = "torch::autograd::AccumulateGrad"
MAX_SCANNED_NODES = 12  # nodes below a reduction in which masks and shapes are looked for
# Modules whose hooks on saved tensors may run before the backward: `torch.autograd.graph.save_on_cpu`, and checkpoints
# with use_reentrant=False.
_MODULES_OF_REPEATABLE_HOOKS = ("torch.autograd.graph", "torch.utils.checkpoint")

_identities: set[str] = set()  # names of nodes that `note_identities` registered


class UnreadableLossError(Exception):
    """The graph of a loss cannot be read as a sum of means, sums and terms of parameters; the text says why."""


def note_identities(functions: Iterable[str]) -> None:
    """Register autograd functions, by their class names, that return their inputs, such as DeepSpeed's hooks."""
    _identities.update(f"{function}Backward" for function in functions)


def is_identity(node: Node) -> bool:
    """Whether a node is one of a function that `note_identities` has registered."""
    return node.name() in _identities


def operands(node: Node) -> list[Node | None]:
    """Return the nodes that made the operands of a node; None for an operand without a gradient."""
    return [operand for operand, _ in node.next_functions]


def trained_operands(node: Node) -> list[Node]:
    """Return the nodes that made the operands of a node, without operands that have no gradient."""
    return [operand for operand, _ in node.next_functions if operand is not None]


def first_operands(node: Node) -> Iterator[Node]:
    """Yield the first operand of a node, the first operand of that one, and so on, at most `MAX_SCANNED_NODES`."""
    operand = next(iter(trained_operands(node)), None)
    for _ in range(MAX_SCANNED_NODES):
        if operand is None or operand.name() == LEAF:
            return
        yield operand
        operand = next(iter(trained_operands(operand)), None)


def shape_of(node: Node, index: int = 0) -> tuple[int, ...]:
    """Return the shape of a node's result; ``index`` chooses among several results."""
    metadata: Any = node._input_metadata
    return tuple(int(size) for size in metadata[index].shape) if len(metadata) > index else ()


def as_number(value: Any) -> float:
    """Return a number, or the only element of a tensor, as a float."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def read_saved(node: Any, name: str) -> Any:
    """Return the tensor or number that a node has saved for its backward under ``name``.

    Raises:
        UnreadableLossError: it is a tensor with hooks that may return it only once.
    """
    hook = hook_of(node, name)
    owner = getattr(hook, "__module__", None) or str(hook)
    if hook is not None and owner not in _MODULES_OF_REPEATABLE_HOOKS:
        raise UnreadableLossError(
            f"is made of tensors ({node.name()}) that hooks of {owner} keep for the backward, as activation offloading "
            "does, so that what it is divided by cannot be read; compute it outside of these hooks"
        )
    return getattr(node, f"_saved_{name}")


def total_weight(node: Any, read: Callable[[Any, str], Any]) -> Tensor:
    """Return the divisor of a mean negative log-likelihood: the sum of the weights of its labels that count.

    Counts the labels again if the node has rounded the sum to a half type.

    Args:
        node: of the likelihood.
        read: returns the value that a node has saved, by name, as `read_saved` does.

    Returns:
        A scalar in float64 on the device; does not wait for the device.
    """
    total: Tensor = read(node, "total_weight")
    if total.element_size() >= 4:
        return total.double()
    ignored = node._saved_ignore_index  # unsigned in the node: -100 is 2^64 - 100
    labels: Tensor = read(node, "target")
    counts = labels.ne(ignored - 2**64 if ignored >= 2**63 else ignored)
    weight: Tensor | None = read(node, "weight")
    if weight is None:
        return counts.sum().double()
    # An index of 0 for labels that do not count: to select the labels that do would wait for the device.
    return (weight.double()[labels.masked_fill(~counts, 0)] * counts).sum()


def dim_of(saved_dim: int, num_dims: int) -> int:
    """Return a dimension that a node has saved as an index >= 0; nodes save -1 as 2**64 - 1."""
    dim = saved_dim - 2**64 if saved_dim >= 2**63 else saved_dim
    return dim % num_dims if num_dims else 0
