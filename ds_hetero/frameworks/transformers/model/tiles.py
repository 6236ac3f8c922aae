"""Compute the MLPs and the loss of a shard in tiles of tokens, to save the memory of wide activations and logits.

Only the input of a tile is saved, and the tile is computed again in the backward. If layers are checkpointed (without
reentrance), the recomputation of a layer stops at the last tensor that it saves, the input of the MLP. So tiles are not
computed a third time.

The loss of a tile comes from the model's own ``forward``, in which a stand-in for the decoder returns the tile's hidden
states. So the loss includes everything that the model does to its logits, such as scales and caps.

Every rank has as many tiles as the rank with the most tokens, because ZeRO-3 gathers parameters in each tile, which is
collective. Example: with "tile_tokens" 1024, ranks with 3000 and 100 tokens have 3 tiles each, of 1000, 1000 and 1000
tokens and of 34, 33 and 33. If a rank has fewer tokens than tiles, some of its tiles are empty.

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
    """Computes the MLPs and the loss of one model with a language head in tiles; `close` ends this.

    Args:
        model: a PreTrainedModel whose child is the decoder.
        tokens: the most tokens of a sequence in a tile.

    Raises:
        ModelError: the model cannot be tiled.
    """

    def __init__(self, model: Any, decoder: nn.Module, tokens: int) -> None:
        self._model = model
        self._tokens = tokens
        self._num_tiles = 1  # in the present forward
        self._is_in_decoder = False  # True while the decoder computes a shard
        self._decoder_name = next((name for name, child in model.named_children() if child is decoder), None)
        self._mlps = [module for name, module in decoder.named_modules() if _is_mlp(name, module)]
        has_head = model.get_output_embeddings() is not None
        # `arguments_without_logits` needs the argument.
        takes_logits_to_keep = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        if self._decoder_name is None or not has_head or not self._mlps or not takes_logits_to_keep:
            raise ModelError(
                f'"tile_tokens": {tokens}: {type(model).__name__} does not have a decoder with plain MLPs and a '
                "language head behind it. Only these can be computed in tiles. Leave the key out."
            )
        for mlp in self._mlps:
            mlp.forward = partial(self._run_mlp, type(mlp).forward, mlp)

    def close(self) -> None:
        """Restore the ``forward`` of the MLPs."""
        for mlp in self._mlps:
            del mlp.forward

    def begin(self, rank_tokens: tuple[int, ...]) -> None:
        """Begin the decoder's part of a forward on shards. ``rank_tokens``: tokens of a sequence, by rank."""
        self._num_tiles = max(1, -(-max(rank_tokens) // self._tokens))
        self._is_in_decoder = True

    def end(self) -> None:
        """End the decoder's part of a forward. The backward may still compute the tiles again."""
        self._is_in_decoder = False

    def arguments_without_logits(self, arguments: Batch) -> Entries:
        """Return arguments with which the model computes empty logits, [B, 0, V]."""
        return {**arguments, "logits_to_keep": torch.zeros(0, dtype=torch.int64)}

    def loss_sum(self, run: Function, decoder_output: ModelOutput, batch: Batch) -> Tensor:
        """Return the sum of this rank's token losses in fp32. Arguments: see `sums`."""
        return self.sums(run, decoder_output, batch, lambda logits, labels: (cross_entropy_sum(logits, labels),))[0]

    def sums(
        self,
        run: Function,
        decoder_output: ModelOutput,
        batch: Batch,
        compute: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Compute functions of logits and labels in tiles, and add up their results over all tiles.

        Args:
            run: the model's ``forward``.
            decoder_output: for the shard, with hidden states [B, s, D].
            batch: the shard, with ``shift_labels`` [B, s] and ``input_ids`` [B, s] or ``inputs_embeds``.
            compute: called with logits and labels of every tile, and again in the backward.
        """
        hidden = decoder_output[0]
        names = [name for name in ("input_ids", "inputs_embeds", "position_ids") if batch.get(name) is not None]
        columns = [hidden, batch["shift_labels"], *(batch[name] for name in names)]  # each [B, s, ...]

        def compute_tile(hidden: Tensor, labels: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            output_of_tile = type(decoder_output)(last_hidden_state=hidden)
            outputs = self._run_head(run, output_of_tile, dict(zip(names, inputs, strict=True)))
            return compute(outputs.logits, labels)

        tiles_of_columns = [torch.split(column, self._sizes(column), 1) for column in columns]
        results = [
            checkpoint(compute_tile, *tile, use_reentrant=False, preserve_rng_state=False)
            for tile in zip(*tiles_of_columns, strict=True)
        ]
        return tuple(torch.stack(result_of_tiles).sum(dim=0) for result_of_tiles in zip(*results, strict=True))

    def logits(self, run: Function, decoder_output: ModelOutput, batch: Batch) -> Tensor:
        """Return the logits of the shard without tiles, [B, s, V]. Arguments: see `sums`."""
        names = ("input_ids", "inputs_embeds", "position_ids")
        inputs = {name: batch[name] for name in names if batch.get(name) is not None}
        logits: Tensor = self._run_head(run, decoder_output, inputs).logits
        return logits

    def _run_head(self, run: Function, decoder_output: ModelOutput, inputs: Mapping[str, Tensor]) -> Any:
        """Run the model's ``forward`` with a stand-in for the decoder that returns ``decoder_output``."""
        assert self._decoder_name is not None
        modules = self._model._modules
        decoder = modules[self._decoder_name]
        modules[self._decoder_name] = _FixedDecoder(decoder_output)
        try:
            return run(**inputs, use_cache=False)
        finally:
            modules[self._decoder_name] = decoder

    def _run_mlp(self, run_class: Callable[..., Tensor], mlp: nn.Module, x: Tensor) -> Tensor:
        """Replace an MLP's ``forward``: compute x [B, s, D] in tiles.

        A forward on whole sequences without gradients, as in generation, is computed without tiles.

        Args:
            run_class: the ``forward`` of the MLP's class.
        """
        runs_whole = not torch.is_grad_enabled() and not self._is_in_decoder
        if self._num_tiles == 1 or x.dim() != 3 or runs_whole:
            return run_class(mlp, x)
        sizes = self._sizes(x)
        if not torch.is_grad_enabled():
            return torch.cat([run_class(mlp, tile) for tile in torch.split(x, sizes, 1)], dim=1)
        if not x.requires_grad:
            run_tile = partial(run_class, mlp)
            results = [checkpoint(run_tile, tile, use_reentrant=False) for tile in torch.split(x, sizes, 1)]
            return torch.cat(results, dim=1)
        # A checkpoint saves its tensor arguments. If tiles were arguments, the checkpoint of the layer would count them
        # as saved inside the MLP, and compute all tiles again to get them. So `_SaveInput` saves the input once, and
        # the tiles' checkpoints get their tiles in lists, which they do not search for tensors. The first run pops the
        # tile from its list. The run in the backward finds the list empty, and takes the tile from the saved input.
        saved_x: Tensor = _SaveInput.apply(x)  # type: ignore[no-untyped-call]
        node = saved_x.grad_fn  # unlike ``saved_x``, it keeps no tensor alive
        device_example = x.new_empty(0)  # tells the checkpoint which device's random state to save

        def run(index: int, tile: list[Tensor], _: Tensor) -> Tensor:
            x_of_tile = tile.pop() if tile else torch.split(_SaveInput.input_of(node), sizes, 1)[index]
            return run_class(mlp, x_of_tile)

        # Inside these hooks, the layer's checkpoint does not count the tensors that the tiles' checkpoints save.
        with saved_tensors_hooks(_identity, _identity):
            results = [
                checkpoint(run, index, [tile], device_example, use_reentrant=False)
                for index, tile in enumerate(torch.split(saved_x, sizes, 1))
            ]
        return torch.cat(results, dim=1)

    def _sizes(self, x: Tensor) -> list[int]:
        """Return the tokens of every tile of x [B, s, ...]: 7 tokens in 3 tiles are 3, 2, 2.

        They are for `torch.split`, whose backward concatenates gradients; the gradient of a slice is as long as x.
        """
        tokens, remainder = divmod(x.shape[1], self._num_tiles)
        return [tokens + (index < remainder) for index in range(self._num_tiles)]


def _identity(x: Tensor) -> Tensor:
    return x


class _SaveInput(torch.autograd.Function):
    """Return the input unchanged, and save it for the backward, which computes the tiles again from it."""

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
        """Return the input that the forward of an autograd node saved.

        A checkpointed layer returns a saved tensor only once per backward, so the first call stores it in the node.
        """
        if node.input is None:
            (node.input,) = node.saved_tensors
        saved_input: Tensor = node.input
        return saved_input


class _FixedDecoder(nn.Module):
    """A stand-in for the decoder: it returns hidden states that the decoder has computed before, for a tile or all."""

    def __init__(self, output: ModelOutput) -> None:
        super().__init__()
        self._output = output

    def forward(self, *args: object, **kwargs: object) -> ModelOutput:
        return self._output


def _is_mlp(name: str, module: nn.Module) -> bool:
    """Return True for the MLP of a layer whose parameters are all in linear layers; False for a mixture of experts."""
    if name.rpartition(".")[2] not in _MLP_NAMES:
        return False
    parts = list(module.modules())
    if any(isinstance(part, nn.ModuleList) for part in parts):  # of experts
        return False
    parts_with_weights = [part for part in parts if next(part.parameters(recurse=False), None) is not None]
    return len(parts_with_weights) > 1 and all(isinstance(part, nn.Linear) for part in parts_with_weights)
