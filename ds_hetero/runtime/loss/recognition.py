"""Find out whether a loss has been scaled for the engine's average by the functions of `scaling`.

The graph of such a loss has a node of `ds_hetero.runtime.loss.scaling`, a few operations below the loss. If a model's
outputs have the loss of the whole batch, they have a mark.
"""

from __future__ import annotations

from torch import Tensor

from ds_hetero.runtime.loss.scaling import makes_scaled

_MAX_NODES_TO_SCALED = 32  # searched below a loss: the operations by which users add terms to it
_MARK = "ds_hetero_loss"  # attribute of a model's outputs


def is_scaled(loss: Tensor) -> bool:
    """Whether ``loss`` is a result of the functions of `scaling`, or was computed from one by a few operations."""
    todo, seen = [loss.grad_fn], 0
    while todo and seen < _MAX_NODES_TO_SCALED:
        node = todo.pop(0)
        seen += 1
        if node is None:
            continue
        if makes_scaled(node):
            return True
        todo += [following for following, _ in node.next_functions]
    return False


def has_unscaled_term(loss: Tensor) -> bool:
    """Whether ``loss``, for which `is_scaled` is True, has a term that the functions of `scaling` have not scaled.

    The engine would average such a term over ranks without weights, so its tokens would have other weights than the
    tokens of the loss. A loss computed from scaled losses alone has no such term. Walks over the few nodes above the
    scaled losses; if there is a term, over a path from the term to the first parameter.
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
    """Mark a model's ``outputs`` whose ``loss`` is that of the whole batch, scaled for the engine's average."""
    setattr(outputs, _MARK, True)


def has_loss_of_batch(outputs: object) -> bool:
    """Whether `mark_loss_of_batch` has marked ``outputs``."""
    return bool(getattr(outputs, _MARK, False))
