"""Models that count positions in a way of their own where a batch has none: RoBERTa and its kin, ESM, OPT.

RoBERTa numbers the tokens that are no padding from ``padding_idx + 1`` on, OPT those that its mask leaves from 0 on.
Each needs the whole sequence, so positions are made by the model's own functions before a batch is cut, and travel as
if the batch had had them.

Rotary embeddings whose frequencies depend on the length of the sequence (``dynamic``, ``longrope``), on shards.

transformers takes the largest position that a rotary module is given for the length. During a sharded forward it is
given one more position, the largest of the whole batch, whose angles are taken off again. So frequencies are those of
one process, to the bit, by the module's own code.

NEFTune on a shard: embeddings get noise of the size that they would get in the whole sequence.

NEFTune (arXiv:2310.05914) adds noise uniform in +- alpha / sqrt(L D) to embeddings [B, L, D] while a model trains. Its
hooks, transformers' and those that follow it, take L from the embeddings that they see and alpha from an attribute of
the embedding module. On a shard of s tokens, alpha sqrt(s / L) makes it the noise of the whole sequence.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hetero.errors import BatchError, ConfigError
from ds_hetero.runtime.backends import message_device
from ds_hetero.runtime.data.shards import Batch, Entries
from ds_hetero.runtime.replica import Replica

_BY_PADDING = "create_position_ids_from_input_ids"  # of an embedding, or of its file


def position_counter(decoder: nn.Module) -> Callable[[Batch], Tensor] | None:
    """Maker of ``position_ids`` [B, L] of a whole batch as ``decoder`` does; None if these are 0 .. L - 1."""
    embeddings, learned = getattr(decoder, "embeddings", None), getattr(decoder, "embed_positions", None)
    if isinstance(embeddings, nn.Module) and hasattr(embeddings, "position_embeddings"):
        file = sys.modules[type(embeddings).__module__]
        count = getattr(embeddings, _BY_PADDING, None) or getattr(file, _BY_PADDING, None)
        return None if count is None else lambda batch: _by_padding(embeddings, count, batch)
    if learned is not None and next(iter(inspect.signature(learned.forward).parameters), None) == "attention_mask":
        return _by_mask
    return None


def with_positions(count: Callable[[Batch], Tensor] | None, batch: Any) -> Any:
    """The batch with ``position_ids`` if the model makes its own. Raises `BatchError`: padding without a mask."""
    tokens = batch.get("input_ids", batch.get("inputs_embeds")) if isinstance(batch, Mapping) else None
    if count is None or batch.get("position_ids") is not None or not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return batch
    positions = count(batch)
    if batch.get("attention_mask") is None and bool(positions.diff().ne(1).any()):
        raise BatchError(
            "input_ids hold padding tokens, from which the model counts its positions, and there is no attention_mask "
            "that tells of them. Give the model its attention_mask, or position_ids."
        )
    return {**batch, "position_ids": positions}


def _by_padding(embeddings: Any, count: Callable[..., Tensor], batch: Batch) -> Tensor:
    padding = embeddings.padding_idx
    if batch.get("input_ids") is not None:
        return count(batch["input_ids"], padding)
    rows, length = batch["inputs_embeds"].shape[:2]
    return torch.arange(padding + 1, length + padding + 1).expand(rows, -1)


def _by_mask(batch: Batch) -> Tensor:
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    mask = batch.get("attention_mask")
    real = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device) if mask is None else mask.long()
    return (real.cumsum(1) - 1).clamp(min=0)  # of padding any, as its attention is another's here in any case


LENGTH_DEPENDENT = ("dynamic", "longrope")  # parts of the names of rope types


def depends_on_length(module: nn.Module) -> bool:
    """Whether ``module`` is a rotary embedding of such a type, or of several by type of layer with such among them."""
    kinds = getattr(module, "rope_type", None)
    by_layer = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and any(name in kind for name in LENGTH_DEPENDENT) for kind in by_layer)


class RopeLength:
    """Tells the rotary modules of a model's ``decoder`` how long its sequences are, while a sharded forward runs."""

    def __init__(self, decoder: nn.Module) -> None:
        self._modules = [module for module in decoder.modules() if depends_on_length(module)]
        self._last: int | None = None  # largest position of the batch, during a forward
        self._hooks: list[Any] = []
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after))

    def begin(self, positions: Tensor, replica: Replica) -> None:
        """A forward on a shard begins.

        Args:
            positions: of the shard, [B, s] or [axes, B, s].

        Caller: every rank of the replica.
        Collectives: one all_reduce of one integer, for a model that has such modules.
        """
        if self._modules:
            last = positions.max().reshape(1).to(message_device(replica.sp_group), torch.int64)
            dist.all_reduce(last, dist.ReduceOp.MAX, group=replica.sp_group)
            self._last = int(last)

    def end(self) -> None:
        """The forward is over."""
        self._last = None

    def restore(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Entries) -> Any:
        if self._last is None:
            return args, kwargs
        positions: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = positions.new_full((*positions.shape[:-1], 1), self._last)
        longer = torch.cat([positions, last], dim=-1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def _after(self, module: nn.Module, args: object, output: Any) -> Any:
        if self._last is None:
            return output
        if isinstance(output, Tensor):  # [..., s + 1, D], complex
            return output[..., :-1, :]
        return tuple(angles[..., :-1, :] for angles in output)  # cosines and sines


_ALPHA = "neftune_noise_alpha"


def scale_noise(embeddings: nn.Module | None, tokens: int, length: int) -> Callable[[], None]:
    """Let a forward on a shard add the noise of the whole sequence; return the call that puts the amplitude back.

    Args:
        embeddings: the model's input embeddings; without NEFTune nothing happens.
        tokens: s, what the embeddings will see; at least 1.
        length: L, of the whole sequence.
    """
    alpha = getattr(embeddings, _ALPHA, None)
    if embeddings is None or not alpha:
        return _do_nothing
    setattr(embeddings, _ALPHA, alpha * (tokens / length) ** 0.5)
    return lambda: setattr(embeddings, _ALPHA, alpha)


def expect_no_noise(embeddings: nn.Module | None) -> None:
    """Refuse NEFTune, whose noise depends on a row's length, where rows become one stream. Raises `ConfigError`."""
    if getattr(embeddings, _ALPHA, None):
        raise ConfigError(
            f'{_ALPHA} and "placement": "documents" do not go together: noise is sized by the length of a padded row, '
            'and rows are put behind each other. Use "placement": "stream", or no noise.'
        )


def _do_nothing() -> None:
    pass
