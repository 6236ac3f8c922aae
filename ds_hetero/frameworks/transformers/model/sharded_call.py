"""Sharded calls: call a model with a whole batch, run it on shards, and return the results of the whole batch.

A loop that computes its loss from whole sequences (preferences, rewards, distillation) has whole batches, the same on
every rank of a replica. In a `ShardedCall`, each rank runs the model on its shard, and every rank gathers the results
of all tokens, in the order of the whole batch (`ds_hetero.runtime.data.shard_exchange`). The loss that the script
computes from them has the convention ``"replica_mean"`` of `ds_hetero.runtime.loss`, with which the engine's backward
gives the gradients of one process.

Dimension key: B batch, L tokens of the sequence, s tokens of this rank, V vocabulary, D hidden size.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ds_hetero.engine.adapters import SplitModel
from ds_hetero.engine.forward_mode import Wanted
from ds_hetero.errors import BatchError, ModelError
from ds_hetero.frameworks.transformers.model.own_loss import loss_by_own_function
from ds_hetero.frameworks.transformers.model.router_losses import adds_router_loss
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.shard_exchange import gather_tokens
from ds_hetero.runtime.data.shard_info import ShardInfo, attach
from ds_hetero.runtime.data.shards import (
    IGNORE_INDEX,
    Batch,
    Entries,
    PlacedBatch,
    WholeBatch,
    model_inputs,
    place,
    read_batch,
)
from ds_hetero.runtime.loss import mean_over_replica, token_log_probs
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import stream_placement


class Called(SplitModel, Protocol):
    """A split model of transformers."""

    @property
    def pretrained(self) -> PretrainedModel:
        """The model that is called."""

    @property
    def evaluates_shards(self) -> bool:
        """Whether a forward is one of an evaluation over shards, which the section asks for."""

    def unrecorded(self, *, keeps_tiles: bool = False) -> AbstractContextManager[None]:
        """Let forwards inside leave nothing behind; see `ShardedModel.unrecorded`."""

    @property
    def takes_shifted_labels(self) -> bool:
        """Whether its forward takes ``shift_labels``."""


logger = logging.getLogger(__name__)

_LARGE_BYTES = 1 << 30  # of gathered logits, from which on rank 0 warns


@dataclass
class TokenResults(ModelOutput):  # type: ignore[misc]
    """Results of a whole batch, the same on every rank of the replica, with gradients for the engine's backward.

    Args:
        log_probs: [B, L] of ``labels``: at i that of ``labels[:, i]``, given the tokens before it; 0 where the label is
            -100, and at the first position. Of masked-language models, given all tokens. None without labels.
    """

    loss: Tensor | None = None  # mean of the token losses over the replica's labels; None without labels
    log_probs: Tensor | None = None
    hidden_state: Tensor | None = None  # [B, L, D] of the last layer; None unless requested
    logits: Tensor | None = None  # [B, L, V]; None unless requested


class ShardedCall:
    """One call of a model with a whole batch.

    Args:
        arguments: of the call, by name: the whole batch, and other arguments of the model.
        wanted: the results to gather.

    Caller: every rank of the replica, at the beginning of the model's forward.
    Collectives: one `on_all_ranks` in the replica, with checksums of the batch.

    Raises:
        BatchError: on every rank of the replica: the batch cannot be sharded, or differs between ranks.
        ModelError: the model adds an auxiliary loss of routers, which would be that of a shard.
    """

    def __init__(self, model: Called, arguments: Batch, wanted: Wanted) -> None:
        self._model, self._wanted, self._replica = model, wanted, model.replica
        self._expect_supported()
        self._hidden: Tensor | None = None
        entries = {name: entry for name, entry in arguments.items() if entry is not None}
        self._num_items = entries.pop("num_items_in_batch", None)
        self._kept_logits = entries.pop("logits_to_keep", 0)  # of the last positions of the whole sequence
        placed = self._agree_on_batch(entries)
        self._placement = placed.placement
        shard = _shard(placed, self._replica.rank)
        self.inputs = model_inputs(shard, shard["position_ids"].device)  # arguments for the model
        self._labels: Tensor | None = self.inputs.get("shift_labels")
        self._columns = self.inputs["position_ids"].shape[1]
        if self._labels is not None and wanted.own_outputs:
            self.inputs["labels"] = self._labels

    def _expect_supported(self) -> None:
        """Refuse a model whose results are more than those of its tokens. Raises `ModelError`."""
        model = self._model.pretrained
        if adds_router_loss(model):
            raise ModelError(
                f"{type(model).__name__} adds a loss of its routers, and a sharded call puts results of "
                "tokens together only. Set output_router_logits to false in its configuration."
            )

    def _expect_cuttable(self, given: Batch) -> None:
        """Refuse a batch whose results would be other than one process's. Raises `BatchError` and `ModelError`."""
        _expect_cuttable(type(self._model.pretrained).__name__, given, self._replica, self._kept_logits)

    def note_hidden_state(self, hidden: Tensor) -> None:
        """Keep the output of the last layer, [B, s, D], if it is requested."""
        if self._wanted.hidden_state:
            self._hidden = hidden

    def put_together(self, outputs: Any) -> Any:
        """Gather the results of the whole batch. Raises `ModelError`: outputs are a tuple, or not per token.

        Caller: every rank of the replica.
        Collectives: one all_gather for each result of tokens, one all_reduce of two numbers for a loss.
        """
        self._expect_named(outputs)
        if not self._wanted.own_outputs:
            return self._token_results(outputs)
        one_shorter = type(outputs).__name__ in self._wanted.shorter_outputs
        whole = {name: self._whole(name, entry, one_shorter) for name, entry in outputs.items()}
        if whole.get("loss") is not None and self._model.own_loss and self._labels is not None:
            whole["loss"] = loss_by_own_function(
                self._model.pretrained,
                outputs.logits,
                self._labels,
                self._placement,
                self._replica,
                self._model.moves_labels,
                self._num_items,
            )
        return type(outputs)(**{name: entry for name, entry in whole.items() if entry is not None})

    def _expect_named(self, outputs: Any) -> None:
        if not isinstance(outputs, ModelOutput):
            raise ModelError(
                f"a sharded call of {type(self._model.pretrained).__name__} returned {type(outputs).__name__}, whose "
                "parts have no names. Leave out return_dict=False."
            )

    def _agree_on_batch(self, given: Batch) -> PlacedBatch:
        """Read the batch and place it, and compare its fingerprints on all ranks of the replica."""
        replica = self._replica
        placed: list[PlacedBatch] = []

        def read() -> dict[str, str]:
            self._expect_cuttable(given)
            batch = read_batch(self._model.complete(given), keep_labels=not self._model.moves_labels)
            placed.append(place(stream_placement, replica.schedule, batch))
            return placed[0].fingerprints()

        fingerprints_by_rank = on_all_ranks(read, replica.sp_group)
        names: set[str] = set()
        for fingerprints in fingerprints_by_rank:
            names.update(fingerprints)
        for name in sorted(names):
            values = [fingerprints.get(name, "absent") for fingerprints in fingerprints_by_rank]
            if len(set(values)) > 1:
                raise BatchError(
                    f"a sharded call needs the same whole batch on all ranks of a replica, but {name} by rank is "
                    f"{values} (ranks {list(replica.ranks)}). Seed what draws or generates batches alike."
                )
        return placed[0]

    def _gather(self, part: Tensor) -> Tensor:
        return gather_tokens(part, self._placement, self._replica)

    def _whole(self, name: str, entry: Any, one_shorter: bool) -> Any:
        """Gather one entry of the model's outputs: [B, s, ...] -> [B, L, ...]."""
        if name == "loss":
            return self._whole_loss(entry)
        if name == "logits":
            return self._whole_logits(entry)
        if isinstance(entry, tuple):
            return tuple(self._whole(name, part, one_shorter) for part in entry)
        if not isinstance(entry, Tensor):
            return entry
        if entry.dim() < 2 or entry.shape[1] != self._columns:
            raise ModelError(
                f"{type(self._model.pretrained).__name__} returns {name} of shape {list(entry.shape)}, which is not "
                f"one result per token ([B, s, ...] with s={self._columns} here), so that a sharded call cannot put "
                "it together."
            )
        whole = self._gather(entry)
        return whole[:, :-1] if one_shorter else whole

    def _whole_loss(self, mean: Tensor) -> Tensor | None:
        if self._labels is None:
            return None
        return mean_over_replica(mean, self._labels.ne(IGNORE_INDEX).sum(), self._replica, self._num_items)

    def _whole_logits(self, logits: Tensor) -> Tensor | None:
        if not (self._wanted.logits or self._wanted.on_request):
            return None
        rows, _, vocabulary = logits.shape
        num_bytes = rows * self._placement.length * vocabulary * logits.element_size()
        if num_bytes >= _LARGE_BYTES and dist.get_rank() == 0:
            logger.warning(
                "logits of the whole batch are put together on every rank: %.1f GB for [%d, %d, %d]. "
                "handle.sharded_call returns log-probabilities of labels without them.",
                num_bytes / 1e9,
                rows,
                self._placement.length,
                vocabulary,
            )
        whole = self._gather(logits)
        return whole[:, -self._kept_logits :] if self._kept_logits else whole

    def _token_results(self, outputs: ModelOutput) -> TokenResults:
        results = TokenResults()
        logits = outputs.get("logits")
        if self._labels is not None:
            if logits is None:
                raise ModelError(
                    f"{type(self._model.pretrained).__name__} returns no logits to take labels by. Leave labels out of "
                    "the sharded call, and compute the loss from what it returns."
                )
            log_probs = self._gather(token_log_probs(logits, self._labels))
            num_labels = self._num_items
            if num_labels is None:
                num_labels = self._gather(self._labels.ne(IGNORE_INDEX)).sum().clamp(min=1)
            results["loss"] = -log_probs.sum() / num_labels
            moved = self._model.moves_labels
            results["log_probs"] = nn.functional.pad(log_probs[:, :-1], (1, 0)) if moved else log_probs
        if self._hidden is not None:
            results["hidden_state"] = self._gather(self._hidden)
        if logits is not None and self._wanted.logits:
            results["logits"] = self._whole_logits(logits)
        return results


