"""Models with towers: encoders of images, videos or sounds before a text decoder.

    the outer model, on every rank, for whole sequences    embed the tokens, run the towers, put their features in the
                                                           places of the placeholder tokens, compute positions
    `DecoderSharder`                                       shard the arguments of the text decoder
    the text decoder                                       runs on this rank's tokens

So the model's own code makes placeholders, features, and rotary positions of several axes. The loss of a rank reaches
the towers through this rank's tokens only. Gradients of towers and embeddings are therefore partial, like those of all
other parameters, and add up over the ranks.

Dimension key: B rows, L tokens of the sequence, s tokens of this rank, V image tokens, D hidden size.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hetero.engine.arguments import CACHES
from ds_hetero.errors import BatchError, ModelError
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.runtime.data.shard_info import ShardInfo, shard_info
from ds_hetero.runtime.data.shards import Batch, Entries
from ds_hetero.runtime.devices import copied_to

_TOWER_CONFIGS = ("vision_config", "audio_config", "image_config", "video_config")
_DECODER_NAMES = ("language_model", "text_model")  # attributes of base models
# DeepStack: the mask [B, L] of image tokens, and the features [V, D] that the first layers add to these.
_ADDED_FEATURES = {"visual_pos_masks": "deepstack_visual_embeds", "vision_mask": "deepstack_features"}
_ALREADY_SHARDED = ("labels", "shift_labels")  # by the loader


def has_towers(pretrained: PretrainedModel) -> bool:
    """Return True if the model has more than a token embedding before its decoder."""
    has_tower_config = any(getattr(pretrained.config, name, None) is not None for name in _TOWER_CONFIGS)
    return has_tower_config or any(hasattr(pretrained.base_model, name) for name in _DECODER_NAMES)


def text_decoder_of(pretrained: PretrainedModel) -> nn.Module:
    """Return the decoder behind the towers; the base model if the model has no separate one."""
    decoder: nn.Module = pretrained.get_decoder()
    return decoder


def outer_model_of(pretrained: PretrainedModel) -> nn.Module:
    """Return the module that takes whole batches and calls the text decoder.

    It is the base model if the decoder is inside the base model, else the model with the head.
    """
    decoder, base = text_decoder_of(pretrained), pretrained.base_model
    is_in_base = base is not decoder and any(module is decoder for module in base.modules())
    outer: Any = base if is_in_base else pretrained
    return outer  # type: ignore[no-any-return]


def makes_decoder_masks(outer: nn.Module) -> bool:
    """Return True if an outer model makes the masks of its text decoder, for example because images see both ways.

    The source of such a model calls a ``create_..._mask`` function of transformers, other than
    ``create_bidirectional_mask``, which makes masks of towers.
    """
    try:
        source = inspect.getsource(type(outer).forward)
    except (OSError, TypeError):  # a function without source, such as from exec
        return False
    kinds = re.findall(r"\bcreate_(\w*)mask\w*\(", source)
    return any("bidirectional" not in kind for kind in kinds)


class Window(NamedTuple):
    """The rows and positions of a batch that the self-check of a model with towers compares."""

    rows: int  # number of rows, from the first
    start: int  # first position
    stop: int  # position after the last one


class DecoderSharder:
    """Shards the arguments that a model with towers passes to its text decoder.

    Attributes:
        window: if set, a forward on whole sequences computes only this part of them.
    """

    def __init__(self, pretrained: PretrainedModel) -> None:
        self.window: Window | None = None
        self._model = type(pretrained).__name__
        outer = outer_model_of(pretrained)
        self._parameters = list(inspect.signature(type(outer).forward).parameters)[1:]
        self._positions: Tensor | None = None  # the loader's ``position_ids`` during a forward; None between forwards

    def begin_forward(self, args: tuple[Any, ...], kwargs: Batch) -> Entries:
        """Begin a forward of the outer model: keep the loader's ``position_ids`` for the text decoder.

        Returns:
            The arguments of the outer model by name, with the ``position_ids`` that the batch had before the loader,
            if it had any.

        Raises:
            BatchError: ``position_ids`` are not the tensor that ds_hetero's loader made.
        """
        arguments = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        positions = arguments.pop("position_ids", None)
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
            arguments["position_ids"] = info.whole_positions
        if "use_cache" in self._parameters:
            arguments["use_cache"] = False
        return arguments

    @property
    def is_in_forward(self) -> bool:
        """True while the outer model's forward runs on a batch of the loader."""
        return self._positions is not None

    def end_forward(self) -> None:
        """End the forward of the outer model."""
        self._positions = None

    def shard(self, kwargs: Batch, rank: int) -> tuple[Entries, Tensor | None]:
        """Shard the arguments that the outer model passes to the decoder for whole sequences.

        Returns:
            The sharded arguments, with the loader's ``position_ids``; and this rank's part of the ``position_ids`` that
            the outer model computed, [B, s] or [axes, B, s], or None if it computed none.

        Raises:
            BatchError: the decoder is called outside of the outer model's forward.
            ModelError: an argument cannot be sharded, or the outer model passes another number of tokens than the batch
                has.
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
        shard = self._select(kwargs, _positions_of(info, rank), len(self._positions))
        model_positions = shard.get("position_ids")
        shard["position_ids"] = self._positions
        return shard, model_positions

    def cut_to_window(self, kwargs: Batch, window: Window) -> Entries:
        """Cut arguments for whole sequences to the window."""
        return self._select(kwargs, list(range(window.start, window.stop)), window.rows)

    def _select(self, kwargs: Batch, positions: Sequence[int], rows: int) -> Entries:
        """Cut every argument to these positions of the sequence, and to the first ``rows`` rows."""
        tokens = _tokens_of(kwargs)
        selector = _Selector(self._model, tokens.shape[1], copied_to(torch.tensor(positions), tokens.device), rows)
        mask_of = {features: kwargs.get(mask) for mask, features in _ADDED_FEATURES.items()}
        selected: Entries = {}
        for name, value in kwargs.items():
            if name in CACHES:
                selected[name] = None  # an empty cache, which some outer models create
            elif name in _ALREADY_SHARDED:
                selected[name] = value
            elif name in mask_of and value is not None:
                selected[name] = selector.added_features(value, mask_of[name])
            else:
                selected[name] = selector.argument(name, value)
        return selected


class _Selector(NamedTuple):
    """Selects positions and rows of the arguments of a text decoder."""

    model: str  # name of the model's class, for errors
    length: int  # L
    positions: Tensor  # [s], to select
    rows: int  # number of rows to select, from the first

    def argument(self, name: str, value: Any) -> Any:
        """Index the sequence dimension of [B, L, ...], [axes, B, L] or [L]; return other arguments unchanged."""
        if not isinstance(value, Tensor):
            if _contains_tensor(value):
                raise self._unsupported_argument(name, f"a {type(value).__name__} of tensors")
            return value
        if name == "position_ids" and value.dim() == 3:
            return value[:, : self.rows, self.positions]
        if value.dim() >= 2 and value.shape[1] == self.length:
            return value[: self.rows, self.positions]
        if tuple(value.shape) == (self.length,):
            return value[self.positions]
        if self.length in value.shape:
            raise self._unsupported_argument(name, f"a tensor of shape {tuple(value.shape)}")
        return value

    def added_features(self, features: Any, mask: Any) -> Any:
        """Select the features of those image tokens that stand at the selected positions.

        Row v of the features belongs to the v-th True of the mask, counted from 0. Example: in the mask 0 1 1 0 1, the
        image tokens at positions 2, 3 and 4 are number 1 and 2, so rows 1 and 2 of the features are selected.

        Args:
            features: [V, D] of each layer, in a mapping or a list.
            mask: [B, L] or [B, L, 1], True for image tokens.
        """
        is_image = mask if mask.dim() == 2 else mask[..., 0]
        numbers = torch.zeros(is_image.shape, dtype=torch.int64, device=is_image.device)
        numbers[is_image] = torch.arange(int(is_image.sum()), device=is_image.device)
        is_selected_image = is_image[: self.rows, self.positions]
        feature_rows = numbers[: self.rows, self.positions][is_selected_image]
        if isinstance(features, Mapping):
            return {layer: layer_features[feature_rows] for layer, layer_features in features.items()}
        return [layer_features[feature_rows] for layer_features in features]

    def _unsupported_argument(self, name: str, kind: str) -> ModelError:
        """Return the error about an argument of a kind that cannot be sharded."""
        reason = (
            f"it passes {name} to its text decoder as {kind}, and ds_hetero does not know which dimension of it is the "
            f"sequence (L = {self.length})"
        )
        if name == "attention_mask":
            reason = f"it makes attention masks before its text decoder ({kind}), in which images may see both ways"
        return ModelError(
            f"{self.model} cannot be split over the sequence: {reason.rstrip('.')}. Train it with "
            '"sequence_parallel_size": 1.'
        )


def _tokens_of(kwargs: Batch) -> Tensor:
    """Return the token ids [B, L] of a decoder's arguments, or the embeddings [B, L, D] if they have no ids."""
    tokens: Tensor = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
    return tokens


def _positions_of(info: ShardInfo, rank: int) -> list[int]:
    """Return the positions of a rank's tokens. A rank without tokens gets the first position, for a dummy token."""
    positions: list[int] = []
    for start, stop in info.placement.intervals(rank):
        positions.extend(range(info.first + start, info.first + stop))
    return positions or [info.first]


def _contains_tensor(value: object) -> bool:
    """Return True for a list, tuple or mapping that contains a tensor, at any depth."""
    if isinstance(value, Mapping):
        return _contains_tensor(tuple(value.values()))
    if not isinstance(value, tuple | list):
        return False
    return any(isinstance(entry, Tensor) or _contains_tensor(entry) for entry in value)
