"""The loader as a model needs it: shards while it trains, whole batches while it is evaluated.

A loader of accelerate where ranks take different batches: those while the model trains, equal ones otherwise.

The loader of an elastic job in a loop of one's own: its epochs go on where the newest save left them.

The loaders, samplers and datasets of the frameworks, by their attributes; see `LoaderNames`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ds_hetero.engine.adapters import SplitModel
from ds_hetero.engine.evaluation import check_evaluated
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.errors import ConfigError
from ds_hetero.runtime.data.batch_mode import TORCH_LOADERS, LoaderAround, LoaderNames
from ds_hetero.runtime.data.fetch import Progress
from ds_hetero.runtime.data.loader import ShardedLoader
from ds_hetero.runtime.data.loss_units import Batch
from ds_hetero.runtime.data.sample_loader import SampleLoader, on_device
from ds_hetero.runtime.data.shard_info import attach, is_placeholder, shard_info
from ds_hetero.runtime.data.shards import model_inputs, note_shard
from ds_hetero.runtime.data.whole_batches import BatchReading
from ds_hetero.runtime.replica import Replica

if TYPE_CHECKING:
    from ds_hetero.engine.registry import Registry


class ModelLoader(ShardedLoader):
    """A `ShardedLoader` for one model, whose batches are on ``device``.

    An epoch whose first batch is drawn in ``model.eval()`` yields the wrapped loader's batches, whole. A rank that the
    schedule gives no token of a batch gets one column of placeholders, which takes no part in attention or loss.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        model: SplitModel,
        device: torch.device,
        batches: Literal["same", "own"] | None = None,
    ) -> None:
        self._model, self._target = model, device
        super().__init__(
            dataloader,
            model.replica,
            batches=batches,
            reading=BatchReading(
                keep_labels=not model.moves_labels,
                keep_inputs=model.cuts_inputs,
                by_documents=model.places_documents,
                joins_rows=model.asked_for_documents,
                complete=model.complete,
                keeps=model.checks.is_due,
            ),
            placer=model.place,
            plan_ahead=(lambda: model.placer) if model.asked_for_documents else None,
            names=KNOWN_LOADERS,
        )

    @property
    def replica(self) -> Replica:
        """The model's replica, whose schedule may change while it trains."""
        return self._model.replica

    def __iter__(self) -> Iterator[Any]:
        self._expect_split_model()
        note_reading(self.whole, shards=self._model.takes_shards and not self._model.evaluates_shards)
        if self._model.evaluates_shards:
            for batch in self.whole:
                check_evaluated(self._model, batch)
                yield on_device(batch, self._target)
            return
        if not self._model.takes_shards:
            yield from WholeLoader(self.whole, self._target)
            return
        self._model.expect_tokenwise()
        for shard in super().__iter__():
            self._verify()
            inputs = model_inputs(shard, self._target)
            info = shard_info(inputs["position_ids"])
            assert info is not None
            if self._model.as_loaded is not None:
                info = self._model.as_loaded.numbered(info)
                attach(inputs["position_ids"], info)
            self._model.note_shard(info)
            note_shard(shard)
            yield inputs
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
        """Check the model with the batches of this fetch that can show something new; see `self_check`."""
        if self._batches.keeps_on_a_rank:
            self._model.checks.check_batches_of_ranks(self._batches.take_kept())


_READS_SHARDS = "ds_hetero_reads_shards"  # attribute of the loader of a framework that one of ours reads


def note_reading(dataloader: object, *, shards: bool) -> None:
    """Note whether what is read from a framework's loader now becomes shards, or stays whole on a replica's ranks."""
    with contextlib.suppress(AttributeError):  # of lists and generators, which no framework counts
        setattr(dataloader, _READS_SHARDS, shards)


def reads_shards(dataloader: object) -> bool | None:
    """Value that `note_reading` noted last; None for a loader that none of ours reads."""
    shards: bool | None = getattr(dataloader, _READS_SHARDS, None)
    return shards


