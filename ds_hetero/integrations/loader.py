"""The loader as a model needs it: shards while it trains, whole batches while it is evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ds_hetero.errors import ConfigError
from ds_hetero.integrations.loader_names import KNOWN_LOADERS
from ds_hetero.integrations.transformers.self_check import check_first_batch
from ds_hetero.integrations.transformers.sharded_model import ShardedModel
from ds_hetero.runtime.data.loader import ShardedLoader
from ds_hetero.runtime.data.shard_info import attach, shard_info
from ds_hetero.runtime.data.shards import IGNORE_INDEX
from ds_hetero.runtime.replica import Replica

__all__ = ["ModelLoader", "WholeLoader", "is_placeholder"]

# A model cannot be run on no token at all, so a rank without tokens gets one that stands for none.
_PLACEHOLDER = {"position_ids": -1, "labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}


class ModelLoader(ShardedLoader):
    """A `ShardedLoader` for one model, whose batches are on ``device``.

    An epoch whose first batch is drawn in ``model.eval()`` yields the wrapped loader's batches, whole. A rank that the
    schedule gives no token of a batch gets one column of placeholders, which takes no part in attention or loss.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        model: ShardedModel,
        device: torch.device,
        batches: Literal["same", "own"] | None = None,
    ) -> None:
        self._model, self._target = model, device
        super().__init__(
            dataloader, model.replica, batches=batches, keep_labels=not model.moves_labels, names=KNOWN_LOADERS
        )

    @property
    def replica(self) -> Replica:
        """The model's replica, whose schedule may change while it trains."""
        return self._model.replica

    def __iter__(self) -> Iterator[Any]:
        self._expect_split_model()
        if not self._model.takes_shards:
            yield from WholeLoader(self.whole, self._target)
            return
        for shard in super().__iter__():
            self._verify()
            if "labels" in shard:
                shard["shift_labels"] = shard.pop("labels")  # of a model that predicts each token in its own place
            ready = {name: self._ready(name, entry) for name, entry in shard.items()}
            info = shard_info(shard["position_ids"])
            assert info is not None
            attach(ready["position_ids"], replace(info, labels=ready.get("shift_labels")))
            yield ready
            self._expect_split_model()

    def _expect_split_model(self) -> None:
        """Refuse to give shards to a model that takes whole sequences by now."""
        if self._model.is_restored:
            raise ConfigError(
                "this loader cuts batches for a model that is not split any more: its handle was undone, or the model "
                "was prepared again under another configuration. Wrap the loader again, with handle.dataloader of the "
                "handle that trains the model now."
            )

    def _verify(self) -> None:
        """Check the model with the batch that was read last, if it has yet to be checked; see `self_check`."""
        batch = self._batches.take_kept()
        if self._model.needs_check and check_first_batch(self._model, batch):
            self._model.note_checked()
        if self._model.needs_check:
            self._batches.keep_next()

    def _ready(self, name: str, entry: Any) -> Any:
        if not isinstance(entry, Tensor):
            return entry
        if entry.dim() > 1 and entry.shape[1] == 0:
            column = (entry.shape[0], 1, *entry.shape[2:])
            entry = entry.new_full(column, _PLACEHOLDER.get(name, 0))
        return entry.to(self._target)


class WholeLoader:
    """The wrapped loader's batches on ``device``, for a model that is not split."""

    def __init__(self, dataloader: Iterable[Any], device: torch.device) -> None:
        self.dataloader: Any = dataloader
        self._target = device

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dataloader:
            yield {name: e.to(self._target) if isinstance(e, Tensor) else e for name, e in batch.items()}

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # looked up by copy before there is any attribute
            raise AttributeError(name)
        return getattr(self.dataloader, name)


def is_placeholder(batch: dict[str, Any]) -> bool:
    """Whether the batch stands for none: on a rank without tokens, or to fill up an optimizer step."""
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor):
        return False
    info = shard_info(positions)
    return (info is not None and info.is_filler) or (positions.shape[1] == 1 and bool(positions[0, 0] < 0))
