"""Table of the arguments that a forward on a shard may get, which refusals and docs read.

    python -m tests.decision_pages          # writes the table into docs/forward-arguments.md

Models pass arguments that they do not know to their attention or their loss, or drop them. The same argument may mean
something else for a part of a sequence than for all of it, without an error. So an argument without a row is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds_hetero.common.name_rows import NameRow, is_in, row_of
from ds_hetero.common.reading import shortened
from ds_hetero.runtime.data.shards import Batch

CACHES = ("past_key_values", "cache")
"""Names of keys and values of former calls: that up to transformers 5.23, and that from 5.24 on."""

OF_RESULTS = ("logits_to_keep", "num_items_in_batch", "output_attentions", "output_hidden_states", "return_dict")
"""Arguments that set what is returned, or the divisor of the loss, but not what is computed from tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument(NameRow):
    """Row of one argument, or of all arguments whose name matches a pattern; see `NameRow`."""

    of_towers: bool = False  # only models that put images or sounds in front of a text decoder take it
    in_calls: str = ""  # meaning in `handle.sharded_call`, if it is refused elsewhere
    in_pipelines: bool = False  # whether pipelines take it


def _exact(why: str, *, in_pipelines: bool = False) -> Argument:
    """Return the row of an argument with which the result is that of one process."""
    return Argument(kind="exact", why=why, in_pipelines=in_pipelines)


def _ignored(why: str, *, in_pipelines: bool = False) -> Argument:
    """Return the row of an argument that has no effect."""
    return Argument(kind="ignored", why=why, in_pipelines=in_pipelines)


def _refused(why: str, *off: object, in_calls: str = "") -> Argument:
    """Return the row of an argument that is refused, unless its value is None, False or one of ``off``."""
    return Argument(kind="refused", why=why, off=(*_OFF, *off), in_calls=in_calls)


def _of_towers(kind: Literal["exact", "untried"]) -> Argument:
    """Return the row of an argument that only models with images or sounds take; ``kind``: see `NameRow`."""
    return Argument(kind=kind, why="every rank gets it whole; its features are split with the tokens", of_towers=True)


_OFF = (None, False)
_BY_TOKEN = "one per token, [B, L], split with the tokens"
_CROSS_ATTENTION = "cross attention is not supported; leave it out"
_ONE_LENGTH = "documents are read from cu_seq_lens_q"
_UNTRIED = (
    'it was never tried on parts of sequences; leave it out of the batch, or train with "sequence_parallel_size": 1'
)
_NO_TOWERS = "the model puts no images or sounds before its decoder; leave it out"
_NOT_IN_PIPELINES = "pipelines hand stages tokens, positions, a padding mask and labels alone; leave it out"

