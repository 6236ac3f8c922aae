"""Sharded calls: call a model with a whole batch, run it on shards, and return the results of the whole batch.

A loop that computes its loss from whole sequences (preferences, rewards, distillation) has whole batches, the same on
every rank of a replica. In a `ShardedCall`, each rank runs the model on its shard, and every rank gathers the results
of all tokens, in the order of the whole batch (`ds_hetero.runtime.data.gather_tokens`). The script computes its loss
from these results. Its convention is ``"replica_mean"`` of `ds_hetero.runtime.loss`, with which the engine's backward
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

from ds_hetero.engine.forward_mode import Wanted
from ds_hetero.engine.trained.split_model import SplitModel
from ds_hetero.errors import BatchError, ModelError
from ds_hetero.frameworks.transformers.model.own_loss import LARGE_LOGITS_BYTES, loss_by_own_function
from ds_hetero.frameworks.transformers.model.router_losses import adds_router_loss
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.gather_tokens import gather_tokens
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


class SplitTransformer(SplitModel, Protocol):
    """The part of `ShardedModel` that sharded calls and the forward wrapper use."""

    @property
    def pretrained(self) -> PretrainedModel:
        """The transformers model that is called."""

    def unrecorded(self, *, keeps_tiles: bool = False) -> AbstractContextManager[None]:
        """Run forwards inside the context without recording them; see `ShardedModel.unrecorded`."""


logger = logging.getLogger(__name__)


@dataclass
class TokenResults(ModelOutput):  # type: ignore[misc]
    """Results of a whole batch, the same on every rank of the replica, with gradients for the engine's backward.

    Args:
        log_probs: [B, L], at i the log-probability of ``labels[:, i]`` given the tokens before it; 0 at the first
            position, and where the label is -100. For masked-language models it is given all tokens. None without
            labels.
    """

    loss: Tensor | None = None  # mean of the token losses over the replica's labels; None without labels
    log_probs: Tensor | None = None
    hidden_state: Tensor | None = None  # [B, L, D], output of the last layer; None unless requested
    logits: Tensor | None = None  # [B, L, V]; None unless requested


class ShardedCall:
    """One call of a model with a whole batch.

    Args:
        arguments: all arguments of the call by name; the entries of the whole batch are among them.
        wanted: the results to gather.

    Attributes:
        inputs: arguments with which the model runs on this rank's shard.

    Caller: every rank of the replica, at the beginning of the model's forward.
    Collectives: one `on_all_ranks` in the replica, with checksums of the batch.

    Raises:
        BatchError: on every rank of the replica: the batch cannot be sharded, or differs between ranks.
        ModelError: the model adds an auxiliary loss of routers, which it would compute from the shard alone.
    """

    def __init__(self, model: SplitTransformer, arguments: Batch, wanted: Wanted) -> None:
        self._model, self._wanted, self._replica = model, wanted, model.replica
        self._expect_supported()
        self._hidden: Tensor | None = None
        entries = {name: entry for name, entry in arguments.items() if entry is not None}
        self._num_items = entries.pop("num_items_in_batch", None)
        self._kept_logits = entries.pop("logits_to_keep", 0)  # number of last positions of the whole sequence; 0: all
        if "labels" in entries and isinstance(self._kept_logits, int):
            entries["labels"] = _labels_of_all_tokens(entries, self._kept_logits)
        placed = self._agree_on_batch(entries)
        self._placement = placed.placement
        shard = _shard_of(placed, self._replica.rank)
        self.inputs = model_inputs(shard, shard["position_ids"].device)
        self._labels: Tensor | None = self.inputs.get("shift_labels")
        self._num_columns = self.inputs["position_ids"].shape[1]  # s; 1 on a rank without tokens
        if self._labels is not None and wanted.own_outputs:
            self.inputs["labels"] = self._labels

    def _expect_supported(self) -> None:
        """Refuse a model with an auxiliary loss of routers, which is no result of tokens. Raises `ModelError`."""
        model = self._model.pretrained
        if adds_router_loss(model):
            raise ModelError(
                f"{type(model).__name__} adds a loss of its routers, and a sharded call puts results of "
                "tokens together only. Set output_router_logits to false in its configuration."
            )

    def _expect_cuttable(self, arguments: Batch) -> None:
        """Refuse a call whose results would differ from those of one process. Raises `BatchError`, `ModelError`."""
        _expect_cuttable(type(self._model.pretrained).__name__, arguments, self._replica, self._kept_logits)

    def note_hidden_state(self, hidden: Tensor) -> None:
        """Keep the output of the last layer, [B, s, D], if the caller requested it."""
        if self._wanted.hidden_state:
            self._hidden = hidden

    def put_together(self, outputs: Any) -> Any:
        """Return the results of the whole batch, gathered from all ranks of the replica.

        Args:
            outputs: of the model, for this rank's shard.

        Raises:
            ModelError: the outputs are a tuple, or an entry does not have one result for each token.

        Caller: every rank of the replica.
        Collectives: one all_gather for each result of tokens, one all_reduce of two numbers for a loss.
        """
        self._expect_named(outputs)
        if not self._wanted.own_outputs:
            return self._token_results(outputs)
        one_shorter = type(outputs).__name__ in self._wanted.shorter_outputs
        results = {name: self._gather_entry(name, entry, one_shorter) for name, entry in outputs.items()}
        if results.get("loss") is not None and self._model.model_loss.custom_function and self._labels is not None:
            results["loss"] = loss_by_own_function(
                self._model.pretrained,
                outputs.logits,
                self._labels,
                self._placement,
                self._replica,
                self._model.model_loss.moves_labels,
                self._num_items,
            )
        return type(outputs)(**{name: entry for name, entry in results.items() if entry is not None})

    def _expect_named(self, outputs: Any) -> None:
        """Refuse outputs whose entries have no names. Raises `ModelError`."""
        if not isinstance(outputs, ModelOutput):
            raise ModelError(
                f"a sharded call of {type(self._model.pretrained).__name__} returned a {type(outputs).__name__}, whose "
                "entries have no names. Leave out return_dict=False."
            )

    def _agree_on_batch(self, arguments: Batch) -> PlacedBatch:
        """Divide the batch among the ranks, and check by fingerprints that all ranks of the replica have the same one.

        Raises:
            BatchError: with the entry that differs between ranks.
        """
        replica = self._replica
        placed: list[PlacedBatch] = []

        def read_and_place() -> dict[str, str]:
            self._expect_cuttable(arguments)
            batch = read_batch(self._model.complete(arguments), keep_labels=not self._model.model_loss.moves_labels)
            placed.append(place(stream_placement, replica.schedule, batch))
            return placed[0].fingerprints()

        fingerprints_by_rank = on_all_ranks(read_and_place, replica.sp_group)
        names: set[str] = set()
        for fingerprints in fingerprints_by_rank:
            names.update(fingerprints)
        for name in sorted(names):
            values = [fingerprints.get(name, "absent") for fingerprints in fingerprints_by_rank]
            if len(set(values)) > 1:
                raise BatchError(
                    f"a sharded call needs the same whole batch on all ranks of a replica, but {name} by rank is "
                    f"{values} (ranks {list(replica.ranks)}). Seed the code that draws or generates batches alike on "
                    "all ranks."
                )
        return placed[0]

    def _gather(self, part: Tensor) -> Tensor:
        """Gather the tokens of all ranks: [B, s, ...] -> [B, L, ...]. Collectives: one all_gather."""
        return gather_tokens(part, self._placement, self._replica)

    def _gather_entry(self, name: str, entry: Any, one_shorter: bool) -> Any:
        """Gather one entry of the model's outputs: [B, s, ...] -> [B, L, ...]."""
        if name == "loss":
            return self._loss_of_batch(entry)
        if name == "logits":
            return self._gather_logits(entry)
        if isinstance(entry, tuple):
            return tuple(self._gather_entry(name, part, one_shorter) for part in entry)
        if not isinstance(entry, Tensor):
            return entry
        if entry.dim() < 2 or entry.shape[1] != self._num_columns:
            raise ModelError(
                f"{type(self._model.pretrained).__name__} returns {name} of shape {list(entry.shape)}, which is not "
                f"one result per token ([B, s, ...] with s={self._num_columns} here), so a sharded call cannot gather "
                "it. Call the model so that it does not return it."
            )
        all_tokens = self._gather(entry)
        return all_tokens[:, :-1] if one_shorter else all_tokens

    def _loss_of_batch(self, mean: Tensor) -> Tensor | None:
        """Return the mean over the replica's labels, from the mean over this rank's labels; None without labels."""
        if self._labels is None:
            return None
        return mean_over_replica(mean, self._labels.ne(IGNORE_INDEX).sum(), self._replica, self._num_items)

    def _gather_logits(self, logits: Tensor) -> Tensor | None:
        """Gather logits, [B, s, V] -> [B, L, V]; None if they are not requested. Warn if they are large."""
        if not (self._wanted.logits or self._wanted.on_request):
            return None
        rows, _, vocabulary = logits.shape
        num_bytes = rows * self._placement.length * vocabulary * logits.element_size()
        if num_bytes >= LARGE_LOGITS_BYTES and dist.get_rank() == 0:
            logger.warning(
                "every rank gathers the logits of the whole batch: %.1f GB for [%d, %d, %d]. "
                "handle.sharded_call returns log-probabilities of labels without them.",
                num_bytes / 1e9,
                rows,
                self._placement.length,
                vocabulary,
            )
        all_logits = self._gather(logits)
        return all_logits[:, -self._kept_logits :] if self._kept_logits else all_logits

    def _token_results(self, outputs: ModelOutput) -> TokenResults:
        """Gather the requested results; loss and log-probabilities only if there are labels."""
        results = TokenResults()
        logits = outputs.get("logits")
        if self._labels is not None:
            if logits is None:
                raise ModelError(
                    f"{type(self._model.pretrained).__name__} returns no logits, from which a sharded call computes "
                    "the loss of labels. Leave labels out of the call, and compute the loss from its outputs."
                )
            log_probs = self._gather(token_log_probs(logits, self._labels))
            num_labels = self._num_items
            if num_labels is None:
                num_labels = self._gather(self._labels.ne(IGNORE_INDEX)).sum().clamp(min=1)
            results["loss"] = -log_probs.sum() / num_labels
            # At position i of the shifted labels is the label i + 1.
            is_shifted = self._model.model_loss.moves_labels
            results["log_probs"] = nn.functional.pad(log_probs[:, :-1], (1, 0)) if is_shifted else log_probs
        if self._hidden is not None:
            results["hidden_state"] = self._gather(self._hidden)
        if logits is not None and self._wanted.logits:
            results["logits"] = self._gather_logits(logits)
        return results


