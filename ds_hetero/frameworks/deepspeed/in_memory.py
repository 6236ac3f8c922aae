"""Checkpoints in memory: DeepSpeed's own methods save into, and load from, a dictionary instead of files.

DeepSpeed reads and writes all files of a checkpoint through its checkpoint engine. `InMemoryCheckpointEngine` replaces
that engine: ``save`` keeps a reference to each state, by file name, and ``load`` returns the state. So a checkpoint in
memory has the same parts as one on disk, and loads on any number of ranks as well.
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
_SAMPLES = 64  # elements of each frozen parameter that `FrozenSample` compares
# Methods that walk all modules for entries that only scripts for converting files read.
_SCRIPT_ENTRIES = ("_get_buffer_names", "_get_shared_params")

_states: dict[str, dict[str, Any]] = {}  # states of the checkpoint that is being loaded from memory, by path


def state_in_memory(path: str) -> dict[str, Any] | None:
    """Return the state in memory that replaces a file; None if the path is a file on disk."""
    return _states.get(path)


def is_in_memory() -> bool:
    """Return whether the checkpoint that is being loaded is in memory, not in files."""
    return bool(_states)


class InMemoryCheckpointEngine:
    """A checkpoint engine that saves states into a dictionary, and loads states that are in memory.

    Args:
        stock: DeepSpeed's checkpoint engine, to which all other calls go.

    Attributes:
        parts: the saved states, by file name.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self.parts: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a reference to the state instead of writing it."""
        self.parts[os.path.basename(path)] = state_dict

    def load(self, path: str, map_location: object = None) -> Any:
        """Return the state in memory with this path, or read the file if there is none."""
        state = state_in_memory(path)
        return self._stock.load(path, map_location=map_location) if state is None else state

    def makedirs(self, *_: object, **__: object) -> None:
        """Do nothing: no file is written."""


@contextmanager
def replaced_checkpoint_engine(engine: Any, replacement: CheckpointEngine) -> Iterator[None]:
    """Inside the context, let the engine save and load its files through ``replacement``."""
    stock, engine.checkpoint_engine = engine.checkpoint_engine, replacement
    try:
        yield
    finally:
        engine.checkpoint_engine = stock


@contextmanager
def parts_in_memory(engine: Any, *, with_frozen: bool = True) -> Iterator[dict[str, Any]]:
    """Return the states that this rank would write into files of a checkpoint, by file name.

    The states are references to the engine's tensors, and valid until the next step. On ZeRO-3, gathered parameters are
    released inside the context, and gathered again at its end.

    Args:
        with_frozen: whether frozen parameters are included.

    Caller: every rank.
    Collectives: on ZeRO-3 a gather at the end; with unequal weights also those of
        `ds_hetero.frameworks.deepspeed.zero.equal_shards`.
    """
    engine_type = type(engine)  # its methods are DeepSpeed's own, without the hooks for checkpoints in files
    if hasattr(engine.optimizer, "checkpoint_event_prologue"):
        engine.optimizer.checkpoint_event_prologue()
    try:
        for name in _SCRIPT_ENTRIES:
            setattr(engine, name, dict)  # returns an empty dictionary
        memory_engine = InMemoryCheckpointEngine(engine.checkpoint_engine)
        with replaced_checkpoint_engine(engine, memory_engine):
            engine_type._save_checkpoint(engine, "", _TAG, client_state={}, exclude_frozen_parameters=not with_frozen)
            if engine.save_zero_checkpoint:
                engine_type._save_zero_checkpoint(engine, "", _TAG)
        yield memory_engine.parts
    finally:
        for name in _SCRIPT_ENTRIES:
            delattr(engine, name)
        if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()


def load_parts(engine: Engine, parts: Mapping[str, Any], *, with_frozen: bool = True) -> None:
    """Load a checkpoint from memory.

    Args:
        parts: states of the files of all ranks that saved the checkpoint, by file name.
        with_frozen: whether ``parts`` has frozen parameters; otherwise these keep their values.

    Caller: every rank.
    Collectives: those of DeepSpeed's ``load_checkpoint``.

    Raises:
        CheckpointError: on every rank: the checkpoint is of another model or ZeRO stage.
    """
    with tempfile.TemporaryDirectory(prefix="ds_hetero-") as folder:
        (Path(folder) / _TAG).mkdir()
        try:
            for name, state in parts.items():
                path = Path(folder, _TAG, name)
                path.touch()  # an empty file: DeepSpeed and the hooks check that it exists
                _states[str(path)] = state
            load: Function = engine.load_checkpoint  # type: ignore[attr-defined]  # with its hooks
            with replaced_checkpoint_engine(engine, InMemoryCheckpointEngine(engine.checkpoint_engine)):
                loaded_path, _ = load(folder, _TAG, load_module_strict=with_frozen)
        finally:
            _states.clear()
    if loaded_path is None:
        raise CheckpointError("DeepSpeed did not load the state in memory. Its own message above says why.")


class FrozenSample:
    """Copies of a few elements of every frozen parameter; `has_changed` compares them with the present elements.

    Attributes:
        sums: sum of the sampled elements at the start. A key is the parameter's name, and True if this rank holds only
            a part of the parameter.
    """

    def __init__(self, engine: Any) -> None:
        parameters = dict(engine.module.named_parameters())
        frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        self._trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self._frozen = list(frozen.values())
        self._views: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}  # the sampled elements
        self._pointers: list[int] = []  # addresses of the tensors behind ``_views``; empty if some of these are copies
        keys = []
        for name, parameter in frozen.items():
            is_part = isinstance(parameter, DTensor) or hasattr(parameter, "ds_tensor")
            keys.append((name, is_part))
        sums = [_sample(tensor).sum(dtype=torch.float64) for tensor in self.tensors()]
        self.sums = dict(zip(keys, torch.stack(sums).tolist(), strict=True)) if sums else {}
        self._before = self._read()

    def has_changed(self) -> bool:
        """Return whether a frozen parameter has changed, or a trained one is frozen now."""
        if any(not parameter.requires_grad for parameter in self._trained):
            return True
        return any(not torch.equal(*pair) for pair in zip(self._before, self._read(), strict=True))

    def tensors(self) -> list[Tensor]:
        """Return this rank's parts of the frozen parameters."""
        return [local_tensor(getattr(parameter, "ds_tensor", parameter)) for parameter in self._frozen]

    def _read(self) -> list[Tensor]:
        """Return the sampled elements as they are now, in one tensor for each dtype and device."""
        tensors = self.tensors()
        pointers = [tensor.data_ptr() for tensor in tensors]
        if pointers != self._pointers:
            self._views.clear()
            for tensor in tensors:
                self._views.setdefault((tensor.dtype, tensor.device), []).append(_sample(tensor))
            # Samples of tensors that are not contiguous are copies, and have to be made again every time.
            are_views = all(tensor.is_contiguous() for tensor in tensors)
            self._pointers = pointers if are_views else []
        return [torch.cat(views) for views in self._views.values()]


def _sample(tensor: Tensor) -> Tensor:
    """Return about `_SAMPLES` elements of a tensor, at equal distances."""
    return tensor.reshape(-1)[:: max(1, tensor.numel() // _SAMPLES)]


def read_part(file: str) -> State:
    """Return the content of a checkpoint's file, or of its state in memory; tensors of a file are read when used.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    if (state := state_in_memory(file)) is not None:
        return state
    try:
        content: State = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False)
    except FileNotFoundError:
        raise CheckpointError(f"{os.path.basename(file)} is missing") from None
    except Exception as error:  # torch.load raises almost anything for damaged files
        raise CheckpointError(f"{os.path.basename(file)} cannot be read ({type(error).__name__}: {error})") from None
    return content
