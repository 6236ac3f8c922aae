"""Let ranks of any command take their place in an emulated cluster; Python imports this file when it starts.

It does so if this folder is on PYTHONPATH, which `benchmarks.lab.launch` sets. In a process with RANK and the
launcher's settings in its environment, torch.distributed's `init_process_group` is wrapped once torch has been
imported: when the group exists, the rank takes its speed and its memory limit. DeepSpeed is kept from compiling an
extension at its start.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Finds each module of `_AFTER_IMPORT` once, by all other finders, and wraps its loader."""

    def __init__(self) -> None:
        self._waiting = dict(_AFTER_IMPORT)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        change = self._waiting.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _wrap_loader(spec.loader, change)
        return spec


def _wrap_loader(loader: Any, change: Callable[[Any], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        change(module)

    loader.exec_module = exec_module


def _join_when_the_group_exists(module: Any) -> None:
    original = module.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        _join()

    module.init_process_group = init_process_group


def _without_shared_memory(module: Any) -> None:
    """Keep DeepSpeed from compiling its extension for all-reduces in shared memory.

    They would bypass the emulated links. Ranks would also wait for the one that compiles, minutes on a busy machine; if
    it is killed meanwhile, it leaves a lock for which every later start waits forever.
    """
    module.ShareMemCommBuilder.is_compatible = lambda builder, verbose=False: False


def _join() -> None:
    """Take this rank's place in the emulated cluster."""
    settings = json.loads(os.environ["DS_HETERO_LAB"])
    sys.path.append(settings["root"])
    from benchmarks.emulation.join import join

    join(settings)


_AFTER_IMPORT: dict[str, Callable[[Any], None]] = {
    "torch.distributed.distributed_c10d": _join_when_the_group_exists,
    "deepspeed.ops.op_builder.cpu.comm": _without_shared_memory,
}


def _import_the_usual() -> None:
    """Import the file of this name that Python would have imported otherwise, if there is one."""
    here = str(Path(__file__).parent)
    ours = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    with contextlib.suppress(ImportError):
        import sitecustomize  # noqa: F401
    if ours is not None:
        sys.modules.setdefault("sitecustomize", ours)


_import_the_usual()
if "RANK" in os.environ and "DS_HETERO_LAB" in os.environ:
    os.environ.update(json.loads(os.environ["DS_HETERO_LAB"])["environment"][int(os.environ["RANK"])])
    sys.meta_path.insert(0, _Finder())
