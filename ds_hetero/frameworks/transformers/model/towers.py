"""Models that put images, videos or sounds before a text decoder.

The outer model embeds the tokens, runs its towers and puts their features in the places kept for them, all of whole
sequences and on every rank; what it hands to its text decoder is cut there, at the decoder's door. So placeholders,
features and rotary positions of several axes are made by the model's own code. A rank's loss reaches the towers through
the tokens that it holds, so gradients of towers and embeddings are partial, as those of all other parameters are, and
add up over the ranks.

Dimension key: B batch, L tokens of the sequence, s tokens that one rank holds, V places of images among the tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hetero.errors import BatchError, ModelError
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.runtime.data.shard_info import ShardInfo, shard_info
from ds_hetero.runtime.data.shards import Batch, Entries
from ds_hetero.runtime.devices import copied_to

_MODALITIES = ("vision_config", "audio_config", "image_config", "video_config")
_DECODERS = ("language_model", "text_model")  # as outer models call the decoder behind their towers
# Which tokens are places of images, and what is added there in the first layers.
_ADDED_FEATURES = {"visual_pos_masks": "deepstack_visual_embeds", "vision_mask": "deepstack_features"}
_LEFT_AS_THEY_ARE = ("labels", "shift_labels")


def has_towers(pretrained: PretrainedModel) -> bool:
    """Whether something else than a token embedding stands before the model's decoder."""
    named = any(getattr(pretrained.config, name, None) is not None for name in _MODALITIES)
    return named or any(hasattr(pretrained.base_model, name) for name in _DECODERS)


def text_decoder_of(pretrained: PretrainedModel) -> nn.Module:
    """The decoder behind the towers; the base model where there is none apart."""
    decoder: nn.Module = pretrained.get_decoder()
    return decoder


def front_of(pretrained: PretrainedModel) -> nn.Module:
    """The module that is given whole batches and calls the decoder; PEFT calls it as any other."""
    decoder, base = text_decoder_of(pretrained), pretrained.base_model
    inside = base is not decoder and any(module is decoder for module in base.modules())
    front: Any = base if inside else pretrained
    return front  # type: ignore[no-any-return]


def makes_masks(front: nn.Module) -> bool:
    """Whether the outer model makes the masks of its text decoder, as those do whose images see in both directions."""
    try:
        source = inspect.getsource(type(front).forward)
    except (OSError, TypeError):  # made while the program runs
        return False
    made = re.findall(r"\bcreate_(\w*)mask\w*\(", source)
    return any("bidirectional" not in kind for kind in made)  # which is for towers


class Window(NamedTuple):
    """The part of whole sequences that the self-check looks at."""

    rows: int  # of the batch, from the first
    start: int  # first position
    stop: int  # behind the last one


