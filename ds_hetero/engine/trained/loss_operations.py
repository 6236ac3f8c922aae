"""Find losses that are computed with operations that no earlier loss of the model had."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hetero.runtime.data.sample_probe import names_of_nodes, newest_node


class LossOperations:
    """Kinds of nodes that the graphs of a model's losses have had so far.

    Walking a graph of 2,500 nodes (a model of 32 layers) takes some milliseconds. So a graph is walked only if it has
    another number of nodes than all before. That number is cheap: autograd numbers nodes in the order in which they are
    made, so that it is the difference of two node numbers.
    """

    def __init__(self) -> None:
        self._known_kinds: set[str] = set()
        self._known_sizes: set[int] = set()
        self._first_node = 0  # number of the first node of the present graph

    def begin_graph(self) -> None:
        """Note the number of the first node of a graph, before the first forward that belongs to a loss."""
        self._first_node = newest_node(torch.ones(1, requires_grad=True) * 1)

    def note(self, loss: Tensor) -> bool:
        """Note the kinds of operations of a loss; return whether there are new ones, False for the first loss."""
        num_nodes = newest_node(loss) - self._first_node
        if num_nodes in self._known_sizes:
            return False
        self._known_sizes.add(num_nodes)
        kinds = names_of_nodes(loss)
        is_first = not self._known_kinds
        is_new = not kinds <= self._known_kinds
        self._known_kinds |= kinds
        return is_new and not is_first
