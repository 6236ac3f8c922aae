"""MLPs and the loss of a shard tile by tile, so that neither the MLP's wide activations nor the logits exist whole.

A tile is computed again in the backward, and only its input is kept. A layer that is checkpointed without reentrance
ends its own recomputation at the input of the MLP, if nothing behind the MLP keeps more: tiles are not computed a
third time for it. The loss of a tile comes from the model's own ``forward`` with a stand-in for the decoder, which
returns the tile's hidden states: whatever the model does to its logits (scales, caps) is in it. Every rank has as many
tiles as the one with the most tokens, since under ZeRO-3 each of them gathers parameters; tiles of few tokens may be
empty.

Dimension key: B batch, s this rank's tokens, D hidden size, V vocabulary.
Source: tiled computation of ALST (arXiv:2506.13996, section 3.1), here on uneven shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from ds_hetero.engine.patching import Function
from ds_hetero.errors import ModelError
from ds_hetero.runtime.data.shards import Batch, Entries
from ds_hetero.runtime.loss import cross_entropy_sum

_MLP_NAMES = ("mlp", "feed_forward", "shared_mlp")


class Tiles:
    """Tiles of one model with a language head; `close` takes them out. Raises `ModelError`: it cannot be tiled."""

    def __init__(self, model: Any, decoder: nn.Module, tokens: int) -> None:
        self._model, self._tokens, self._count = model, tokens, 1
        self._is_in_shard = False
        self._place = next((name for name, child in model.named_children() if child is decoder), None)
        self._mlps = [module for name, module in decoder.named_modules() if _is_mlp(name, module)]
        keeps_few = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        if self._place is None or model.get_output_embeddings() is None or not self._mlps or not keeps_few:
            raise ModelError(
                f'"tile_tokens": {tokens}: {type(model).__name__} does not have a decoder with plain MLPs and a head '
                "for language behind it, which are what can be computed in tiles. Leave the key out."
            )
        for mlp in self._mlps:
            mlp.forward = partial(self._run_mlp, type(mlp).forward, mlp)

    def close(self) -> None:
        """Give the MLPs the ``forward`` that they had."""
        for mlp in self._mlps:
            del mlp.forward

    def begin(self, rank_tokens: tuple[int, ...]) -> None:
        """A forward begins in which the ranks hold so many tokens."""
        self._count = max(1, -(-max(rank_tokens) // self._tokens))
        self._is_in_shard = True

    def end(self) -> None:
        """The decoder has run the forward that `begin` began; a backward may run its tiles again."""
        self._is_in_shard = False

    def without_logits(self, arguments: Batch) -> Entries:
        """Arguments with which the model computes no logits: [B, 0, V]."""
        return {**arguments, "logits_to_keep": torch.zeros(0, dtype=torch.int64)}

    def loss_sum(self, run: Function, made: ModelOutput, batch: Batch) -> Tensor:
        """Token losses of this rank added up, fp32. The arguments are those of `sums`."""
        return self.sums(run, made, batch, lambda logits, labels: (cross_entropy_sum(logits, labels),))[0]

    def sums(
        self, run: Function, made: ModelOutput, batch: Batch, of_logits: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Results of a function of the logits of a tile, added up over the tiles.

        Args:
            made: what the decoder returned for the shard, [B, s, D].
            batch: the shard, with ``shift_labels`` [B, s] and ``input_ids`` [B, s] or ``inputs_embeds``.
            of_logits: called with logits and labels of every tile, and again in the backward.
        """
        hidden = made[0]
        names = [name for name in ("input_ids", "inputs_embeds", "position_ids") if batch.get(name) is not None]
        columns = [hidden, batch["shift_labels"], *(batch[name] for name in names)]

        def of_tile(hidden: Tensor, labels: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            outputs = self._run_head(run, type(made)(last_hidden_state=hidden), dict(zip(names, inputs, strict=True)))
            return of_logits(outputs.logits, labels)

        of_tiles = [
            checkpoint(of_tile, *tile, use_reentrant=False, preserve_rng_state=False)
            for tile in zip(*(torch.split(x, self._sizes(x), 1) for x in columns), strict=True)
        ]
        return tuple(torch.stack(parts).sum(dim=0) for parts in zip(*of_tiles, strict=True))

    def logits(self, run: Function, made: ModelOutput, batch: Batch) -> Tensor:
        """Logits of the shard, [B, s, V], in one piece; the arguments are those of `sums`."""
        inputs = {n: batch[n] for n in ("input_ids", "inputs_embeds", "position_ids") if batch.get(n) is not None}
        logits: Tensor = self._run_head(run, made, inputs).logits
        return logits

    def _run_head(self, run: Function, made: ModelOutput, inputs: Mapping[str, Tensor]) -> Any:
        """The model's ``forward`` behind a decoder that returns ``made``."""
        modules, place = self._model._modules, self._place
        assert place is not None
        decoder, modules[place] = modules[place], _Returning(made)
        try:
            return run(**inputs, use_cache=False)
        finally:
            modules[place] = decoder

    def _run_mlp(self, plain: Callable[..., Tensor], mlp: nn.Module, x: Tensor) -> Tensor:
        """``plain`` of x [B, s, D] in tiles; in one piece of whole sequences, as in generation."""
        if self._count == 1 or x.dim() != 3 or not (torch.is_grad_enabled() or self._is_in_shard):
            return plain(mlp, x)
        sizes = self._sizes(x)
        if not torch.is_grad_enabled():
            return torch.cat([plain(mlp, tile) for tile in torch.split(x, sizes, 1)], dim=1)
        if not x.requires_grad:
            of_tile = partial(plain, mlp)
            return torch.cat(
                [checkpoint(of_tile, tile, use_reentrant=False) for tile in torch.split(x, sizes, 1)], dim=1
            )
        kept: Tensor = _Kept.apply(x)  # type: ignore[no-untyped-call]
        node, like = kept.grad_fn, x.new_empty(0)  # a node keeps no tensor; the other says whose random numbers to keep

        def run(i: int, first: list[Tensor], _: Tensor) -> Tensor:
            return plain(mlp, first.pop() if first else torch.split(_Kept.input_of(node), sizes, 1)[i])

        with saved_tensors_hooks(_same, _same):  # what tiles give to their checkpoints, a layer's does not wait for
            tiles = [
                checkpoint(run, i, [tile], like, use_reentrant=False)
                for i, tile in enumerate(torch.split(kept, sizes, 1))
            ]
        return torch.cat(tiles, dim=1)

    def _sizes(self, x: Tensor) -> list[int]:
        """Tokens of every tile of x [B, s, ...]. Split with these: gradients of slices would each be as long as x."""
        few, more = divmod(x.shape[1], self._count)
        return [few + (i < more) for i in range(self._count)]


def _same(x: Tensor) -> Tensor:
    return x


class _Kept(torch.autograd.Function):
    """The identity, which keeps its input: the last tensor that a checkpointed layer keeps, before any tile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.input = None
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.input = None
        return gradient

    @staticmethod
    def input_of(node: Any) -> Tensor:
        """The input, which a checkpoint gives out once in a backward."""
        if node.input is None:
            (node.input,) = node.saved_tensors
        kept: Tensor = node.input
        return kept


class _Returning(nn.Module):
    """Returns what it was made with."""

    def __init__(self, made: ModelOutput) -> None:
        super().__init__()
        self._made = made

    def forward(self, *args: object, **kwargs: object) -> ModelOutput:
        return self._made


def _is_mlp(name: str, module: nn.Module) -> bool:
    """Whether a module is the MLP of a layer, with weights in linear layers alone."""
    holders = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    return (
        name.rpartition(".")[2] in _MLP_NAMES
        and len(holders) > 1
        and all(isinstance(part, nn.Linear) for part in holders)
        and not any(isinstance(part, nn.ModuleList) for part in module.modules())
    )
