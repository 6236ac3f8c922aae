"""Detect that the graphs of a step's losses have other operations than before; a change calls for a comparison.

A module that begins to compute something else (another branch, a random choice, an autograd.Function that is switched
on) makes other autograd nodes. Nothing is refused here, since it is not known what they compute: a piece of a batch is
compared with one process again, before the optimizer's step.

First the numbers of nodes are compared, which costs two reads of autograd's counter. If a number is new, the names of
the nodes are compared. Batches of documents, or of experts in a list, have graphs of many sizes: then only new names
call for a comparison. The ranks exchange their findings, so a change on one rank alone is found as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds_hetero.runtime.data.sample_probe import names_of_nodes, newest_node
from ds_hetero.runtime.step_checks.protocol import Verdict

# A new size of a graph calls for a comparison while the job has at most this many; with more sizes, they follow the
# batches. Chosen, never measured: a job of equal batches has one size, one with a short last batch two.
_MAX_COMPARED_SIZES = 4
# Sizes at which the names of nodes are read: 2,500 nodes, those of a model of 32 layers, take some milliseconds.
_MAX_GRAPH_SIZES = 64


class GraphChanges:
    """Notices changes of the graphs of one split model's losses, as a step check."""

    width = 1

    def __init__(self) -> None:
        self._leaf = torch.ones(1, requires_grad=True)
        self._first_node: int | None = None  # sequence number before the first forward since the latest backward
        self._sizes: set[int] = set()  # numbers of nodes of all graphs so far
        self._kinds: set[str] = set()  # names of their nodes
        self._is_first_step = True  # its graphs are not changes
        self._has_changed = False  # in the present step, on this rank
        self._has_changed_on_any = False  # in the step that was judged last, on any rank

    def note_forward(self) -> None:
        """Note that a forward of training begins."""
        if self._first_node is None:
            self._first_node = self._next_node()

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Do not count nodes made inside the context, such as by a comparison between a forward and its backward."""
        node_before = self._next_node()
        try:
            yield
        finally:
            if self._first_node is not None:
                self._first_node += self._next_node() - node_before + 1

    def _next_node(self) -> int:
        """Make a node and return its sequence number."""
        with torch.enable_grad():
            return newest_node(self._leaf * 1)

    def note_backward(self, loss: Tensor) -> None:
        """Compare the graph of ``loss``, which the script gives to backward, with the earlier graphs."""
        first_node, self._first_node = self._first_node, None
        if first_node is None or loss.grad_fn is None:
            return
        size = newest_node(loss) - first_node
        if size in self._sizes or len(self._sizes) == _MAX_GRAPH_SIZES:
            return
        self._sizes.add(size)
        kinds = names_of_nodes(loss)
        self._has_changed |= len(self._sizes) <= _MAX_COMPARED_SIZES or not kinds <= self._kinds
        self._kinds |= kinds

    def restart(self) -> None:
        """Forget all graphs, as at the first step; under another schedule attention has other nodes."""
        self._sizes.clear()
        self._kinds.clear()
        self._is_first_step, self._has_changed = True, False

    def numbers(self) -> Sequence[float]:
        """Return one number: whether a graph of the step that ends has changed."""
        has_changed, self._has_changed = self._has_changed and not self._is_first_step, False
        self._is_first_step = False
        return [float(has_changed)]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Note whether a graph has changed on any rank; always return None."""
        self._has_changed_on_any = any(has_changed for (has_changed,) in rows)
        return None

    def take_change(self) -> bool:
        """Return whether a graph has changed on any rank in the step judged last, and forget it."""
        changed, self._has_changed_on_any = self._has_changed_on_any, False
        return changed
