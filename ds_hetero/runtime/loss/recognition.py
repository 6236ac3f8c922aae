"""Recognition of losses that have the scale of the engine's average.

A loss shows it in its graph, where a node of `ds_hetero.runtime.loss.scaling` stands a few operations above it. The
outputs of a model whose loss is that of the whole batch are marked.
"""

from __future__ import annotations

from torch import Tensor

from ds_hetero.runtime.loss.scaling import makes_scaled

_NODES_SEARCHED = 32  # of the graph above a loss, for what users add to it
_MARK = "ds_hetero_loss"  # of a model's outputs


def is_scaled(loss: Tensor) -> bool:
    """Whether ``loss`` was made here: is a result of the functions above, or a few operations away from one."""
    todo, seen = [loss.grad_fn], 0
    while todo and seen < _NODES_SEARCHED:
        node = todo.pop(0)
        seen += 1
        if node is None:
            continue
        if makes_scaled(node):
            return True
        todo += [following for following, _ in node.next_functions]
    return False


def has_unscaled_term(loss: Tensor) -> bool:
    """Whether a part of ``loss``, which `is_scaled`, does not come from the functions above.

    Such a term would be averaged over ranks as it is, each rank's tokens by another weight than in the loss. Functions
    of scaled losses alone are right. Costs a walk over the few nodes above them; where there is a term, over a path
    from it to the first parameter.
    """
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen or makes_scaled(node):
            continue
        if not node.next_functions:
            return True
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
    return False


def mark_loss_of_batch(outputs: object) -> None:
    """Mark the outputs of a model whose ``loss`` is that of the whole batch, in the scale of the engine's average."""
    setattr(outputs, _MARK, True)


def has_loss_of_batch(outputs: object) -> bool:
    """Whether `mark_loss_of_batch` has marked ``outputs``."""
    return bool(getattr(outputs, _MARK, False))