class DecoderDoor:
    """Cuts what the model with towers hands to its decoder; whole batches to ``window``, if that is set."""

    def __init__(self, pretrained: PretrainedModel) -> None:
        self.window: Window | None = None
        self._model = type(pretrained).__name__
        front = front_of(pretrained)
        self._parameters = list(inspect.signature(type(front).forward).parameters)[1:]
        self._positions: Tensor | None = None  # of the shard, during a forward

    def enter(self, args: tuple[Any, ...], kwargs: Batch) -> Entries:
        """Keep the shard's positions for the decoder, and return the outer model's arguments with those of the batch.

        Raises:
            BatchError: ``position_ids`` are not those that ds_hetero's loader made.
        """
        named = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        positions = named.pop("position_ids", None)
        info = shard_info(positions)
        if positions is None or info is None or not info.inputs_are_whole:
            raise BatchError(
                f"{self._model} puts images or sounds before its text decoder, so it takes whole batches with the "
                "position_ids by which ds_hetero's loader tells who holds what. Take batches from handle.dataloader "
                "and pass position_ids on as they are, not a copy; for whole batches, see handle.unsharded()."
            )
        self._positions = positions
        if info.whole_positions is not None:
            named["position_ids"] = info.whole_positions
        if "use_cache" in self._parameters:
            named["use_cache"] = False
        return named

    @property
    def is_entered(self) -> bool:
        """Whether the outer model's forward runs, with a batch of the loader's."""
        return self._positions is not None

    def leave(self) -> None:
        """The outer model's forward is over."""
        self._positions = None

    def cut(self, kwargs: Batch, rank: int) -> tuple[Entries, Tensor | None]:
        """Cut the outer model's tensors of whole sequences for this rank's decoder.

        Returns:
            The arguments with the shard's ``position_ids``, and the positions that the outer model made, cut:
            [B, s] or [axes, B, s]; None if it made none.

        Raises:
            BatchError: the decoder is called outside of the outer model's forward.
            ModelError: there is an argument that it is not known how to cut, or other tokens than those of the batch.
        """
        if self._positions is None:
            raise BatchError(
                f"the text decoder of {self._model} is called outside of the model's own forward, with a batch that is "
                "whole or a part of one. Call the model itself, model(**batch)."
            )
        info = shard_info(self._positions)
        assert info is not None
        length = _tokens_of(kwargs).shape[1]
        if self.window is None and length != info.placement.length:
            raise ModelError(
                f"{self._model} hands {length} tokens to its text decoder where the batch has {info.placement.length}, "
                "so that labels and positions of the batch are not those of its tokens. Have the processor put as many "
                "placeholders into input_ids as an image or a sound has features."
            )
        cut = self._cut(kwargs, _places(info, rank), len(self._positions))
        positions, cut["position_ids"] = cut.get("position_ids"), self._positions
        return cut, positions

    def cut_to_window(self, kwargs: Batch, window: Window) -> Entries:
        """Cut tensors of whole sequences to the window alone, for one process."""
        return self._cut(kwargs, list(range(window.start, window.stop)), window.rows)

    def _cut(self, kwargs: Batch, places: Sequence[int], rows: int) -> Entries:
        """The first ``rows`` rows of every argument, at ``places`` of the sequence."""
        tokens = _tokens_of(kwargs)
        cutter = _Cutter(self._model, tokens.shape[1], copied_to(torch.tensor(places), tokens.device), rows)
        added = {features: kwargs.get(mask) for mask, features in _ADDED_FEATURES.items()}
        cut: Entries = {}
        for name, value in kwargs.items():
            if name == "past_key_values":
                cut[name] = None  # some outer models make an empty one
            elif name in _LEFT_AS_THEY_ARE:
                cut[name] = value
            elif name in added and value is not None:
                cut[name] = cutter.added_features(value, added[name])
            else:
                cut[name] = cutter.argument(name, value)
        return cut


class _Cutter(NamedTuple):
    """Cut of whole sequences."""

    model: str
    length: int  # L
    places: Tensor  # positions, [s]
    rows: int  # of the batch, from the first

    def argument(self, name: str, value: Any) -> Any:
        """[B, L, ...], [axes, B, L] or [L] at the places; what has no sequence as it is."""
        if not isinstance(value, Tensor):
            if _holds_tensors(value):
                raise self._unknown(name, f"a {type(value).__name__} of tensors")
            return value
        if name == "position_ids" and value.dim() == 3:
            return value[:, : self.rows, self.places]
        if value.dim() >= 2 and value.shape[1] == self.length:
            return value[: self.rows, self.places]
        if tuple(value.shape) == (self.length,):
            return value[self.places]
        if self.length in value.shape:
            raise self._unknown(name, f"a tensor of shape {tuple(value.shape)}")
        return value

    def added_features(self, features: Any, mask: Any) -> Any:
        """Of features [V, D] by layer those of the places, which number the true cells of ``mask`` [B, L]."""
        seen = mask if mask.dim() == 2 else mask[..., 0]
        numbers = torch.zeros(seen.shape, dtype=torch.int64, device=seen.device)
        numbers[seen] = torch.arange(int(seen.sum()), device=seen.device)
        own = seen[: self.rows, self.places]
        chosen = numbers[: self.rows, self.places][own]
        if isinstance(features, Mapping):
            return {layer: of_layer[chosen] for layer, of_layer in features.items()}
        return [of_layer[chosen] for of_layer in features]

    def _unknown(self, name: str, kind: str) -> ModelError:
        reason = f"it hands {name} to its text decoder as {kind}, which has no known cut (L = {self.length})"
        if name == "attention_mask":
            reason = f"it makes masks of its own before its text decoder ({kind}); its images may see both ways"
        return ModelError(
            f"{self.model} cannot be split over the sequence: {reason.rstrip('.')}. Train it with "
            '"sequence_parallel_size": 1.'
        )


def _tokens_of(kwargs: Batch) -> Tensor:
    tokens: Tensor = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
    return tokens


def _places(info: ShardInfo, rank: int) -> list[int]:
    """Positions that a rank holds; that of the placeholder for a rank without tokens."""
    intervals = info.placement.intervals(rank)
    return [info.first + place for start, stop in intervals for place in range(start, stop)] or [info.first]


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return _holds_tensors(tuple(value.values()))
    return isinstance(value, tuple | list) and any(isinstance(x, Tensor) or _holds_tensors(x) for x in value)
