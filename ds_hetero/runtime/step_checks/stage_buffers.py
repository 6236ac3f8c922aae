"""Check that the forwards of a stage of a pipeline leave its buffers as they are.

A stage runs the micro-batches of a step one after the other, in an order of its own, and activations that are
recomputed run its layers twice; pipelines have a copy each. A buffer that counts forwards, or follows what goes through
a layer (the running mean of a BatchNorm), comes to something else than on one process, which runs the whole batch once,
and so does a layer that computes with it.

Only the passes are checked: between steps a script may change buffers as it likes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ds_hetero.common.text import listed, ranks_text
from ds_hetero.errors import ModelError
from ds_hetero.runtime.changed_buffers import ChangedBuffers, persistent_buffers
from ds_hetero.runtime.step_checks.protocol import Numbers, Verdict


class StageBuffers:
    """`ds_hetero.runtime.step_checks.protocol.StepCheck` of the buffers of one rank's stage.

    Args:
        module: the model, of which this rank has a stage.
        names: of the persistent buffers of the whole model, alike on all ranks.
    """

    width = 1

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._buffers = ChangedBuffers(lambda: persistent_buffers(module))
        self._names = names
        self._changed: dict[str, float] = {}  # in the passes of the step that runs

    def begin_passes(self) -> None:
        """The passes of a step begin."""
        self._buffers.look()
        self._changed = {}

    def end_passes(self) -> None:
        """They have ended."""
        self._changed = self._buffers.look()

    def numbers(self) -> Numbers:
        """See `StepCheck`: the index of the first buffer that has changed; -1 where none has."""
        changed, self._changed = self._changed, {}
        return [float(min((self._names.index(name) for name in changed if name in self._names), default=-1))]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`."""
        indices = {rank: int(index) for rank, (index,) in enumerate(rows) if index >= 0}
        if not indices:
            return None
        names = listed(dict.fromkeys(self._names[index] for index in indices.values()))
        return ModelError(
            f"forwards of training change buffers of the model, {names} (on {ranks_text(list(indices))}): pipelines "
            "run micro-batches one after the other, and one process runs the whole batch, so that they come to another "
            "value. Put the module that follows its batches into eval(); count in the loop and not in the forward; "
            "register a cache with persistent=False; or share sequences by a schedule without "
            '"parallel": "full".'
        )