def whole_results(model: Any, batch: Batch, wanted: Wanted) -> TokenResults:
    """Return the results of a sharded call for a model that is not sharded."""
    labels = batch.get("labels")
    results = TokenResults()
    inputs = {name: entry for name, entry in batch.items() if name != "labels"}
    if wanted.hidden_state:
        inputs["output_hidden_states"] = True
    outputs = model(**inputs)
    if labels is not None:
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        log_probs = token_log_probs(outputs.logits, shifted)
        results["loss"] = -log_probs.sum() / shifted.ne(IGNORE_INDEX).sum().clamp(min=1)
        results["log_probs"] = nn.functional.pad(log_probs[:, :-1], (1, 0))
    if wanted.hidden_state:
        results["hidden_state"] = outputs.hidden_states[-1]
    if wanted.logits:
        results["logits"] = outputs.logits
    return results


def _shard(placed: PlacedBatch, rank: int) -> Entries:
    """Return the shard of a rank, on the device of the batch, with gradients to the batch."""
    batch: WholeBatch = placed.batch
    intervals = placed.placement.intervals(rank)
    shard = {name: _cut(tensor, intervals) for name, tensor in batch.sequences.items()}
    tokens = shard["input_ids"] if "input_ids" in shard else shard["inputs_embeds"]
    shard["position_ids"] = attach(shard["position_ids"].to(tokens.device), ShardInfo(placement=placed.placement))
    return {**shard, **batch.constants, **batch.objects}


