"""Parts of DeepSpeed's checkpoints, in files or in memory, where they are taken by reference.

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
from torch import Tensor
from torch.distributed.tensor import DTensor

from ds_hetero.engine.patching import Function
from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.protocols import CheckpointEngine, Engine, State
from ds_hetero.gradient_sync.shards import local_tensor

_TAG = "memory"
_SAMPLES = 64  # elements of each parameter
_OF_SCRIPTS = ("_get_buffer_names", "_get_shared_params")  # make what none but scripts that convert files read

_states: dict[str, dict[str, Any]] = {}  # of the checkpoint that is being loaded, by path


def state_in_memory(path: str) -> dict[str, Any] | None:
    """Return the state that stands for a file; None where the file is one."""
    return _states.get(path)


def is_in_memory() -> bool:
    """Whether the checkpoint that is being loaded lies in memory, not in files."""
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
def standing_in(engine: Any, stand_in: CheckpointEngine) -> Iterator[None]:
    """Let the engine read and write its files through another checkpoint engine inside."""
    stock, engine.checkpoint_engine = engine.checkpoint_engine, stand_in
    try:
        yield
    finally:
        engine.checkpoint_engine = stock


@contextmanager
def parts_in_memory(engine: Any, *, with_frozen: bool = True) -> Iterator[dict[str, Any]]:
    """The parts of a checkpoint that this rank would write, by file name: references, valid until the next step.

    With ZeRO-3 the parameters that it holds gathered are put away inside, and gathered again at the end.

    Args:
        with_frozen: whether parameters that are not trained belong to them.

    Caller: every rank.
    Collectives: with ZeRO-3 and unequal weights, those of `zero.equal_shards`; with ZeRO-3, a gather at the end.
    """
    kind = type(engine)  # whose methods are called as they are, without what is around them when files are written
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()
    try:
        for name in _OF_SCRIPTS:
            setattr(engine, name, dict)  # nothing, without looking at every module
        taker = PartTaker(engine.checkpoint_engine)
        with standing_in(engine, taker):
            kind._save_checkpoint(engine, "", _TAG, client_state={}, exclude_frozen_parameters=not with_frozen)
            if engine.save_zero_checkpoint:
                kind._save_zero_checkpoint(engine, "", _TAG)
        yield taker.parts
    finally:
        for name in _OF_SCRIPTS:
            delattr(engine, name)
        if engine._optimizer_has_ckpt_event_epilogue():
            engine.optimizer.checkpoint_event_epilogue()


def load_parts(engine: Engine, parts: Mapping[str, Any], *, with_frozen: bool = True) -> None:
    """Load a checkpoint of ``parts``, by name. Raises `CheckpointError` on every rank: another model or stage.

    Args:
        with_frozen: whether parameters that are not trained are in them; else they stay as they are.

    Caller: every rank.
    Collectives: those of DeepSpeed's ``load_checkpoint``.
    """
    with tempfile.TemporaryDirectory(prefix="ds_hetero-") as folder:
        (Path(folder) / _TAG).mkdir()
        try:
            for name, state in parts.items():
                path = Path(folder, _TAG, name)
                path.touch()  # DeepSpeed and the hooks ask whether it is there
                _states[str(path)] = state
            method: Function = engine.load_checkpoint  # type: ignore[attr-defined]  # with what is around it
            with standing_in(engine, PartTaker(engine.checkpoint_engine)):
                loaded, _ = method(folder, _TAG, load_module_strict=with_frozen)
        finally:
            _states.clear()
    if loaded is None:
        raise CheckpointError("DeepSpeed did not load the state that was kept in memory; its message is above.")


class FrozenSample:
    """A few elements of every parameter that is not trained, which show whether it has changed.

    Attributes:
        sums: of these elements at the start, by the parameter's name and by whether this rank holds a part of it alone.
    """

    def __init__(self, engine: Any) -> None:
        parameters = dict(engine.module.named_parameters())
        frozen = {name: one for name, one in parameters.items() if not one.requires_grad}
        self._trained = [one for one in parameters.values() if one.requires_grad]
        self._frozen = list(frozen.values())
        self._pointers: list[int] = []  # of the tensors that the views are of
        self._views: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        keys = [(name, isinstance(one, DTensor) or hasattr(one, "ds_tensor")) for name, one in frozen.items()]
        sums = [one.sum(dtype=torch.float64) for one in map(_sample, self.tensors())]
        self.sums = dict(zip(keys, torch.stack(sums).tolist(), strict=True)) if sums else {}
        self._before = self._read()

    def has_changed(self) -> bool:
        """Whether one of them is another now, or one that was trained is not any more."""
        if any(not one.requires_grad for one in self._trained):
            return True
        return any(not torch.equal(*pair) for pair in zip(self._before, self._read(), strict=True))

    def tensors(self) -> list[Tensor]:
        """Parts of them that this rank has."""
        return [local_tensor(getattr(one, "ds_tensor", one)) for one in self._frozen]

    def _read(self) -> list[Tensor]:
        """Return the elements, those of a type and device together."""
        held = self.tensors()
        pointers = [one.data_ptr() for one in held]
        if pointers != self._pointers:
            self._views.clear()
            for one in held:
                self._views.setdefault((one.dtype, one.device), []).append(_sample(one))
            is_view = all(one.is_contiguous() for one in held)
            self._pointers = pointers if is_view else []  # of the others it is a copy
        return [torch.cat(views) for views in self._views.values()]


def _sample(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:: max(1, tensor.numel() // _SAMPLES)]


def read_part(file: str) -> State:
    """Return a file of a checkpoint, whose tensors are read when used. Raises `CheckpointError`: missing or damaged."""
    if (in_memory := state_in_memory(file)) is not None:
        return in_memory
    try:
        content: State = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False)
    except FileNotFoundError:
        raise CheckpointError(f"{os.path.basename(file)} is missing") from None
    except Exception as error:  # torch.load raises what it meets in the bytes
        raise CheckpointError(f"{os.path.basename(file)} cannot be read ({type(error).__name__}: {error})") from None
    return content
