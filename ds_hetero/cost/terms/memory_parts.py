"""Parts of a rank's memory, and the phase of a step in which they need the most.

Of the parts those that exist at once count: the peak is the largest sum of one phase.

Dimension key: D ranks, M phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ds_hetero.common.arrays import Floats

Bytes = Floats | float


class MemoryParts(NamedTuple):
    """Bytes of every rank at a moment, ``[D]``, or a number for all.

    Args:
        gradients: what they take beyond the activations that they replace; all of them with accumulation or ZeRO-3.
    """

    weights: Bytes = 0.0  # parameters that stay on the rank
    optimizer_state: Bytes = 0.0  # master weights and moments
    gradients: Bytes = 0.0
    gathered: Bytes = 0.0  # ZeRO-3's parameters that stay gathered, and at the loss those that arrive
    activations: Bytes = 0.0  # per layer its input if checkpointed, else all that its backward needs
    layer: Bytes = 0.0  # what one layer's backward needs, if checkpointed, and what its MLP's backward makes
    ring_buffers: Bytes = 0.0  # keys and values that visit, their gradients, partial results
    exchange_buffers: Bytes = 0.0  # what is packed for an exchange, and activations between stages
    logits: Bytes = 0.0  # of a tile, or of all tokens
    bucket: Bytes = 0.0  # gradients under way
    step: Bytes = 0.0  # gradients of the rank's own part in fp32, and the optimizer's temporaries

    def items(self) -> Iterator[tuple[str, Bytes]]:
        """Name and bytes of every part."""
        return zip(PARTS, self, strict=True)

    def of_rank(self, rank: int) -> MemoryParts:
        """The parts of one rank."""
        shape = self.total.shape
        return MemoryParts(**{name: float(np.broadcast_to(size, shape)[rank]) for name, size in self.items()})

    @property
    def total(self) -> Floats:
        """All parts."""
        return np.asarray(sum([size for size in self if not (isinstance(size, float) and size == 0)]))


PARTS = MemoryParts._fields
Phases = Mapping[str, MemoryParts]


def peak_bytes(moments: Phases) -> Floats:
    """Bytes of every rank at its largest moment; leading dimensions are kept."""
    peak, *others = (parts.total for parts in moments.values())
    for other in others:
        peak = np.maximum(peak, other)
    return peak


def peak_parts(moments: Phases) -> MemoryParts:
    """The parts of the moment that needs the most, rank by rank; parts of other moments are 0."""
    totals = np.stack(np.broadcast_arrays(*(parts.total for parts in moments.values())))
    largest = totals.argmax(axis=0)
    is_peak_MD = np.arange(len(totals)).reshape(-1, *[1] * largest.ndim) == largest
    of_part = (
        np.array([np.broadcast_to(size, largest.shape) for size in sizes])
        for sizes in zip(*moments.values(), strict=True)
    )
    return MemoryParts(*(np.where(is_peak_MD, size_MD, 0.0).sum(axis=0) for size_MD in of_part))
