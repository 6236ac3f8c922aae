"""Facts of a transformers model for the start of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_hetero.common.reading import shortened
from ds_hetero.decision.facts import ModelFacts
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.model_checks import (
    check_model,
    common_value,
    head_counts,
    pretrained_of,
    values_by_layer,
)
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.models.configs import model_from_config
from ds_hetero.models.presets import read_model_config
from ds_hetero.models.shapes import ModelSpec


def read_model_facts(model: nn.Module) -> ModelFacts:
    """Read a PreTrainedModel, or a module around one, for the start of a job. Raises `ModelError`."""
    check_model(model)
    return describe_model(model)


def read_facts_of_whole_model(model: nn.Module) -> ModelFacts:
    """Return facts of any module, for replicas of one rank: a model that could be split is described as one that is."""
    try:
        return read_model_facts(model)
    except ModelError:
        pass
    floating = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    dtype = floating[0] if floating else torch.get_default_dtype()
    return ModelFacts(
        name=type(model).__name__,
        num_heads=1,
        num_kv_heads=1,
        no_spec_reason=f"{type(model).__name__} is not a transformers model whose layers ds_hetero knows.",
        dtype=str(dtype).removeprefix("torch."),
        element_bytes=dtype.itemsize,
        trained_share=_trained_share(model),
        causal=False,
        is_split=False,
    )


def describe_model(model: nn.Module) -> ModelFacts:
    """`read_model_facts` of a model that has been checked. Raises `ModelError`: see `head_counts`."""
    pretrained = pretrained_of(model)
    config = pretrained.config.get_text_config()
    num_heads, num_kv_heads = head_counts(pretrained)
    spec: ModelSpec | None = None
    reason = ""
    try:
        spec = model_from_config(config.to_dict(), type(pretrained).__name__)
    except ModelError as error:
        reason = str(error)
    max_seq_len = common_value(config, "max_position_embeddings")
    modules = list(pretrained.modules())
    return ModelFacts(
        name=type(pretrained).__name__,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        spec=spec,
        no_spec_reason=reason,
        dtype=str(pretrained.dtype).removeprefix("torch."),
        element_bytes=pretrained.dtype.itemsize,
        max_seq_len=max_seq_len if isinstance(max_seq_len, int) and max_seq_len > 0 else None,
        trained_share=_trained_share(pretrained),
        causal=any(getattr(module, "is_causal", False) for module in modules),
        checkpointing=any(getattr(module, "gradient_checkpointing", False) for module in modules),
        offloads_checkpoints=any(map(_offloads_checkpoints, modules)),
        head_dim=_head_dim(config, num_heads),
        softcap=common_value(config, "attn_logit_softcapping"),
    )


def _offloads_checkpoints(module: nn.Module) -> bool:
    """Whether transformers was asked to keep this layer's checkpoint on the host: its function wraps torch's then."""
    function = getattr(getattr(module, "_gradient_checkpointing_func", None), "func", None)
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_names", ())
    return bool(getattr(module, "gradient_checkpointing", False)) and "save_on_cpu" in names


def model_without_weights(source: str | Path) -> nn.Module | None:
    """Return a config.json's causal language model on torch's meta device; None without one. Raises `ModelError`.

    Args:
        source: see `ds_hetero.models.presets.load_model`.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    content = read_model_config(source)
    try:
        config = transformers.AutoConfig.for_model(**content)
        named = getattr(transformers, str((content.get("architectures") or [""])[0]), None)
        with torch.device("meta"):
            if named is not None:
                return named._from_config(config)  # type: ignore[no-any-return]
            return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
    except StrictDataclassError as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ModelError(f"transformers refuses the values of model {shortened(str(source))}: {reason[:300]}") from None
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError):
        return None  # of a kind that this transformers does not know, or cannot build from these values


def _head_dim(config: Any, num_heads: int) -> int | None:
    """Return the width of a head, of the widest layer's; None where the configuration does not say."""
    given, hidden_size = values_by_layer(config, "head_dim"), common_value(config, "hidden_size")
    if all(isinstance(width, int) for width in given):
        return int(max(given))
    return hidden_size // num_heads if isinstance(hidden_size, int) else None


def _trained_share(model: nn.Module | PretrainedModel) -> float:
    """Share of the elements that are trained, also where ZeRO-3 has partitioned them already."""
    parameters = list(model.parameters())
    sizes = [getattr(p, "ds_numel", p.numel()) for p in parameters]
    return sum(size for p, size in zip(parameters, sizes, strict=True) if p.requires_grad) / max(sum(sizes), 1)