ARGUMENTS: Mapping[str, Argument] = {
    # Tokens, and which of them belong together.
    "input_ids": _exact("[B, L], split along the sequence", in_pipelines=True),
    "inputs_embeds": _exact("[B, L, H], instead of input_ids"),
    "position_ids": _exact("the loader adds them if a batch has none", in_pipelines=True),
    "attention_mask": _exact("padding, [B, L]; a mask of another shape is refused", in_pipelines=True),
    "cu_seq_lens_q": _exact(
        "starts of the documents in the whole sequence; it takes precedence over attention_mask and position_ids"
    ),
    "cu_seq_lens_k": _exact("refused if it differs from cu_seq_lens_q"),
    "max_length_q": _ignored(_ONE_LENGTH),
    "max_length_k": _ignored(_ONE_LENGTH),
    "seq_idx": _ignored("documents are read from cu_seq_lens_q or position_ids; the batch must have one of them"),
    "token_type_ids": _exact(_BY_TOKEN),
    "task_type_ids": _exact(f"for ERNIE: {_BY_TOKEN}"),
    "input_shape_ids": _exact(f"for RoCBert: {_BY_TOKEN}"),
    "input_pronunciation_ids": _exact(f"for RoCBert: {_BY_TOKEN}"),
    # Labels and the loss.
    "labels": _exact(
        "together with shift_labels; without, they are refused if the model would shift them", in_pipelines=True
    ),
    "shift_labels": _exact("labels that the loader has shifted by one token", in_pipelines=True),
    "num_items_in_batch": _exact(
        "the loss is the sum divided by this number, as on one process; refused together with labels, and if replicas "
        "take different batches, because their loss is weighted already",
        in_pipelines=True,
    ),
    "ignore_index": _refused("labels that do not count are -100; leave it out", -100),
    # What is returned.
    "return_dict": _exact("False returns a tuple", in_pipelines=True),
    "logits_to_keep": _refused(
        "a rank would keep the last of its own tokens; take them from the logits", 0, in_calls="the last of the whole"
    ),
    "output_hidden_states": Argument(kind="harmless", why="it returns those of this rank's tokens"),
    "output_attentions": _refused("attention weights are never held; leave it out"),
    "output_router_logits": _exact(
        "the router loss is that of the whole batch, for models whose router loss is known; others are refused"
    ),
    "fused_lm_head": _exact("TRL's trainers use it to ask for their own outputs", in_pipelines=True),
    # Keys and values of former calls.
    "use_cache": _ignored("training keeps no keys and values; handle.sharded() keeps them", in_pipelines=True),
    **dict.fromkeys(
        CACHES,
        _exact("a forward with it takes whole batches, as in generate; inside handle.sharded() it takes shards"),
    ),
    "cache_position": _refused("places of tokens are read from position_ids; leave it out"),
    # Attention.
    "is_causal": Argument(kind="refused", why="the model's configuration says it; leave it out", off=(None,)),
    "head_mask": _refused("attention weights are never held; leave it out"),
    **dict.fromkeys(
        ("encoder_*", "decoder_*", "cross_attention_*", "cross_attn_*", "full_text_row_masked_out_mask"),
        _refused(_CROSS_ATTENTION),
    ),
    # Images, videos, sounds: the model's own code makes features of them, which are cut at its text decoder.
    **dict.fromkeys(
        (
            *("feature_attention_mask", "image_grid_thw", "image_sizes", "input_features", "mm_token_type_ids"),
            "pixel_values",
        ),
        _of_towers("exact"),
    ),
    **dict.fromkeys(
        (
            *("aspect_ratio_*", "audio_*", "batch_num_images", "downsample_mode", "high_res_pixel_values", "image_*"),
            *("input_features_mask", "num_local_patches", "padding_mask", "pixel_*", "second_per_grid_ts"),
            *("spatial_shapes", "target_sizes*", "tile_fine_mask", "use_audio_in_video", "video_*", "vision_*"),
        ),
        _of_towers("untried"),
    ),
}
"""Rows by name of the argument; a ``*`` stands for any ending of names that have no other row."""


def cache_of(arguments: Mapping[str, object]) -> object | None:
    """Return the keys and values of former calls that a forward gets; None if it gets none."""
    return next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)


def refusals(
    arguments: Batch,
    *,
    has_towers: bool = False,
    in_call: bool = False,
    in_pipelines: bool = False,
    is_split: bool = True,
) -> list[str]:
    """Return a line for each argument with which a model would compute something else than one process.

    Args:
        arguments: arguments of a forward, by name.
        has_towers: whether the model puts images or sounds in front of a text decoder.
        in_call: whether the forward is a sharded call, which takes whole batches.
        in_pipelines: whether the forward is one of an engine with pipelines.
        is_split: whether sequences are split; otherwise only arguments that our attention cannot honour are refused.

    Returns:
        Lines with name, value and reason.
    """
    lines = []
    for name, value in arguments.items():
        row = row_of(ARGUMENTS, name)
        if not is_split and (row is None or row.kind != "refused"):
            continue
        reason = _refusal_reason(row, value, has_towers, in_call, in_pipelines)
        if reason:
            lines.append(f'"{name}": {_value_text(value)}: {reason}.')
    return lines


def _refusal_reason(row: Argument | None, value: object, has_towers: bool, in_call: bool, in_pipelines: bool) -> str:
    """Return why the value of an argument is refused; empty if it is allowed. Without a row, only "off" is allowed."""
    if is_in(value, _OFF if row is None else row.off):
        return ""
    if row is None:
        return _UNTRIED
    if row.kind == "refused" and not (in_call and row.in_calls):
        return row.why
    if row.of_towers and not has_towers:
        return _NO_TOWERS
    return _NOT_IN_PIPELINES if in_pipelines and not row.in_pipelines else ""


def _value_text(value: object) -> str:
    """Return a short text for a value; type and shape for a tensor."""
    shape = getattr(value, "shape", None)
    return shortened(value) if shape is None else f"{type(value).__name__} of shape {list(shape)}"
