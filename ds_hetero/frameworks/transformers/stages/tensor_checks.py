"""Refuse models whose stages tensor parallelism cannot shard, with the reason."""

from __future__ import annotations

from torch import nn

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.model_checks import DROPOUTS, pretrained_of
from ds_hetero.frameworks.transformers.stages.tensor_cut import COLUMN_STYLE, PARTIAL_STYLE, ROW_STYLE, tensor_plan_of
from ds_hetero.runtime.packed_weights import packed_names
from ds_hetero.values.plans import Plan


def check_tensor_parallel_model(model: nn.Module) -> None:
    """Refuse a model that tensor parallelism cannot shard.

    Raises:
        ModelError: the model has no tensor-parallel plan, a plan with a style that this engine does not implement, an
            embedding or a head other than nn.Embedding and nn.Linear, adapters other than plain LoRA, or dropout
            inside a fused attention kernel.
    """
    pretrained = pretrained_of(model)
    name = type(pretrained).__name__
    styles = set(tensor_plan_of(pretrained).values())
    if unknown := styles - {COLUMN_STYLE, ROW_STYLE, PARTIAL_STYLE}:
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages: its base_model_tp_plan has {sorted(unknown)}. Use stages of "
            'one rank, or "inner": "sequence".'
        )
    if not styles:
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages: its configuration has no base_model_tp_plan. Use stages of "
            'one rank, or "inner": "sequence".'
        )
    if packed := next(packed_names(model), None):
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages: bitsandbytes packs {packed} in blocks of 4-bit values, "
            'which cannot be cut by columns or rows. Use stages of one rank, or "inner": "sequence".'
        )
    table = pretrained.get_input_embeddings()
    head = pretrained.get_output_embeddings()
    is_plain_table = isinstance(table, nn.Embedding) and table.max_norm is None and not table.sparse
    if not is_plain_table or type(head) is not nn.Linear:
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages, which shard an nn.Embedding (without max_norm and sparse "
            f"gradients) and an nn.Linear over the vocabulary, but it has {table} and {head}. Use stages of one rank, "
            'or "inner": "sequence".'
        )
    for adapter in getattr(model, "peft_config", {}).values():
        if options := _unsupported_adapter_options(adapter):
            raise ModelError(
                f"{name} cannot run in tensor-parallel stages with adapters that are not plain LoRA ({options}). Use "
                'stages of one rank, or "inner": "sequence".'
            )
    config = pretrained.config.get_text_config()
    # "eager" draws the mask by torch's generator for this rank's heads; a fused kernel draws for all heads at once.
    drops_attention = any(getattr(config, key, 0) for key in DROPOUTS)
    if drops_attention and config._attn_implementation != "eager":
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages with dropout inside {config._attn_implementation!r} "
            "attention: a rank cannot draw the part of the dropout mask that belongs to its heads. Build it with "
            'attn_implementation="eager", or set the dropout to 0.'
        )


# Options of PEFT's LoraConfig that add more than two matrices to a linear layer.
_LORA_EXTENSIONS = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters")


def _unsupported_adapter_options(adapter: object) -> str:
    """Return the type of an adapter that is not LoRA, or the options of LoRA that stages do not support; else empty."""
    adapter_type = str(getattr(adapter, "peft_type", None)).rpartition(".")[2]  # "PeftType.LORA" -> "LORA"
    if adapter_type != "LORA":
        return adapter_type
    return ", ".join(key for key in _LORA_EXTENSIONS if getattr(adapter, key, None))


def check_tensor_parallel_degrees(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan with a tensor-parallel degree that KV heads or the vocabulary do not allow. Raises `ModelError`."""
    name = type(pretrained_of(model)).__name__
    head = pretrained_of(model).get_output_embeddings()
    assert isinstance(head, nn.Linear)
    words = head.out_features
    kv_heads = plan.model.num_kv_heads if plan.model is not None else 1
    degrees: set[int] = set()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if stage.is_tensor_parallel:
                degrees.update(map(len, stage.token_holders))
    for degree in sorted(degrees):
        if kv_heads % degree:
            raise ModelError(
                f"{name} has {kv_heads} KV heads, which tensor parallelism over {degree} ranks cannot share. Use a "
                'degree that divides them, or "inner": "sequence".'
            )
    for degree in sorted(degrees):
        # DTensor shards like torch.chunk: 6 words over 4 ranks are 2, 2, 2, 0, so the last rank gets none.
        words_per_rank = -(-words // degree)
        if words_per_rank * (degree - 1) >= words:
            raise ModelError(
                f"{name} has a vocabulary of {words} entries: tensor parallelism over {degree} ranks leaves none to "
                'the last rank. Use a smaller degree, or "inner": "sequence".'
            )
