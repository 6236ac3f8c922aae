"""The loader of an elastic job in a custom loop: its epochs go on where the newest save left them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class ElasticLoader:
    """A loader that counts its epochs; of `ds_hetero.engine.handle.Handle.elastic`.

        for epoch in loader.epochs(3):
            for batch in loader:

    Args:
        loader: with ``state_dict`` and ``load_state_dict``.
        after_batch: called when the script asks for the next batch.

    Attributes:
        resumed_step: the optimizer step that the job goes on from; None where it has just begun.
    """

    def __init__(self, loader: Any, after_batch: Callable[[], None]) -> None:
        self._loader, self._after_batch = loader, after_batch
        self.epoch = 0  # that is under way, from 0
        self.resumed_step: int | None = None

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            self._after_batch()
        self.epoch += 1

    def __len__(self) -> int:
        return len(self._loader)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of ``count``; each is to be iterated over to its end."""
        while self.epoch < count:
            before = self.epoch
            yield before
            if self.epoch == before:  # the script has left it in the middle
                self.epoch += 1

    def state_dict(self) -> dict[str, object]:
        """Return the position of the job in its data."""
        return {"epoch": self.epoch, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from there."""
        self.epoch = int(str(state["epoch"]))
        self._loader.load_state_dict(state["loader"])
