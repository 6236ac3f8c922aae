"""Models with towers: encoders of images, videos or sounds before a text decoder.

    the outer model, on every rank, for whole sequences    embed the tokens, run the towers, put their features in the
                                                           places of the placeholder tokens, compute positions
    `DecoderDoor`                                          shard the arguments of the text decoder
    the text decoder                                       runs on this rank's tokens

So placeholders, features and rotary positions of several axes are made by the model's own code. The loss of a rank
reaches the towers through this rank's tokens only. Gradients of towers and embeddings are therefore partial, like those
of all other parameters, and add up over the ranks.

Dimension key: B rows, L tokens of the sequence, s tokens of this rank, V image tokens, D hidden size.
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
_DECODERS = ("language_model", "text_model")  # names of the text decoder in outer models
# DeepStack: the mask [B, L] of image tokens, and the features [V, D] that the first layers add to these.
_ADDED_FEATURES = {"visual_pos_masks": "deepstack_visual_embeds", "vision_mask": "deepstack_features"}
_ALREADY_SHARDED = ("labels", "shift_labels")  # by the loader


def has_towers(pretrained: PretrainedModel) -> bool:
    """Return True if the model has more than a token embedding before its decoder."""
    named = any(getattr(pretrained.config, name, None) is not None for name in _MODALITIES)
    return named or any(hasattr(pretrained.base_model, name) for name in _DECODERS)


def text_decoder_of(pretrained: PretrainedModel) -> nn.Module:
    """Return the decoder behind the towers; the base model if the model has no separate one."""
    decoder: nn.Module = pretrained.get_decoder()
    return decoder


def front_of(pretrained: PretrainedModel) -> nn.Module:
    """Return the module that takes whole batches and calls the decoder: the base model if the decoder is inside it."""
    decoder, base = text_decoder_of(pretrained), pretrained.base_model
    inside = base is not decoder and any(module is decoder for module in base.modules())
    front: Any = base if inside else pretrained
    return front  # type: ignore[no-any-return]


def makes_masks(front: nn.Module) -> bool:
    """Return True if the outer model makes the masks of its text decoder, as those with bidirectional images do.

    Its source then calls one of transformers' ``create_..._mask`` functions; ``create_bidirectional_mask`` is for
    towers.
    """
    try:
        source = inspect.getsource(type(front).forward)
    except (OSError, TypeError):  # a function without source, such as from exec
        return False
    kinds = re.findall(r"\bcreate_(\w*)mask\w*\(", source)
    return any("bidirectional" not in kind for kind in kinds)


class Window(NamedTuple):
    """The part of whole sequences that the self-check compares."""

    rows: int  # first rows of the batch
    start: int  # first position
    stop: int  # position after the last one


class DecoderDoor:
    """Shards the arguments that a model with towers passes to its decoder.

    Attributes:
        window: if set, arguments of unsharded forwards are cut to it.
    """

    def __init__(self, pretrained: PretrainedModel) -> None:
        self.window: Window | None = None
        self._model = type(pretrained).__name__
        front = front_of(pretrained)
        self._parameters = list(inspect.signature(type(front).forward).parameters)[1:]
        self._positions: Tensor | None = None  # of the shard, during a forward

    def enter(self, args: tuple[Any, ...], kwargs: Batch) -> Entries:
        """Begin a forward of the outer model: keep the shard's positions for the decoder.

        Returns:
            The arguments of the outer model, with the batch's own ``position_ids``, if it had any.

        Raises:
            BatchError: ``position_ids`` are not the tensor that ds_hetero's loader made.
        """
        named = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        positions = named.pop("position_ids", None)
        info = shard_info(positions)
        if positions is None or info is None or not info.inputs_are_whole:
            raise BatchError(
                f"{self._model} puts images or sounds before its text decoder, so it takes whole batches with the "
                "position_ids in which ds_hetero's loader says how the batch is sharded. Take batches from "
                "handle.dataloader and pass position_ids on as they are, not a copy; for whole batches, see "
                "handle.unsharded()."
            )
        self._positions = positions
        if info.whole_positions is not None:
            named["position_ids"] = info.whole_positions
        if "use_cache" in self._parameters:
            named["use_cache"] = False
        return named

    @property
    def is_entered(self) -> bool:
        """True while the outer model's forward runs with a batch of the loader."""
        return self._positions is not None

    def leave(self) -> None:
        """End the forward of the outer model."""
        self._positions = None

    def cut(self, kwargs: Batch, rank: int) -> tuple[Entries, Tensor | None]:
        """Shard the arguments of the decoder, which are of whole sequences.

        Returns:
            The sharded arguments with the loader's ``position_ids``; and the sharded positions that the outer model
            computed, [B, s] or [axes, B, s], None if it computed none.

        Raises:
            BatchError: the decoder is called outside of the outer model's forward.
            ModelError: an argument cannot be sharded, or the outer model changed the number of tokens.
        """
        if self._positions is None:
            raise BatchError(
                f"the text decoder of {self._model} is called outside of the model's forward, so it is not known "
                "whether its arguments are sharded. Call the model itself, model(**batch)."
            )
        info = shard_info(self._positions)
        assert info is not None
        length = _tokens_of(kwargs).shape[1]
        if self.window is None and length != info.placement.length:
            raise ModelError(
                f"{self._model} passes {length} tokens to its text decoder, but the batch has {info.placement.length}, "
                "so that labels and positions of the batch belong to other tokens. Have the processor put as many "
                "placeholders into input_ids as an image or a sound has features."
            )
        cut = self._cut(kwargs, _places(info, rank), len(self._positions))
        model_positions = cut.get("position_ids")
        cut["position_ids"] = self._positions
        return cut, model_positions

    def cut_to_window(self, kwargs: Batch, window: Window) -> Entries:
        """Cut arguments of whole sequences to the window."""
        return self._cut(kwargs, list(range(window.start, window.stop)), window.rows)

    def _cut(self, kwargs: Batch, places: Sequence[int], rows: int) -> Entries:
        """Return every argument at these positions of the sequence, and of the first ``rows`` rows."""
        tokens = _tokens_of(kwargs)
        cutter = _Cutter(self._model, tokens.shape[1], copied_to(torch.tensor(places), tokens.device), rows)
        mask_of = {features: kwargs.get(mask) for mask, features in _ADDED_FEATURES.items()}
        cut: Entries = {}
        for name, value in kwargs.items():
            if name == "past_key_values":
                cut[name] = None  # an empty cache, which some outer models create
            elif name in _ALREADY_SHARDED:
                cut[name] = value
            elif name in mask_of and value is not None:
                cut[name] = cutter.added_features(value, mask_of[name])
            else:
                cut[name] = cutter.argument(name, value)
        return cut


