"""``Accelerator.get_state_dict``, by which the Trainer saves models, if experts are divided among ranks."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry


def get_state_dict(
    registry: Registry, stock: Function, accelerator: Accelerator, model: Any, *args: object, **kwargs: object
) -> object:
    """Extend ``Accelerator.get_state_dict``: rank 0 gets all experts, other ranks none.

    Of a PEFT model with packed experts, which cannot be gathered, rank 0 gets what is trained: its adapters.

    Caller: every rank of the world if the experts are divided, as accelerate demands for ZeRO-3.
    Collectives: then those of `ds_hetero.runtime.experts.parts.ExpertParts.gathered`.
    """
    trained = registry.find(accelerator.unwrap_model(model))
    experts = None if trained is None else trained.experts
    if experts is None:
        return stock(accelerator, model, *args, **kwargs)
    saves_adapters = experts.are_packed and hasattr(accelerator.unwrap_model(model), "peft_config")
    with experts.gathered(frozen=not saves_adapters):
        return stock(accelerator, model, *args, **kwargs)
