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
    """Return facts of any module, for replicas of one rank. A transformers model is described as one that is split."""
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
    """Do `read_model_facts` for a model that was checked before. Raises `ModelError`: see `head_counts`."""
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
    """Return True if transformers saves this layer's checkpoint on the CPU.

    Its checkpoint function is then a wrapper of torch's that calls ``save_on_cpu``, which is a name in its code.
    """
    function = getattr(getattr(module, "_gradient_checkpointing_func", None), "func", None)
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_names", ())
    return bool(getattr(module, "gradient_checkpointing", False)) and "save_on_cpu" in names


def model_without_weights(source: str | Path) -> nn.Module | None:
    """Build the model of a config.json on torch's meta device. None if it cannot be built. Raises `ModelError`.

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
        return None  # a model type that the installed transformers does not have, or cannot build from these values


def _head_dim(config: Any, num_heads: int) -> int | None:
    """Return the head size of the layer with the largest heads; None if the configuration does not say it."""
    head_dims = values_by_layer(config, "head_dim")
    hidden_size = common_value(config, "hidden_size")
    if all(isinstance(head_dim, int) for head_dim in head_dims):
        return int(max(head_dims))
    return hidden_size // num_heads if isinstance(hidden_size, int) else None


def _trained_share(model: nn.Module | PretrainedModel) -> float:
    """Return the fraction of parameter elements that are trained, also of parameters that ZeRO-3 has partitioned."""
    num_elements = num_trained = 0
    for parameter in model.parameters():
        size = getattr(parameter, "ds_numel", parameter.numel())
        num_elements += size
        if parameter.requires_grad:
            num_trained += size
    return num_trained / max(num_elements, 1)
