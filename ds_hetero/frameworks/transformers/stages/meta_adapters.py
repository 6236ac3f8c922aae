"""Adapters of PEFT on a model without weights: adapters have their values, the model gets its own stage by stage.

PEFT draws the first values of an adapter on the CPU, and then moves them to the device of the layer. If that is the
meta device, the values are lost. Here they stay on the CPU, so they are those that PEFT draws on a model with weights
after the same seed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Parts of names that PEFT puts into the names of a model's parameters.
_PREFIX = "base_model.model."
_INSERTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def with_adapters(model: nn.Module, adapters: Any) -> nn.Module:
    """Return a model of PEFT around a model on the meta device, with adapters on the CPU.

    Args:
        adapters: a configuration of PEFT, such as ``LoraConfig``; or a folder with adapters that PEFT has saved, to
            train these further.

    Raises:
        ModelError: the installed PEFT is not one that this was written for.
    """
    from peft import PeftModel, get_peft_model

    with _adapters_on_cpu():
        if isinstance(adapters, str | Path):
            loaded: nn.Module = PeftModel.from_pretrained(model, str(adapters), is_trainable=True)
            return loaded
        adapted: nn.Module = get_peft_model(model, adapters)
        return adapted


@contextlib.contextmanager
def _adapters_on_cpu() -> Iterator[None]:
    """Inside the context, modules that are moved to the meta device stay where they are; a change of dtype counts."""
    stock = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if args and isinstance(args[0], torch.device) and args[0].type == "meta":
            args = args[1:]
            if not args and not kwargs:
                return module
        return stock(module, *args, **kwargs)

    nn.Module.to = to  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.to = stock  # type: ignore[method-assign]


def name_without_adapters(name: str) -> str:
    """Return the name that a parameter of the base model has without PEFT.

    For example, ``model.norm.weight`` for ``base_model.model.model.norm.base_layer.weight``.
    """
    return _INSERTED.sub("", name.removeprefix(_PREFIX))