class WholeLoader(LoaderAround):
    """The wrapped loader's batches on ``device``, for a model that is not split, or that is called by sharded calls.

    Args:
        dataloader: yields mappings; for a module that is not split, what it takes; or lists of prompts.
        model: that is trained by sharded calls, to be checked with the first batch; None without.
    """

    def __init__(self, dataloader: Iterable[Any], device: torch.device, model: SplitModel | None = None) -> None:
        self.dataloader = dataloader
        self._target, self._model = device, model

    def __iter__(self) -> Iterator[Any]:
        note_reading(self.dataloader, shards=False)
        for batch in self.dataloader:
            if self._model is not None:
                self._verify(self._model, batch)
            yield on_device(batch, self._target)

    def skipping(self, num_batches: int, skip: Callable[[Any, int], Any]) -> WholeLoader:
        """A loader without the first ``num_batches``; see `ShardedLoader.skipping`."""
        return WholeLoader(skip(self.dataloader, num_batches), self._target, self._model)

    def _verify(self, model: SplitModel, batch: Any) -> None:
        """Check the model with the tokens of a batch, each the label of the one before it."""
        if not model.pools and "input_ids" in batch:
            piece = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
            model.checks.check_same_batch({**piece, "labels": batch["input_ids"]})


def stands_for_none(batch: Any) -> bool:
    """Whether the batch stands for none: on a rank without tokens, or to fill up an optimizer step."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, Tensor):
        return False
    info = shard_info(positions)
    return (info is not None and info.is_filler) or is_placeholder(positions)


class LoaderByMode(LoaderAround):
    """Yields this rank's unlike micro-batches while the model is in ``train()``, accelerate's equal ones in ``eval()``.

    Args:
        dataloader: of all samples, as it was given to accelerate, with the batch size of a rank.
    """

    def __init__(self, equal: Batch, dataloader: DataLoader[Batch]) -> None:
        self.dataloader = equal
        self._given, self._skipped = dataloader, 0
        self._model: WholeModel | None = None
        self._samples: SampleLoader | None = None

    def bind(self, registry: Registry, model: nn.Module, device: torch.device) -> None:
        """Yield for this model from now on, which was prepared together with the loader."""
        prepared = registry.find(model)
        if prepared is None or not isinstance(prepared.model, WholeModel):
            return
        self._model = prepared.model
        self._samples = SampleLoader(self._given, self._model, device, None, KNOWN_LOADERS, is_of_rank=True)

    @property
    def _trains(self) -> SampleLoader | None:
        return self._samples if self._model is not None and self._model.training else None

    def __iter__(self) -> Iterator[Batch]:
        samples, skipped = self._trains, self._skipped
        self._skipped = 0
        if samples is None:
            yield from self.dataloader
            return
        if skipped:
            assert self._model is not None and self._model.replica.batch_split is not None
            samples.begin_at(Progress(*divmod(skipped, self._model.replica.batch_split.micro_steps)))
        yield from samples

    def __len__(self) -> int:
        return len(self.dataloader if self._trains is None else self._trains)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loaders which epoch comes next."""
        if hasattr(self.dataloader, "set_epoch"):
            self.dataloader.set_epoch(epoch)
        if self._samples is not None:
            self._samples.set_epoch(epoch)

    def skipping(self, num_batches: int, skip: Callable[[Batch, int], Batch]) -> LoaderByMode:
        """A loader whose next epoch of training begins after ``num_batches`` micro-batches."""
        later = LoaderByMode(skip(self.dataloader, num_batches), self._given)
        later._model, later._samples, later._skipped = self._model, self._samples, num_batches
        return later


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
        """The epochs that are left of ``count``; each is to be iterated over to its end."""
        while self.epoch < count:
            before = self.epoch
            yield before
            if self.epoch == before:  # the script has left it in the middle
                self.epoch += 1

    def state_dict(self) -> dict[str, object]:
        """Where the job is."""
        return {"epoch": self.epoch, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from there."""
        self.epoch = int(str(state["epoch"]))
        self._loader.load_state_dict(state["loader"])


# DeepSpeedDataLoader and DeepSpeedDataSampler
_DEEPSPEED = LoaderNames(
    wrapped=("data_sampler",), shards=(("data_parallel_size", "data_parallel_rank"),), with_epoch=("data_sampler",)
)

# BatchSamplerShard and IterableDatasetShard, which DataLoaderShard puts into every loader of more than one process. It
# always has the methods of a state, and a state only if the loader that it wraps has one.
_ACCELERATE = LoaderNames(
    wrapped=("base_dataloader", "dataloader"),
    shards=(("num_processes", "process_index"),),
    always_sharding=(("DataLoaderShard", "accelerate"),),
    with_state=("base_dataloader",),
    at_end=("end_of_dataloader",),
)

# split_dataset_by_node
_DATASETS = LoaderNames(wrapped=("_distributed",), shards=(("world_size", "rank"),))

KNOWN_LOADERS = TORCH_LOADERS | _DEEPSPEED | _ACCELERATE | _DATASETS
