"""Check whether the graphs of a step's losses are made as those of the steps before; a change calls for a comparison.

A module that begins to compute something else (another branch, a coin, an autograd.Function that is switched on) makes
other nodes. What they compute is not known, so nothing is refused here: a piece of a batch is compared with one process
again, before the optimizer's step.

Compared are the numbers of nodes, which cost two reads of autograd's counter. Where a number is new, the kinds of nodes
are looked at. Batches of documents, or of experts in a list, have graphs of many sizes: then new kinds alone call for a
comparison. A change that happens on one rank alone is found as well, since every rank says what it has seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hetero.runtime.data.sample_probe import names_of_nodes, newest_node
from ds_hetero.runtime.step_checks.protocol import Verdict

# Sizes of graphs of a job, of which a new one calls for a comparison; more of them follow the batches. Chosen, never
# measured: a job of equal batches has one, one with a short last batch two.
_FEW_SIZES = 4
# Sizes at which kinds are looked at: 2,500 nodes, of a model of 32 layers, take some milliseconds.
_MOST_SIZES = 64


class GraphChanges:
    """`ds_hetero.runtime.step_checks.protocol.StepCheck` of the graphs of one split model's losses."""

    width = 1

    def __init__(self) -> None:
        self._leaf = torch.ones(1, requires_grad=True)
        self._first_node: int | None = None  # of the forwards since the latest backward
        self._sizes: set[int] = set()
        self._kinds: set[str] = set()
        self._is_first_step = True  # whose graphs are those that others are compared with
        self._has_changed = False  # in the step that runs
        self._has_changed_on_any = False  # in the step that was judged, on one rank or more

    def note_forward(self) -> None:
        """A forward of training begins."""
        if self._first_node is None:
            self._first_node = newest_node(self._leaf * 1)

    def note_backward(self, loss: Tensor) -> None:
        """The script gives ``loss`` to backward."""
        first, self._first_node = self._first_node, None
        if first is None or loss.grad_fn is None:
            return
        size = newest_node(loss) - first
        if size in self._sizes or len(self._sizes) == _MOST_SIZES:
            return
        self._sizes.add(size)
        kinds = names_of_nodes(loss)
        self._has_changed |= len(self._sizes) <= _FEW_SIZES or not kinds <= self._kinds
        self._kinds |= kinds

    def restart(self) -> None:
        """Go on as at the first step: under another schedule attention is made of other nodes."""
        self._sizes.clear()
        self._kinds.clear()
        self._is_first_step, self._has_changed = True, False

    def numbers(self) -> Sequence[float]:
        """See `StepCheck`: whether a graph was made otherwise."""
        has_changed, self._has_changed = self._has_changed and not self._is_first_step, False
        self._is_first_step = False
        return [float(has_changed)]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`: none; takes over what all ranks know."""
        self._has_changed_on_any = any(has_changed for (has_changed,) in rows)
        return None

    def take_change(self) -> bool:
        """Whether a graph of the step that was judged was made otherwise on any rank; once, the same on every rank."""
        changed, self._has_changed_on_any = self._has_changed_on_any, False
        return changed