def _cut(tensor: Tensor, intervals: tuple[tuple[int, int], ...]) -> Tensor:
    """[B, L, ...] -> [B, s, ...]."""
    parts = [tensor[:, start:stop] for start, stop in intervals] or [tensor[:, :0]]
    return torch.cat(parts, dim=1)


def _expect_cuttable(model: str, given: Batch, replica: Replica, kept_logits: Any) -> None:
    """Refuse a call whose results would be other than one process's. Raises `BatchError` and `ModelError`."""
    if replica.batch_split is not None:
        raise BatchError(
            f"a sharded call of {model} weighs replicas alike, but these take different batches "
            f"({replica.batch_split}). Give all replicas the same micro_batch_size and micro_batches."
        )
    if given.get("output_router_logits"):
        raise ModelError(
            f"output_router_logits=True of {model} asks for a router loss, which is not a mean over tokens. Set "
            "router_aux_loss_coef to 0 in the model's config."
        )
    expect_number_of_logits(model, kept_logits)


def expect_number_of_logits(model: str, kept_logits: Any) -> None:
    """Refuse a ``logits_to_keep`` that is not a number of last positions. Raises `ModelError`."""
    if not isinstance(kept_logits, int):
        raise ModelError(f"logits_to_keep of a sharded call of {model} must be a number of positions, from the end.")
