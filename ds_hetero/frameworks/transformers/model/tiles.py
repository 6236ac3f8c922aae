"""Compute the MLPs and the loss of a shard in tiles of tokens, to save the memory of wide activations and logits.

Only the input of a tile is saved; the tile is computed again in the backward. With non-reentrant checkpointing of
layers, the layer's recomputation stops at the input of the MLP, the last tensor that it saves, so tiles are not
computed a third time.

The loss of a tile comes from the model's own ``forward``, with a stand-in for the decoder that returns the tile's
hidden states. So whatever the model does to its logits (scales, caps) is part of it.

Every rank has as many tiles as the rank with the most tokens, because ZeRO-3 gathers parameters in each tile, which is
collective. For example, with 1024 tokens a tile, ranks with 3000 and 100 tokens have 3 tiles each: of 1000 tokens, and
of 34, 33 and 33. Tiles of a rank with fewer tokens than tiles may be empty.

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
    """Tiles of one model with a language head; `close` removes them.

    Args:
        model: a PreTrainedModel whose child is the decoder.
        tokens: of a sequence in a tile, at most.

    Raises:
        ModelError: the model cannot be tiled.
    """

    def __init__(self, model: Any, decoder: nn.Module, tokens: int) -> None:
        self._model = model
        self._tokens = tokens
        self._count = 1  # tiles of the present forward
        self._is_in_shard = False
        self._decoder_name = next((name for name, child in model.named_children() if child is decoder), None)
        self._mlps = [module for name, module in decoder.named_modules() if _is_mlp(name, module)]
        has_head = model.get_output_embeddings() is not None
        # `without_logits` needs the argument.
        takes_logits_to_keep = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        if self._decoder_name is None or not has_head or not self._mlps or not takes_logits_to_keep:
            raise ModelError(
                f'"tile_tokens": {tokens}: {type(model).__name__} does not have a decoder with plain MLPs and a head '
                "for language behind it, which are what can be computed in tiles. Leave the key out."
            )
        for mlp in self._mlps:
            mlp.forward = partial(self._run_mlp, type(mlp).forward, mlp)

    def close(self) -> None:
        """Restore the ``forward`` of the MLPs."""
        for mlp in self._mlps:
            del mlp.forward

    def begin(self, rank_tokens: tuple[int, ...]) -> None:
        """Start a forward on shards. ``rank_tokens``: tokens of a sequence on every rank."""
        self._count = max(1, -(-max(rank_tokens) // self._tokens))
        self._is_in_shard = True

    def end(self) -> None:
        """End the decoder's part of the forward. The backward may still compute its tiles again."""
        self._is_in_shard = False

    def without_logits(self, arguments: Batch) -> Entries:
        """Return arguments with which the model computes empty logits, [B, 0, V]."""
        return {**arguments, "logits_to_keep": torch.zeros(0, dtype=torch.int64)}

    def loss_sum(self, run: Function, made: ModelOutput, batch: Batch) -> Tensor:
        """Return the sum of this rank's token losses in fp32. Arguments: see `sums`."""
        return self.sums(run, made, batch, lambda logits, labels: (cross_entropy_sum(logits, labels),))[0]

    def sums(
        self, run: Function, made: ModelOutput, batch: Batch, of_logits: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Sum the results of a function of the logits over all tiles.

        Args:
            made: output of the decoder for the shard, with hidden states [B, s, D].
            batch: the shard, with ``shift_labels`` [B, s] and ``input_ids`` [B, s] or ``inputs_embeds``.
            of_logits: called with logits and labels of every tile, and again in the backward.
        """
        hidden = made[0]
        names = [name for name in ("input_ids", "inputs_embeds", "position_ids") if batch.get(name) is not None]
        columns = [hidden, batch["shift_labels"], *(batch[name] for name in names)]  # each [B, s, ...]

        def of_tile(hidden: Tensor, labels: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            decoder_output = type(made)(last_hidden_state=hidden)
            outputs = self._run_head(run, decoder_output, dict(zip(names, inputs, strict=True)))
            return of_logits(outputs.logits, labels)

        columns_in_tiles = [torch.split(column, self._sizes(column), 1) for column in columns]
        results = [
            checkpoint(of_tile, *tile, use_reentrant=False, preserve_rng_state=False)
            for tile in zip(*columns_in_tiles, strict=True)
        ]
        return tuple(torch.stack(result_of_tiles).sum(dim=0) for result_of_tiles in zip(*results, strict=True))

    def logits(self, run: Function, made: ModelOutput, batch: Batch) -> Tensor:
        """Return the logits of the shard without tiles, [B, s, V]. Arguments: see `sums`."""
        names = ("input_ids", "inputs_embeds", "position_ids")
        inputs = {name: batch[name] for name in names if batch.get(name) is not None}
        logits: Tensor = self._run_head(run, made, inputs).logits
        return logits

    def _run_head(self, run: Function, made: ModelOutput, inputs: Mapping[str, Tensor]) -> Any:
        """Run the model's ``forward`` with a stand-in for the decoder that returns ``made``."""
        assert self._decoder_name is not None
        modules = self._model._modules
        decoder = modules[self._decoder_name]
        modules[self._decoder_name] = _Returning(made)
        try:
            return run(**inputs, use_cache=False)
        finally:
            modules[self._decoder_name] = decoder

    def _run_mlp(self, plain: Callable[..., Tensor], mlp: nn.Module, x: Tensor) -> Tensor:
        """Replace an MLP's ``forward``, ``plain``: x [B, s, D] in tiles; whole sequences, as in generation, without."""
        is_whole = not torch.is_grad_enabled() and not self._is_in_shard
        if self._count == 1 or x.dim() != 3 or is_whole:
            return plain(mlp, x)
        sizes = self._sizes(x)
        if not torch.is_grad_enabled():
            return torch.cat([plain(mlp, tile) for tile in torch.split(x, sizes, 1)], dim=1)
        if not x.requires_grad:
            run_tile = partial(plain, mlp)
            results = [checkpoint(run_tile, tile, use_reentrant=False) for tile in torch.split(x, sizes, 1)]
            return torch.cat(results, dim=1)
        # A checkpoint saves its tensor arguments. If each tile were one, a checkpointed layer would see tensors that
        # are saved inside the MLP, and compute all tiles again to get them. So the whole input is saved once, by
        # `_Saved`, and checkpoints get tiles in lists, which they do not look into. The first run pops the tile from
        # its list; the one in the backward finds the list empty and takes the tile from the saved input.
        saved: Tensor = _Saved.apply(x)  # type: ignore[no-untyped-call]
        node = saved.grad_fn  # unlike ``saved``, it keeps no tensor alive
        on_device = x.new_empty(0)  # tells the checkpoint which device's random state to save

        def run(index: int, tile: list[Tensor], _: Tensor) -> Tensor:
            first_run_tile = tile.pop() if tile else torch.split(_Saved.input_of(node), sizes, 1)[index]
            return plain(mlp, first_run_tile)

        # With hooks of its own, what the tiles' checkpoints save is not counted by the layer's checkpoint.
        with saved_tensors_hooks(_same, _same):
            results = [
                checkpoint(run, index, [tile], on_device, use_reentrant=False)
                for index, tile in enumerate(torch.split(saved, sizes, 1))
            ]
        return torch.cat(results, dim=1)

    def _sizes(self, x: Tensor) -> list[int]:
        """Return the tokens of every tile of x [B, s, ...]: 7 tokens in 3 tiles are 3, 2, 2.

        Give them to `torch.split`, whose backward concatenates. The gradient of a slice would be as long as x.
        """
        tokens, remainder = divmod(x.shape[1], self._count)
        return [tokens + (index < remainder) for index in range(self._count)]


def _same(x: Tensor) -> Tensor:
    return x


class _Saved(torch.autograd.Function):
    """The identity, which saves its input: the last tensor that a checkpointed layer saves before the tiles."""

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
        """Return the saved input of a node. A checkpoint hands it out only once per backward, so it is stored."""
        if node.input is None:
            (node.input,) = node.saved_tensors
        saved: Tensor = node.input
        return saved


class _Returning(nn.Module):
    """A stand-in for the decoder that returns a given output."""

    def __init__(self, made: ModelOutput) -> None:
        super().__init__()
        self._made = made

    def forward(self, *args: object, **kwargs: object) -> ModelOutput:
        return self._made


def _is_mlp(name: str, module: nn.Module) -> bool:
    """Return True for the MLP of a layer whose parameters are all in linear layers; False for a mixture of experts."""
    if name.rpartition(".")[2] not in _MLP_NAMES:
        return False
    parts = list(module.modules())
    if any(isinstance(part, nn.ModuleList) for part in parts):  # of experts
        return False
    parts_with_weights = [part for part in parts if next(part.parameters(recurse=False), None) is not None]
    return len(parts_with_weights) > 1 and all(isinstance(part, nn.Linear) for part in parts_with_weights)
