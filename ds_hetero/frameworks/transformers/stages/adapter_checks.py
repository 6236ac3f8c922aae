"""Which adapters of PEFT train in pipeline stages as in one process; all others are refused by name.

Stages run the decoder's own parts, so an adapter that changes only layers trains as it does on shards
(`ds_hetero.frameworks.transformers.model.model_checks.ADAPTERS`). `REFUSED_IN_STAGES` lists those that also do
something outside of the layers, or that read several layers at once.
"""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.model_checks import adapter_problems, adapters_of
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.frameworks.transformers.stages.parts import DecoderParts

REFUSED_IN_STAGES = {
    "ADALORA": "it adds a term to the loss of the whole model, which no stage computes",
}
"""Why an adapter type that is exact on shards is not exact in stages, by PEFT's name."""


def expect_known_adapters(model: nn.Module) -> None:
    """Refuse adapters that would not train in stages as in one process. Raises `ModelError` with all of them."""
    adapters = adapters_of(model)
    problems = list(adapter_problems(adapters))
    for name, config in adapters.items():
        adapter_type = str(getattr(config.peft_type, "value", config.peft_type))
        if reason := REFUSED_IN_STAGES.get(adapter_type):
            problems.append(f"PEFT adapter {name!r}, {adapter_type}: {reason}")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ModelError(
            f"{type(model).__name__} cannot be cut into pipeline stages:{listed}\n"
            "  - docs/adapters.md lists the adapters that can be"
        )


def expect_weights_of_one_layer(model: nn.Module, pretrained: PretrainedModel, parts: DecoderParts) -> None:
    """Refuse adapters whose trained weights several layers share, such as VB-LoRA's bank of vectors.

    Each stage would train a copy with the gradient of its own layers. Frozen weights may be shared, as VeRA's are.

    Raises:
        ModelError: with the adapters' kinds and the names of the weights.
    """
    if not adapters_of(model):
        return
    layers = getattr(pretrained.base_model, parts.layers)
    layers_by_weight: dict[int, set[int]] = defaultdict(set)
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            layers_by_weight[id(parameter)].add(index)
    shared = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and len(layers_by_weight[id(parameter)]) > 1
    ]
    if shared:
        kinds = {str(getattr(config.peft_type, "value", config.peft_type)) for config in adapters_of(model).values()}
        raise ModelError(
            f"{type(model).__name__} cannot be cut into pipeline stages: its adapters ({', '.join(sorted(kinds))}) "
            f"share trained weights between layers, {', '.join(shared[:3])}, and every stage would train its own copy. "
            "Use adapters with weights of their own in each layer, such as LoRA or VeRA; or share sequences, and leave "
            'pipelines ("parallel": "full") out.'
        )
