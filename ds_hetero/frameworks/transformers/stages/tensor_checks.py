"""Models that tensor parallelism cannot shard: refused, with the reason."""

from __future__ import annotations

from torch import nn

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.model_checks import DROPOUTS, pretrained_of
from ds_hetero.frameworks.transformers.stages.tensor_cut import COLUMN_STYLE, PARTIAL_STYLE, ROW_STYLE, tensor_plan_of
from ds_hetero.values.plans import Plan


def check_tensor_model(model: nn.Module) -> None:
    """Refuse a model that cannot be cut by tensor parallelism.

    Raises:
        ModelError: it has no tensor-parallel plan, one with a style that is not known here, an embedding or a head of
            an unknown kind, adapters other than LoRA, or dropout inside a kernel of attention.
    """
    pretrained = pretrained_of(model)
    name = type(pretrained).__name__
    styles = set(tensor_plan_of(pretrained).values())
    if unknown := styles - {COLUMN_STYLE, ROW_STYLE, PARTIAL_STYLE}:
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages: its base_model_tp_plan has {sorted(unknown)}. Use stages of "
            "one rank or sequence."
        )
    if not styles:
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages: its configuration has no base_model_tp_plan. Use stages of "
            "one rank or sequence."
        )
    table, head = pretrained.get_input_embeddings(), pretrained.get_output_embeddings()
    if not isinstance(table, nn.Embedding) or table.max_norm is not None or table.sparse or type(head) is not nn.Linear:
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages, which cut an nn.Embedding (without max_norm and sparse "
            f"gradients) and an nn.Linear by words: it has {table} and {head}. Use stages of one rank or sequence."
        )
    for adapter in getattr(model, "peft_config", {}).values():
        if what := _beyond_lora(adapter):
            raise ModelError(
                f"{name} cannot run in tensor-parallel stages with adapters that are not plain LoRA ({what}). Use "
                "stages of one rank or sequence."
            )
    config = pretrained.config.get_text_config()
    if any(getattr(config, each, 0) for each in DROPOUTS) and config._attn_implementation != "eager":
        raise ModelError(
            f"{name} cannot run in tensor-parallel stages with dropout inside attention that is "
            f"{config._attn_implementation!r}, of whose mask a rank cannot draw its own heads. Build it with "
            'attn_implementation="eager", or set the dropout to 0.'
        )


_BESIDE_LORA = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters")


def _beyond_lora(adapter: object) -> str:
    """Why an adapter is more than two matrices beside a linear layer: its kind, or options; empty if it is not."""
    kind = str(getattr(adapter, "peft_type", None)).rpartition(".")[2]
    return kind if kind != "LORA" else ", ".join(key for key in _BESIDE_LORA if getattr(adapter, key, None))


def check_tensor_stages(model: nn.Module, plan: Plan) -> None:
    """Refuse a model that tensor stages cannot hold. Raises `ModelError`: KV heads or words do not divide."""
    name = type(pretrained_of(model)).__name__
    head = pretrained_of(model).get_output_embeddings()
    assert isinstance(head, nn.Linear)
    words = head.out_features
    kv_heads = plan.model.num_kv_heads if plan.model is not None else 1
    degrees = {len(s.ranks) for pipeline in plan.pipelines for s in pipeline.stages if s.inner == "tensor"}
    if wrong := sorted(degree for degree in degrees if kv_heads % degree):
        raise ModelError(
            f"{name} has {kv_heads} KV heads, which tensor parallelism over {wrong[0]} ranks cannot share. Use a "
            'degree that divides them, or "inner": "sequence".'
        )
    if wrong := sorted(degree for degree in degrees if -(-words // degree) * (degree - 1) >= words):
        raise ModelError(
            f"{name} has {words} words, of which tensor parallelism over {wrong[0]} ranks leaves the last rank none. "
            'Use a smaller degree, or "inner": "sequence".'
        )
