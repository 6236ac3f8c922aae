"""Read the facts of a transformers model that the start of a job needs, such as its numbers of heads and layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_hetero.common.reading import shortened
from ds_hetero.decision.facts import ModelFacts
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.checkpointed_layers import offloads_checkpoint
from ds_hetero.frameworks.transformers.model.model_checks import (
    adapters_of,
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
from ds_hetero.models.trained_weights import adapter_parameters
from ds_hetero.runtime.packed_weights import packed_names


def read_model_facts(model: nn.Module) -> ModelFacts:
    """Check a model that is to be split, and return its facts. Raises `ModelError`: it cannot be split.

    Args:
        model: a PreTrainedModel, or a module around one.
    """
    check_model(model)
    return describe_model(model)


def read_facts_of_whole_model(model: nn.Module) -> ModelFacts:
    """Return the facts of a module that runs whole, in replicas of one rank.

    For a transformers model that could be split, they are the same facts as for a split model. Any other module has one
    head and no `ModelSpec`, so that its time cannot be predicted.
    """
    try:
        return read_model_facts(model)
    except ModelError:
        pass
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    dtype = dtypes[0] if dtypes else torch.get_default_dtype()
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
    """Return the facts of a model that was checked before. Raises `ModelError`: see `head_counts`."""
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
    adapter_rank = _adapter_rank(model, spec)
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
        adapter_rank=adapter_rank,
        trains_embedding=bool(adapter_rank) and _trains_embedding(pretrained),
        quantization="nf4" if adapter_rank and next(packed_names(model), None) else None,
        causal=any(getattr(module, "is_causal", False) for module in modules),
        checkpointing=any(getattr(module, "gradient_checkpointing", False) for module in modules),
        offloads_checkpoints=any(map(offloads_checkpoint, modules)),
        head_dim=_head_dim(config, num_heads),
        softcap=common_value(config, "attn_logit_softcapping"),
    )


def model_without_weights(source: str | Path) -> nn.Module | None:
    """Return the model of a config.json on torch's meta device; None if transformers cannot build it.

    Args:
        source: see `ds_hetero.models.presets.load_model`.

    Raises:
        ModelError: the file cannot be read, or transformers refuses its values.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    content = read_model_config(source)
    try:
        config = transformers.AutoConfig.for_model(**content)
        class_name = str((content.get("architectures") or [""])[0])
        model_class = getattr(transformers, class_name, None)
        with torch.device("meta"):
            if model_class is not None:
                return model_class._from_config(config)  # type: ignore[no-any-return]
            return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
    except StrictDataclassError as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ModelError(f"transformers refuses the values of model {shortened(str(source))}: {reason[:300]}") from None
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError):
        return None  # a model type that the installed transformers does not have, or cannot build from these values


def _head_dim(config: Any, num_heads: int) -> int | None:
    """Return the width of a query head, the largest of all layers; None if the configuration does not say it.

    Latent attention (DeepSeek-V2 and V3) concatenates an unrotated and a rotated part to a query, and its ``head_dim``
    is the width of the rotated part alone: 128 + 64 = 192 elements where ``head_dim`` is 64.
    """
    unrotated, rotated = (common_value(config, f"qk_{part}_head_dim") for part in ("nope", "rope"))
    if isinstance(unrotated, int) and isinstance(rotated, int):
        return unrotated + rotated
    head_dims = values_by_layer(config, "head_dim")
    if all(isinstance(head_dim, int) for head_dim in head_dims):
        return int(max(head_dims))
    hidden_size = common_value(config, "hidden_size")
    return hidden_size // num_heads if isinstance(hidden_size, int) else None


def _adapter_rank(model: nn.Module, spec: ModelSpec | None) -> int:
    """Return the rank of LoRA on all matrices that has as many weights as the adapters of the layers; 0 without any."""
    if spec is None or not adapters_of(model):
        return 0
    outside = {id(parameter) for parameter in _parameters_outside_layers(pretrained_of(model))}
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in outside)
    return max(1, round(num_trained / (spec.num_layers * adapter_parameters(spec, 1))))


def _trains_embedding(pretrained: PretrainedModel) -> bool:
    """Return True if a parameter of the embedding or of the head is trained."""
    return any(parameter.requires_grad for parameter in _parameters_outside_layers(pretrained))


def _parameters_outside_layers(pretrained: PretrainedModel) -> Iterator[nn.Parameter]:
    """Yield the parameters of embedding and head."""
    for module in (pretrained.get_input_embeddings(), pretrained.get_output_embeddings()):
        if module is not None:
            yield from module.parameters()


def _trained_share(model: nn.Module | PretrainedModel) -> float:
    """Return the fraction of all parameter elements that is trained. Parameters may be partitioned by ZeRO-3."""
    num_elements = num_trained = 0
    for parameter in model.parameters():
        size = getattr(parameter, "ds_numel", parameter.numel())
        num_elements += size
        if parameter.requires_grad:
            num_trained += size
    return num_trained / max(num_elements, 1)