def whole_results(model: Any, batch: Batch, wanted: Wanted) -> TokenResults:
    """Return the same results as a sharded call, from a model that is not sharded."""
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


def _shard_of(placed: PlacedBatch, rank: int) -> Entries:
    """Return the shard of a rank, on the device of the batch. Gradients flow from it to the tensors of the batch."""
    batch: WholeBatch = placed.batch
    intervals = placed.placement.intervals(rank)
    shard = {name: _cut_intervals(tensor, intervals) for name, tensor in batch.sequences.items()}
    tokens = shard["input_ids"] if "input_ids" in shard else shard["inputs_embeds"]
    shard["position_ids"] = attach(shard["position_ids"].to(tokens.device), ShardInfo(placement=placed.placement))
    return {**shard, **batch.constants, **batch.objects}


def _cut_intervals(tensor: Tensor, intervals: tuple[tuple[int, int], ...]) -> Tensor:
    """Return the entries of a tensor at the positions in ``intervals``: [B, L, ...] -> [B, s, ...]."""
    parts = [tensor[:, start:stop] for start, stop in intervals] or [tensor[:, :0]]
    return torch.cat(parts, dim=1)


def _labels_of_all_tokens(entries: Batch, kept_logits: int) -> Tensor:
    """Return the labels, with columns of -100 in front if there are labels only for the logits that are kept.

    Of k kept logits and k labels, a model compares the first k - 1 logits with the last k - 1 labels. So the first
    label does not count: with k = 3, labels 5 6 7 of 5 tokens become -100 -100 -100 6 7.
    """
    labels: Tensor = entries["labels"]
    num_tokens = entries["input_ids"].shape[1] if "input_ids" in entries else entries["inputs_embeds"].shape[1]
    if labels.shape[1:] != (kept_logits,) or kept_logits == num_tokens:
        return labels
    return nn.functional.pad(labels[:, 1:], (num_tokens - kept_logits + 1, 0), value=IGNORE_INDEX)


def _expect_cuttable(model: str, arguments: Batch, replica: Replica, kept_logits: Any) -> None:
    """Refuse a call whose results would differ from those of one process. Raises `BatchError` and `ModelError`.

    Args:
        model: name of the model's class.
        kept_logits: the argument ``logits_to_keep``.
    """
    if replica.batch_split is not None:
        raise BatchError(
            f"a sharded call of {model} weighs replicas alike, but these take different batches "
            f"({replica.batch_split}). Give all replicas the same micro_batch_size and micro_batches."
        )
    if arguments.get("output_router_logits"):
        raise ModelError(
            f"output_router_logits=True of {model} asks for a router loss, which is not a mean over tokens. Set "
            "router_aux_loss_coef to 0 in the model's config."
        )
    expect_number_of_logits(model, kept_logits)


def expect_number_of_logits(model: str, kept_logits: Any) -> None:
    """Refuse a ``logits_to_keep`` that is not a number of last positions. Raises `ModelError`."""
    if not isinstance(kept_logits, int):
        raise ModelError(
            f"logits_to_keep of a sharded call of {model} must be a number of last positions, got a "
            f"{type(kept_logits).__name__}."
        )
