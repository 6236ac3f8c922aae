"""Interface of the state of an engine that outlives its process in an elastic job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ds_hetero.common.reading import JsonObject


class ElasticState(Protocol):
    """The state of an engine, which outlives its process in an elastic job."""

    events: list[JsonObject]  # of the job on rank 0, oldest first: ``kind``, ``time`` in seconds since 1970, ``ranks``
    losses: Any  # weighing of losses, with ``state_dict`` and ``load_state_dict``; None unless ranks' batches differ

    def resume(self, objects: Mapping[str, Any]) -> int | None:
        """Restore engine and ``objects`` from the newest save; return its optimizer step, None if there is no save."""

    def go_on(self, objects: Mapping[str, Any], saves: Any) -> None:
        """Restore the newest of ``saves`` in the nodes' memory. The caller calls `after_step` after each later step."""

    def around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the engine's step, once the last save is copied, since the step changes the tensors that are saved."""

    def after_step(self, step: int) -> None:
        """After an optimizer step: commit the last save, and begin the next one if it is due."""

    def end_batch(self) -> None:
        """Save, if a save is due, when a custom loop requests the next batch."""

    def leave_if_due(self) -> None:
        """End this process between two steps, if all ranks have agreed to."""