class _Cutter(NamedTuple):
    """Selects positions and rows of arguments of whole sequences."""

    model: str
    length: int  # L
    places: Tensor  # [s] selected positions
    rows: int  # first rows of the batch

    def argument(self, name: str, value: Any) -> Any:
        """Index the sequence dimension of [B, L, ...], [axes, B, L] or [L]; return other arguments as they are."""
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
        """Select the features of the image tokens at the positions.

        Row v of the features belongs to the v-th True of the mask. Example, mask 0 1 1 0 1 and positions 2 3 4: the
        image tokens there are number 1 and 2, so rows 1 and 2 are selected.

        Args:
            features: [V, D] of each layer, in a mapping or a list.
            mask: [B, L] or [B, L, 1], True for image tokens.
        """
        is_image = mask if mask.dim() == 2 else mask[..., 0]
        numbers = torch.zeros(is_image.shape, dtype=torch.int64, device=is_image.device)
        numbers[is_image] = torch.arange(int(is_image.sum()), device=is_image.device)
        is_selected_image = is_image[: self.rows, self.places]
        selected = numbers[: self.rows, self.places][is_selected_image]
        if isinstance(features, Mapping):
            return {layer: of_layer[selected] for layer, of_layer in features.items()}
        return [of_layer[selected] for of_layer in features]

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
    """Return the positions of a rank's tokens. A rank without tokens gets the first position, for a dummy token."""
    places: list[int] = []
    for start, stop in info.placement.intervals(rank):
        places.extend(range(info.first + start, info.first + stop))
    return places or [info.first]


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return _holds_tensors(tuple(value.values()))
    return isinstance(value, tuple | list) and any(isinstance(x, Tensor) or _holds_tensors(x) for x in value)
