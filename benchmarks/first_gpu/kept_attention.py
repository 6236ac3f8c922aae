"""Compute attention only once although its layer is recomputed: keep output and log-sum-exp from the forward.

This is a prototype to measure the gain. It assumes that layers are recomputed in the reverse order of the forward, as
non-reentrant checkpointing does with one micro-batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from ds_hetero.runtime.attention import attention as engine_attention


class KeptAttention:
    """Results of attention that the forwards of a step have kept; ``reused`` counts those used again."""

    def __init__(self) -> None:
        self._results: list[Any] = []
        self.computed = self.reused = 0

    def forward(self, q: Any, k: Any, v: Any, context: Any) -> Any:
        """Replace `ring_forward`: compute and keep, or return the kept result in a recomputation."""
        if torch._C._current_graph_task_id() != -1 and self._results:  # inside a backward: a layer is recomputed
            self.reused += 1
            return self._results.pop()
        self.computed += 1
        result = _stock(q, k, v, context)
        self._results.append(result)
        return result


_stock = engine_attention.ring_forward


@contextmanager
def keeping_attention() -> Iterator[KeptAttention]:
    """Keep the attention of every layer from its forward to its recomputation, inside."""
    attention = KeptAttention()
    with mock.patch.object(engine_attention, "ring_forward", attention.forward):
        yield attention
