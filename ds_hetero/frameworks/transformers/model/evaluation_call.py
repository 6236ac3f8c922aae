"""A forward of an evaluation: a sharded call that computes the loss as in training, and gathers results lazily.

The model gets the whole batch, as in one process, and runs on this rank's shard. `ShardedCall` gathers all results at
once, but this class gathers each result when it is first read. If only the loss is read, the forward needs no more
memory than one of training: for the logits of the shard, or with ``"tile_tokens"`` for those of a tile.

    model                                                       loss
    shifts labels, calls a loss function of transformers        cross entropy of this rank's logits, or of tiles
    does not shift labels                                       mean over the ranks of the model's losses of shards
    has a custom loss function                                  `loss_by_own_function`
    TRL's fused head (``fused_lm_head``)                        mean over the ranks of TRL's losses of shards

Dimension key: B batch, L tokens of the sequence, s tokens of this rank, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.utils import ModelOutput

from ds_hetero.engine.forward_mode import Wanted
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.own_loss import loss_by_own_function
from ds_hetero.frameworks.transformers.model.results_on_request import results_on_request
from ds_hetero.frameworks.transformers.model.sharded_call import ShardedCall, SplitTransformer, expect_number_of_logits
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch, Entries
from ds_hetero.runtime.loss import cross_entropy_sum, mean_over_replica, sequence_parallel_loss

_FUSED_HEAD = "fused_lm_head"  # an argument that TRL adds to forwards


class EvaluationCall(ShardedCall):
    """One forward of an evaluation. Arguments, callers and errors: see `ShardedCall`.

    Collectives: those of `ShardedCall` for the batch; one all_reduce of two numbers for the loss; one all_gather for
        each result that is read.
    """

    def __init__(self, model: SplitTransformer, arguments: Batch, wanted: Wanted) -> None:
        super().__init__(model, arguments, wanted)
        self._is_fused = bool(arguments.get(_FUSED_HEAD))
        self._computes_loss = not self._is_fused and _is_cross_entropy(model)  # here, not in the model
        if self._computes_loss and self._labels is not None:
            for name in ("labels", "shift_labels"):
                self.inputs.pop(name, None)
        self._loss_sum: Callable[[], Tensor] | None = None
        self._all_logits: Callable[[], Tensor] | None = None

    @property
    def may_be_tiled(self) -> bool:
        """True if logits are needed for nothing but the loss, so that they can be computed in tiles."""
        return self._computes_loss and self._labels is not None and not self._wanted.logits

    @property
    def arguments_of_tiles(self) -> Entries:
        """The shard's inputs, with ``shift_labels``, by which tiles compute the loss."""
        return {**self.inputs, "shift_labels": self._labels}

    def note_tiles(self, loss_sum: Callable[[], Tensor], all_logits: Callable[[], Tensor]) -> None:
        """Take functions that compute the loss and the logits, since the forward computed no logits.

        Args:
            loss_sum: computes the sum of this rank's token losses.
            all_logits: computes the logits [B, s, V].
        """
        self._loss_sum = loss_sum
        self._all_logits = all_logits

    def _expect_supported(self) -> None:
        pass  # the auxiliary loss of routers is computed over the whole replica, see `router_losses`

    def _expect_cuttable(self, arguments: Batch) -> None:
        # Different batches of replicas are for training only; an evaluation does not weigh replicas by them.
        expect_number_of_logits(type(self._model.pretrained).__name__, self._kept_logits)

    def put_together(self, outputs: Any) -> Any:
        """Return the outputs with the loss of the whole batch, and with lazy entries for all other results.

        If logits are requested, all results are gathered at once.

        Raises:
            ModelError: the outputs are a tuple.
        """
        self._expect_named(outputs)
        one_shorter = type(outputs).__name__ in self._wanted.shorter_outputs
        loss = self._loss_of_evaluation(outputs)
        loss_entry = {} if loss is None else {"loss": loss}
        gather_by_name: dict[str, Callable[[], Any]] = {}  # functions that gather an entry
        for name, entry in outputs.items():
            if name != "loss" and entry is not None:
                gather_by_name[name] = functools.partial(self._gather_output, name, entry, one_shorter)
        if not self._wanted.logits:
            return results_on_request(type(outputs), loss_entry, gather_by_name)
        if self._wanted.of_sequence is not None and list(gather_by_name) == ["logits"]:
            apply = functools.partial(self._apply_by_sequence, outputs["logits"], self._wanted.of_sequence)
            gather_by_name["logits"] = apply
        return type(outputs)(**loss_entry, **{name: gather() for name, gather in gather_by_name.items()})

    def _gather_output(self, name: str, entry: Any, one_shorter: bool) -> Any:
        """Gather one entry of the outputs: [B, s, ...] -> [B, L, ...]."""
        if name == "logits" and self._all_logits is not None:
            entry = self._all_logits()
        if isinstance(entry, tuple):
            return tuple(self._gather_output(name, part, one_shorter) for part in entry)
        if isinstance(entry, Tensor) and not entry.dim():  # one number for the whole batch
            return entry
        num_tokens = self._rows * self._num_columns
        if isinstance(entry, Tensor) and entry.dim() == 2 and entry.shape[0] == num_tokens != self._rows:
            by_token = entry.reshape(self._rows, self._num_columns, -1)  # router logits are [B s, experts]
            return self._gather_entry(name, by_token, one_shorter).flatten(0, 1)
        return self._gather_entry(name, entry, one_shorter)

    @property
    def _rows(self) -> int:
        """Rows of the batch, B."""
        return int(self.inputs["position_ids"].shape[0])

    def _apply_by_sequence(self, logits: Tensor, of_sequence: Callable[[Tensor, int], Any]) -> Any:
        """Apply ``of_sequence`` to the logits [1, L, V] of one sequence after the other, and join the results.

        So only the logits of one sequence, not those of the batch, are gathered at a time.
        """
        results = []
        for row in range(self._rows):
            logits_of_row = self._gather_logits(logits[row : row + 1])
            assert logits_of_row is not None
            results.append(of_sequence(logits_of_row, row))
        return _join_results(results)

    def _loss_of_evaluation(self, outputs: ModelOutput) -> Tensor | None:
        """Return the sum of all token losses of the batch, divided by its labels or by ``num_items_in_batch``.

        None if the batch has no labels, or the model returns no loss.
        """
        if self._labels is None:
            return None
        term = self._model.model_loss.router_term(outputs)
        num_tokens = self._labels.ne(IGNORE_INDEX).sum()
        if self._computes_loss:
            token_sum = self._sum_of_losses(outputs)
            loss = sequence_parallel_loss(token_sum, num_tokens, self._replica, num_labels=self._num_items)
        else:
            mean = outputs.get("loss")
            if mean is None:
                return None
            if self._model.model_loss.custom_function and not self._is_fused:
                loss = loss_by_own_function(
                    self._model.pretrained,
                    outputs.logits,
                    self._labels,
                    self._placement,
                    self._replica,
                    self._model.model_loss.moves_labels,
                    self._num_items,
                )
            else:
                loss = mean_over_replica(mean - term, num_tokens, self._replica, self._num_items)
        return loss + (term if self._num_items is None else term / self._wanted.num_replicas)

    def _sum_of_losses(self, outputs: ModelOutput) -> Tensor:
        """Return the sum of this rank's token losses."""
        if self._loss_sum is not None:
            return self._loss_sum()
        assert self._labels is not None
        logits = outputs.get("logits")
        if logits is None:
            raise ModelError(
                f"{type(self._model.pretrained).__name__} returns no logits, from which an evaluation over shards "
                'computes the loss. Evaluate it on whole sequences: set "evaluation" of the "heterogeneity" section to '
                '"whole".'
            )
        return cross_entropy_sum(logits, self._labels)


