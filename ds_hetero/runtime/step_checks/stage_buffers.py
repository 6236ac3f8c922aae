"""Check that the forwards of a pipeline's stage do not change its buffers.

A stage runs the micro-batches of a step one after the other, in an order of its own. Activation checkpointing runs its
layers twice, and every pipeline has a copy of the model. So a buffer that counts forwards, or follows the activations
of a layer (the running mean of a BatchNorm), gets another value than on one process, which runs the whole batch once. A
layer that computes with the buffer then differs as well.

Only the forwards and backwards are checked: between steps a script may change buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ds_hetero.common.text import listed, ranks_text
from ds_hetero.errors import ModelError
from ds_hetero.runtime.changed_buffers import ChangedBuffers, persistent_buffers
from ds_hetero.runtime.step_checks.protocol import Numbers, Verdict


class StageBuffers:
    """Checks the buffers of one rank's stage, as a step check.

    Args:
        module: the model, of which this rank has a stage.
        names: of the persistent buffers of the whole model, in the same order on all ranks.
    """

    width = 1

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._buffers = ChangedBuffers(lambda: persistent_buffers(module))
        self._names = names
        self._changed: dict[str, float] = {}  # buffers that the forwards of the present step have changed

    def begin_passes(self) -> None:
        """Note the values of the buffers before the forwards and backwards of a step."""
        self._buffers.look()
        self._changed = {}

    def end_passes(self) -> None:
        """Find the buffers that the forwards and backwards of the step have changed."""
        self._changed = self._buffers.look()

    def numbers(self) -> Numbers:
        """Return one number: the index of the first buffer that has changed, or -1."""
        changed, self._changed = self._changed, {}
        indices = [self._names.index(name) for name in changed if name in self._names]
        return [float(min(indices, default=-1))]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Refuse a step in which a buffer has changed on any rank."""
        indices = {rank: int(index) for rank, (index,) in enumerate(rows) if index >= 0}
        if not indices:
            return None
        names = listed(dict.fromkeys(self._names[index] for index in indices.values()))
        return ModelError(
            f"forwards of training change buffers of the model, {names} (on {ranks_text(list(indices))}): pipelines "
            "run micro-batches one after the other, and one process runs the whole batch, so the buffers get other "
            "values. Put the module that follows its batches into eval(); count in the loop and not in the forward; "
            "register a cache with persistent=False; or share sequences by a schedule without "
            '"parallel": "full".'
        )
