"""Parts of a rank's memory, such as weights and activations, and their peak over the phases of a step.

Only parts that exist in the same phase add up: the peak is the largest sum of any phase.

Dimension key: D ranks, M phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ds_hetero.common.arrays import Floats

Bytes = Floats | float


class MemoryParts(NamedTuple):
    """Memory of every rank in one phase, by part: bytes ``[D]``, or one number if all ranks need the same.

    Args:
        gradients: bytes of gradients beyond those of the activations that they replace during the backward; all
            gradients with gradient accumulation or ZeRO-3.
    """

    weights: Bytes = 0.0  # parameters that stay on the rank
    optimizer_state: Bytes = 0.0  # master weights and moments
    gradients: Bytes = 0.0
    gathered: Bytes = 0.0  # parameters that ZeRO-3 has gathered
    activations: Bytes = 0.0  # inputs of all layers if checkpointed, else all that autograd saves
    layer: Bytes = 0.0  # what autograd saves of one layer, if checkpointed, and what the MLP's backward allocates
    ring_buffers: Bytes = 0.0  # visiting keys and values, their gradients, partial results
    exchange_buffers: Bytes = 0.0  # tensors packed for an all-to-all, and activations between stages
    logits: Bytes = 0.0  # logits of a tile, or of all tokens
    bucket: Bytes = 0.0  # gradients that are being reduced
    step: Bytes = 0.0  # gradients of the rank's own part in fp32, and the optimizer's temporaries
    communicators: Bytes = 0.0  # NCCL's buffers, as far as the device's reserve does not cover them; no tensors

    def items(self) -> Iterator[tuple[str, Bytes]]:
        """Yield the name and the bytes of every part."""
        return zip(MEMORY_PARTS, self, strict=True)

    def of_rank(self, rank: int) -> MemoryParts:
        """The parts of one rank."""
        shape = self.total.shape
        return MemoryParts(**{name: float(np.broadcast_to(size, shape)[rank]) for name, size in self.items()})

    @property
    def total(self) -> Floats:
        """Sum of all parts, ``[D]``."""
        sizes = [size for size in self if not (isinstance(size, float) and size == 0)]
        return np.asarray(sum(sizes))


MEMORY_PARTS = MemoryParts._fields
Phases = Mapping[str, MemoryParts]


def peak_bytes(phases: Phases) -> Floats:
    """Bytes of every rank in the phase that needs the most, ``[D]``; leading dimensions are kept."""
    peak, *others = (parts.total for parts in phases.values())
    for other in others:
        peak = np.maximum(peak, other)
    return peak


def peak_parts(phases: Phases) -> MemoryParts:
    """The parts of the phase that needs the most, rank by rank; parts of other phases are 0."""
    totals_MD = np.stack(np.broadcast_arrays(*(parts.total for parts in phases.values())))
    largest_D = totals_MD.argmax(axis=0)
    shape = largest_D.shape
    phase_number = np.arange(len(totals_MD)).reshape(-1, *[1] * largest_D.ndim)
    is_peak_MD = phase_number == largest_D
    peak = []
    for size_by_phase in zip(*phases.values(), strict=True):  # one part after the other
        size_MD = np.array([np.broadcast_to(size, shape) for size in size_by_phase])
        peak.append(np.where(is_peak_MD, size_MD, 0.0).sum(axis=0))
    return MemoryParts(*peak)
