"""Every argument that a forward on a shard may be given: one table, which refusals and docs read.

    python -m tests.decision_pages          # writes the table into docs/forward-arguments.md

Models pass on what they do not know, to their attention or their loss, or drop it. On a part of a sequence that may be
something else than on the whole of it, without a sign. So an argument without a row is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds_hetero.common.reading import NameRow, is_in, row_of, shortened
from ds_hetero.runtime.data.shards import Batch

OF_RESULTS = ("logits_to_keep", "num_items_in_batch", "output_attentions", "output_hidden_states", "return_dict")
"""Arguments that say what is returned, or by what the loss is divided, and not what is computed of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument(NameRow):
    """Effect of one argument, or of all whose name fits a pattern."""

    of_towers: bool = False  # of models that put images or sounds before a text decoder; others are refused it
    in_calls: str = ""  # what it means in `handle.sharded_call`, where it is refused elsewhere
    in_pipelines: bool = False  # pipelines take it; they are given no other


def _exact(why: str, *, in_pipelines: bool = False) -> Argument:
    return Argument(kind="exact", why=why, in_pipelines=in_pipelines)


def _ignored(why: str, *, in_pipelines: bool = False) -> Argument:
    return Argument(kind="ignored", why=why, in_pipelines=in_pipelines)


def _refused(why: str, *off: object, in_calls: str = "") -> Argument:
    return Argument(kind="refused", why=why, off=(*_OFF, *off), in_calls=in_calls)


def _of_towers(kind: Literal["exact", "untried"]) -> Argument:
    return Argument(kind=kind, why="whole on every rank; its features are cut with the tokens", of_towers=True)


_OFF = (None, False)
_BY_TOKEN = "one per token, [B, L], cut with the tokens"
_CROSS_ATTENTION = "cross attention is not supported; leave it out"
_ONE_LENGTH = "documents are read from cu_seq_lens_q"
_UNTRIED = (
    'nobody has tried it on parts of sequences; leave it out of the batch, or train with "sequence_parallel_size": 1'
)
_NO_TOWERS = "the model puts no images or sounds before its decoder; leave it out"
_NOT_IN_PIPELINES = "pipelines hand stages tokens, positions, a padding mask and labels alone; leave it out"

ARGUMENTS: Mapping[str, Argument] = {
    # Tokens, and which of them belong together.
    "input_ids": _exact("[B, L], cut along the sequence", in_pipelines=True),
    "inputs_embeds": _exact("[B, L, H], in place of input_ids"),
    "position_ids": _exact("the loader makes them where a batch has none", in_pipelines=True),
    "attention_mask": _exact("padding, [B, L]; a mask of another shape is refused", in_pipelines=True),
    "cu_seq_lens_q": _exact("where documents begin in the whole sequence, before attention_mask and position_ids"),
    "cu_seq_lens_k": _exact("refused where it is not cu_seq_lens_q"),
    "max_length_q": _ignored(_ONE_LENGTH),
    "max_length_k": _ignored(_ONE_LENGTH),
    "seq_idx": _ignored("documents are read from cu_seq_lens_q or position_ids, one of which must be there"),
    "token_type_ids": _exact(_BY_TOKEN),
    "task_type_ids": _exact(f"of ERNIE: {_BY_TOKEN}"),
    "input_shape_ids": _exact(f"of RoCBert: {_BY_TOKEN}"),
    "input_pronunciation_ids": _exact(f"of RoCBert: {_BY_TOKEN}"),
    # Labels and the loss.
    "labels": _exact("beside shift_labels; alone they are refused where the model would move them", in_pipelines=True),
    "shift_labels": _exact("labels that the loader has moved to their predecessors", in_pipelines=True),
    "num_items_in_batch": _exact(
        "the loss is the sum over this number, as on one process; refused beside labels, and where replicas take "
        "different batches, whose loss is weighed so already",
        in_pipelines=True,
    ),
    "ignore_index": _refused("labels that do not count are -100; leave it out", -100),
    # What is returned.
    "return_dict": _exact("a tuple where it is False", in_pipelines=True),
    "logits_to_keep": _refused(
        "a rank would keep the last of its own tokens; take them from the logits", 0, in_calls="the last of the whole"
    ),
    "output_hidden_states": Argument(kind="harmless", why="of this rank's tokens"),
    "output_attentions": _refused("attention weights are never held; leave it out"),
    "output_router_logits": _exact(
        "the router loss is that of the whole batch, for models whose router loss is known; others are refused"
    ),
    "fused_lm_head": _exact("by which TRL's trainers ask for their own outputs", in_pipelines=True),
    # Keys and values of former calls.
    "use_cache": _ignored("training keeps no keys and values; handle.sharded() does", in_pipelines=True),
    "past_key_values": _exact("a forward with it takes whole batches, as in generate; in handle.sharded() shards"),
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
"""By name; a ``*`` stands for any ending of names that have no row of their own."""


def refusals(
    arguments: Batch,
    *,
    has_towers: bool = False,
    in_call: bool = False,
    in_pipelines: bool = False,
    is_split: bool = True,
) -> list[str]:
    """Arguments with which a model would not compute what one process computes, each with its value and the reason.

    Args:
        has_towers: whether the model puts images or sounds before a text decoder.
        in_call: whether they are those of a sharded call, which takes whole batches.
        in_pipelines: whether they are those of the engine of a pipeline.
        is_split: whether sequences are split; else only what our attention does not do is refused.
    """
    rows = {name: row_of(ARGUMENTS, name) for name in arguments}
    if not is_split:
        rows = {name: row for name, row in rows.items() if row is not None and row.kind == "refused"}
    return [
        f'"{name}": {_shown(arguments[name])}: {reason}.'
        for name, row in rows.items()
        if (reason := _reason(row, arguments[name], has_towers, in_call, in_pipelines))
    ]


def _reason(row: Argument | None, value: object, has_towers: bool, in_call: bool, in_pipelines: bool) -> str:
    """Return why a value is refused; empty where it is allowed."""
    if is_in(value, _OFF if row is None else row.off):
        return ""
    if row is None:
        return _UNTRIED
    if row.kind == "refused" and not (in_call and row.in_calls):
        return row.why
    if row.of_towers and not has_towers:
        return _NO_TOWERS
    return _NOT_IN_PIPELINES if in_pipelines and not row.in_pipelines else ""


def _shown(value: object) -> str:
    shape = getattr(value, "shape", None)
    return shortened(value) if shape is None else f"{type(value).__name__} of shape {list(shape)}"
