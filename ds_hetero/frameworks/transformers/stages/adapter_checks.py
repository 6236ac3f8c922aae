"""Which adapters of PEFT train in pipeline stages as in one process; all others are refused by name.

Stages run the decoder's own parts, so an adapter that changes only layers trains as it does on shards
(`ds_hetero.frameworks.transformers.model.model_checks.ADAPTERS`). `REFUSED_IN_STAGES` lists those that also do
something outside of the layers, or that read several layers at once.
"""

from __future__ import annotations

from torch import nn

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.model_checks import adapter_problems, adapters_of

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
