"""Loader of an elastic job in a custom loop, whose epochs continue where the newest save was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class ElasticLoader:
    """A loader that counts its epochs, from `ds_hetero.engine.handle.Handle.elastic`.

        for epoch in loader.epochs(3):
            for batch in loader:

    Args:
        loader: a loader with ``state_dict`` and ``load_state_dict``.
        after_batch: called when the script requests the next batch.

    Attributes:
        epoch: number of the running epoch, from 0.
        resumed_step: the optimizer step that the job continues from; None if it has just begun.
    """

    def __init__(self, loader: Any, after_batch: Callable[[], None]) -> None:
        self._loader, self._after_batch = loader, after_batch
        self.epoch = 0
        self.resumed_step: int | None = None

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            self._after_batch()
        self.epoch += 1

    def __len__(self) -> int:
        return len(self._loader)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of ``count``; iterate over the loader in each of them."""
        while self.epoch < count:
            before = self.epoch
            yield before
            if self.epoch == before:  # the script has left the epoch before its end
                self.epoch += 1

    def state_dict(self) -> dict[str, object]:
        """Return the job's position in its data."""
        return {"epoch": self.epoch, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue at the position that `state_dict` returned."""
        self.epoch = int(str(state["epoch"]))
        self._loader.load_state_dict(state["loader"])
