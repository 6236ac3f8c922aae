"""``Accelerator.get_state_dict``, by which the Trainer saves models, if experts are divided among ranks."""

from __future__ import annotations

import contextlib
from typing import Any

from accelerate import Accelerator

from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry


def get_state_dict(
    registry: Registry, stock: Function, accelerator: Accelerator, model: Any, *args: object, **kwargs: object
) -> object:
    """Extend ``Accelerator.get_state_dict``: rank 0 gets all experts, other ranks their parts.

    Caller: every rank of the world if the experts are divided, as accelerate demands for ZeRO-3.
    Collectives: then those of `ds_hetero.runtime.experts.parts.ExpertParts.gathered`.
    """
    trained = registry.find(accelerator.unwrap_model(model))
    experts = None if trained is None else trained.experts
    with contextlib.nullcontext() if experts is None else experts.gathered():
        return stock(accelerator, model, *args, **kwargs)