def _is_cross_entropy(model: SplitTransformer) -> bool:
    """Return True if the model's loss is the mean cross entropy of next tokens, computed from its logits."""
    if not model.model_loss.moves_labels:
        return False
    function = getattr(model.pretrained, "loss_function", None)
    return function is LOSS_MAPPING["ForCausalLM"] or not _calls_loss_function(type(model.pretrained))


@functools.cache
def _calls_loss_function(model_class: type) -> bool:
    """Return True if the forward of a class calls ``self.loss_function``, which takes shifted labels.

    A forward that computes its loss itself would shift the shifted labels of a shard once more.
    """
    try:
        return "loss_function" in inspect.getsource(model_class.forward)  # type: ignore[attr-defined]
    except (OSError, TypeError):  # a function without source, such as from exec
        return True


def _join_results(results: list[Any]) -> Any:
    """Join the results of B sequences, each [1, ...] or a tuple of such tensors, to [B, ...]. Raises `ModelError`."""
    first = results[0]
    if isinstance(first, tuple | list):
        return type(first)(_join_results(list(parts)) for parts in zip(*results, strict=True))
    if not isinstance(first, Tensor) or not first.dim() or first.shape[0] != 1:
        shape = list(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise ModelError(
            "preprocess_logits_for_metrics is called for one sequence at a time, [1, L, V], if an evaluation runs over "
            f"shards, and has to return results of one sequence, [1, ...]; got {shape}. If it needs a whole batch, set "
            '"evaluation" of the "heterogeneity" section to "whole".'
        )
    return torch.cat(results)
