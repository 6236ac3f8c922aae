"""Kinds of operations that have made the losses of a model so far, to find a loss that is made in a new way."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hetero.runtime.data.sample_probe import names_of_nodes, newest_node


class LossOperations:
    """Kinds of nodes in the graphs of a model's losses.

    A graph is walked only where it has another number of nodes than those before: walking 2,500 nodes, a model of 32
    layers, takes some milliseconds. autograd numbers nodes in the order in which they are made, so that the difference
    of two numbers is the size of what was made between.
    """

    def __init__(self) -> None:
        self._known_kinds: set[str] = set()
        self._known_sizes: set[int] = set()
        self._first_node = 0  # number of the first node of the graph that is being made

    def begin_graph(self) -> None:
        """Note where a graph begins, before the first forward that belongs to a loss."""
        self._first_node = newest_node(torch.ones(1, requires_grad=True) * 1)

    def note(self, loss: Tensor) -> bool:
        """Note the kinds of operations of a loss; return whether there are new ones since the first loss."""
        num_nodes = newest_node(loss) - self._first_node
        if num_nodes in self._known_sizes:
            return False
        self._known_sizes.add(num_nodes)
        kinds = names_of_nodes(loss)
        is_first = not self._known_kinds
        is_new = not kinds <= self._known_kinds
        self._known_kinds |= kinds
        return is_new and not is_first
