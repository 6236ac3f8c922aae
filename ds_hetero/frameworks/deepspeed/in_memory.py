"""Parts of a checkpoint of DeepSpeed's, in files or in no files: taken by reference then, and loaded from memory.

DeepSpeed's own methods say what belongs to a checkpoint and put it back, through their checkpoint engine; so any layout
of the parts loads under any other, as from disk.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ds_hetero.engine.patching import Function
from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.protocols import Engine, State
from ds_hetero.gradient_sync.transfers import local_tensor

_TAG = "memory"
_SAMPLES = 64  # elements of each parameter

_states: dict[str, dict[str, Any]] = {}  # of the checkpoint that is being loaded, by path


def state_in_memory(path: str) -> dict[str, Any] | None:
    """The state that stands for a file; None where the file is one."""
    return _states.get(path)


def is_in_memory() -> bool:
    """Whether the checkpoint that is being loaded is no files."""
    return bool(_states)


class PartTaker:
    """Stands in for DeepSpeed's checkpoint engine while a state is taken, or put back."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self.parts: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a reference to what would be written."""
        self.parts[os.path.basename(path)] = state_dict

    def load(self, path: str, map_location: object = None) -> Any:
        """Return what would be read."""
        state = state_in_memory(path)
        return self._stock.load(path, map_location=map_location) if state is None else state

    def makedirs(self, *_: object, **__: object) -> None:
        """Nothing is written."""


@contextmanager
def _in_place(engine: Any) -> Iterator[PartTaker]:
    stock, taker = engine.checkpoint_engine, PartTaker(engine.checkpoint_engine)
    engine.checkpoint_engine = taker
    try:
        yield taker
    finally:
        engine.checkpoint_engine = stock


@contextmanager
def parts_in_memory(engine: Any, *, with_frozen: bool = True) -> Iterator[dict[str, Any]]:
    """The parts of a checkpoint that this rank would write, by file name: references, valid until the next step.

    With ZeRO-3 the parameters that it holds gathered are put away inside, and gathered again at the end.

    Args:
        with_frozen: whether parameters that are not trained belong to them.

    Caller: every rank.
    Collectives: with ZeRO-3 and unequal weights, those of `equal_shards`; with ZeRO-3, a gather at the end.
    """
    kind = type(engine)  # whose methods are called as they are, without what is around them when files are written
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()
    try:
        with _in_place(engine) as taker:
            kind._save_checkpoint(engine, "", _TAG, client_state={}, exclude_frozen_parameters=not with_frozen)
            if engine.save_zero_checkpoint:
                kind._save_zero_checkpoint(engine, "", _TAG)
        yield taker.parts
    finally:
        if engine._optimizer_has_ckpt_event_epilogue():
            engine.optimizer.checkpoint_event_epilogue()


def load_parts(engine: Engine, parts: Mapping[str, Any], *, with_frozen: bool = True) -> None:
    """Load a checkpoint of ``parts``, by name. Raises `CheckpointError` on every rank: another model or stage.

    Args:
        with_frozen: whether parameters that are not trained are in them; else they stay as they are.

    Caller: every rank.
    Collectives: those of DeepSpeed's ``load_checkpoint``.
    """
    with tempfile.TemporaryDirectory(prefix="ds_hetero-") as folder, _in_place(engine):
        (Path(folder) / _TAG).mkdir()
        try:
            for name, state in parts.items():
                path = Path(folder, _TAG, name)
                path.touch()  # DeepSpeed and the hooks ask whether it is there
                _states[str(path)] = state
            method: Function = engine.load_checkpoint  # type: ignore[attr-defined]  # with what is around it
            loaded, _ = method(folder, _TAG, load_module_strict=with_frozen)
        finally:
            _states.clear()
    if loaded is None:
        raise CheckpointError("DeepSpeed did not load the state that was kept in memory; its message is above.")


def sample_frozen(engine: Any) -> dict[tuple[str, bool], float]:
    """Sums of a few elements of every parameter that is not trained: other ones where somebody has changed it.

    Returns:
        By name, and by whether this rank holds a part of the parameter alone.
    """
    frozen = {name: one for name, one in engine.module.named_parameters() if not one.requires_grad}
    keys = [(name, isinstance(one, DTensor) or hasattr(one, "ds_tensor")) for name, one in frozen.items()]
    tensors = [local_tensor(getattr(one, "ds_tensor", one)).detach().reshape(-1) for one in frozen.values()]
    sums = [one[:: max(1, one.numel() // _SAMPLES)].sum(dtype=torch.float64) for one in tensors]
    return dict(zip(keys, torch.stack(sums).tolist(), strict=True)) if sums else {}


def read_part(file: str) -> State:
    """A file of a checkpoint, whose tensors are read when used. Raises `CheckpointError`: missing or damaged."""
    if (in_memory := state_in_memory(file)) is not None:
        return in_memory
    try:
        content: State = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False)
    except FileNotFoundError:
        raise CheckpointError(f"{os.path.basename(file)} is missing") from None
    except Exception as error:  # torch.load raises what it meets in the bytes
        raise CheckpointError(f"{os.path.basename(file)} cannot be read ({type(error).__name__}: {error})") from None
    return content
