"""Skip the first batches of a loader, also in modules that have imported accelerate's function by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from ds_hetero.engine.loader import WholeLoader
from ds_hetero.engine.loader_by_mode import LoaderByMode
from ds_hetero.engine.patching import Function, Patches, around
from ds_hetero.runtime.data.loader import ShardedLoader
from ds_hetero.runtime.pipeline.batches import SameBatches


def _skip_first_batches(stock: Function, dataloader: Any, num_batches: int = 0) -> object:
    """Replace ``skip_first_batches``: a loader of this engine skips batches itself."""
    if isinstance(dataloader, ShardedLoader | WholeLoader | LoaderByMode | SameBatches):
        return dataloader.skipping(num_batches, stock)
    return stock(dataloader, num_batches)


skip_first_batches = around(_skip_first_batches)


def replace_wherever_imported(patches: Patches, module: ModuleType, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function also in modules that have imported it by name, by replacing the code of the function object.

    The new code is ``return _ds_hetero_NAME(*args, **kwargs)``, in which ``_ds_hetero_NAME`` is a global name of the
    function's module. A second function object with the former code is the stock function.

    Args:
        make: takes the stock function, and returns the function that replaces it.
    """
    function: FunctionType = inspect.unwrap(vars(module)[name])  # the name may already be replaced
    former_code = function.__code__
    replacement = f"_ds_hetero_{name}"
    stock = FunctionType(former_code, function.__globals__, name, function.__defaults__, function.__closure__)

    source = f"def {name}(*args, **kwargs):\n    return {replacement}(*args, **kwargs)\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), {}, namespace)
    patches.add(module, replacement, make(stock))
    function.__code__ = namespace[name].__code__
    patches.on_undo(lambda: setattr(function, "__code__", former_code))
