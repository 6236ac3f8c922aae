"""`Handle.undo` leaves nothing of this engine in the modules and classes of torch and the frameworks.

Budget: 20 s.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tests.framework_surface import listed_names
from tests.integration.tiny import UNEVEN_2, adam, batches, ds_config, llama
from tests.support import run_deepspeed

FRAMEWORKS = ("torch", "deepspeed", "transformers", "accelerate", "trl")
OURS = "/ds_hetero/"


def _owners() -> Iterator[tuple[str, Any]]:
    """Modules of the frameworks that are imported, and their classes."""
    seen: set[int] = set()
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in FRAMEWORKS or not isinstance(module, types.ModuleType):
            continue
        yield name, module
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__.partition(".")[0] in FRAMEWORKS and id(value) not in seen:
                seen.add(id(value))
                yield f"{value.__module__}.{value.__qualname__}", value


def _code(value: Any) -> types.CodeType | None:
    """The code that a function, method or property runs first."""
    while not isinstance(value, types.FunctionType):
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.MethodType):
            value = value.__func__
        else:
            return None
    return value.__code__


def _is_ours(value: Any) -> bool:
    code = _code(value)
    return code is not None and OURS in code.co_filename


def _values() -> dict[str, Any]:
    """All functions, methods, properties and classes of the frameworks, by owner and name, and each of a registry."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are deprecated, and looked at
        for owner_name, owner in _owners():
            for name, value in list(vars(owner).items()):
                if callable(value) or isinstance(value, classmethod | staticmethod | property):
                    found[f"{owner_name}.{name}"] = value
    for registry in (AttentionInterface, AttentionMaskInterface, ExpertsInterface):
        found |= {f"{registry.__name__}[{name!r}]": value for name, value in registry().items()}
    return found


def _replaced_on_record() -> dict[str, Any]:
    """Values of all names on the lists, private functions and attributes of classes, as their owners hold them."""
    found = {}
    for name in listed_names():
        module, _, path = name.partition(":")
        *owners, last = path.split(".")
        with contextlib.suppress(ImportError, AttributeError):
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            found[name] = getattr(owner, "__dict__", {}).get(last)
    return found


def _undone(rank: int) -> tuple[list[str], list[str], list[str], list[str]]:
    """What is ours while a job trains and after `undo`, what else is changed then, and threads that go on."""
    import deepspeed

    import ds_hetero

    # As in builds with NCCL, where all methods of ProcessGroup are wrapped.
    torch._C._distributed_c10d._dump_nccl_trace_json = lambda *args: json.dumps({})  # type: ignore[attr-defined]
    model = llama()
    deepspeed.init_distributed()
    before, during = _values() | _replaced_on_record(), {}
    for step in range(2):  # a second registration finds all as the first one did
        handle = ds_hetero.register()
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=ds_config(step + 1, UNEVEN_2))
        for batch in handle.dataloader(batches(1)):
            engine.backward(engine(**batch).loss)
            engine.step()
        during = _values()
        engine.destroy()
        handle.undo()
        model = llama()
    after = _values() | _replaced_on_record()
    ours = [sorted(name for name, value in values.items() if _is_ours(value)) for values in (during, after)]
    changed = sorted(name for name, value in before.items() if after.get(name) is not value)
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ds_hetero")]
    return ours[0], ours[1], changed, threads


def test_undo_leaves_nothing_of_this_engine_in_the_frameworks() -> None:
    for ours, left, changed, threads in run_deepspeed(_undone, 2):
        for name in (
            "ProcessGroup.allreduce",
            "ProcessGroup.send",
            "deepspeed.initialize",
            "Accelerator.__init__",
            "Trainer.compute_loss",
        ):
            assert any(each.endswith(name) for each in ours), (name, ours)
        assert (left, changed, threads) == ([], [], [])
