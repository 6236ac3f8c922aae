"""Linear attention, state spaces and short convolutions of transformers' models, on shards.

A modelling file calls its convolution and its scan by names of its module. While a model of the file is split, these
names are doors: a door that is handed the sharded forward runs the layer over the whole sequence, any other call goes
on to what stood there before. The decoder's pre-hook puts the forward into the decoder's keywords; transformers hands
these to every layer and on to both functions, and activation checkpointing keeps them, so that the recomputation finds
the same forward.

Whatever kernel stands behind a name (torch, flash-linear-attention, mamba-ssm, causal-conv1d) runs as it is: on every
token of this rank's heads, or on this rank's tokens behind the few before them.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hetero.engine.forward_mode import ShardedForward
from ds_hetero.engine.patching import Function
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.attention import expect_whole_batch
from ds_hetero.runtime.data.shards import Batch, Entries
from ds_hetero.runtime.recurrent.convolution import convolution
from ds_hetero.runtime.recurrent.scan import scan
from ds_hetero.runtime.recurrent.scan_call import PassedState, Scan, Tensors

KEYWORD = "ds_hetero_forward"  # under which layers are handed the sharded forward

LAYER_TYPES = ("linear_attention", "conv", "hybrid")
"""Types of layers, as configurations name them, that go through doors where their file has some."""

_CONVOLUTION = "causal_conv1d_fn"
_CONVOLUTION_PLACES = ("hidden_states", "weight", "bias", "activation")
_FUSED = "mamba2_split_conv1d_scan_combined"  # returns None without its kernel; models then call the two others
_WITHOUT_DOOR = "mamba_selective_scan"  # Mamba-1: its arguments are [B, channels, s], and it is handed no keyword
_PACKING = ("cu_seqlens", "seq_idx")  # the batch's layout knows the documents
_STATES = ("initial_state", "initial_states")


@dataclass(frozen=True, slots=True)
class _ScanFunction:
    """How models call a scan."""

    positional: tuple[str, ...]  # names of the arguments that are given by place
    inputs: tuple[str, ...]  # those that hold a value for every token, [B, s, N, ...]
    parameters: tuple[str, ...]  # those that hold a value for every head, [H]
    output_like: str  # the input of the output's shape
    returns_state: bool  # whether it returns the output and the last state, or the output alone
    reader: str | None = None  # the input that reads the state, of a scan whose state only decays; else None


_DELTA_INPUTS = ("query", "key", "value", "g", "beta")
_DELTA_RULE = _ScanFunction(_DELTA_INPUTS[:3], _DELTA_INPUTS, (), "value", True)
_SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _ScanFunction(
        ("hidden_states", "dt", "A", "B", "C"),
        ("hidden_states", "dt", "B", "C"),
        ("A", "D", "dt_bias"),
        "hidden_states",
        False,
        "C",
    ),
}


class _Arguments(NamedTuple):
    """Of one call, as they were given: kernels behind a name may call the ones by place something else."""

    args: tuple[Any, ...]
    kwargs: Entries

    def by_name(self, places: tuple[str, ...]) -> Entries:
        """All arguments by name."""
        return dict(zip(places, self.args, strict=False)) | self.kwargs

    def call(self, function: Function, places: tuple[str, ...], by_name: Batch) -> Any:
        """Call ``function`` in the same way with other values."""
        args = (by_name[place] for place in places[: len(self.args)])
        return function(*args, **{name: by_name[name] for name in self.kwargs})


_opened: Counter[tuple[str, str]] = Counter()  # (file, name) of a door: models that use it


def has_doors(model: nn.Module) -> bool:
    """Whether a file that ``model`` is made of calls a scan or a convolution that has a door."""
    return any(True for _ in _doors_of(model))


def has_scan_without_door(model: nn.Module) -> bool:
    """Whether a file that ``model`` is made of calls a scan that has no door."""
    return any(hasattr(file, _WITHOUT_DOOR) for file in _files_of(model))


def mixes_by_door(module: nn.Module) -> bool:
    """Whether the convolution that ``module`` holds is one whose weight alone is read, in a call that has a door."""
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels


def open_doors(model: nn.Module) -> Callable[[], None]:
    """Put doors into the files that ``model`` is made of; return what takes them out with the last model of a file."""
    names = list(_doors_of(model))
    for file, name in names:
        if not _opened[file.__name__, name]:
            setattr(file, name, _door(name, getattr(file, name)))
        _opened[file.__name__, name] += 1

    def close() -> None:
        while names:
            file, name = names.pop()
            _opened[file.__name__, name] -= 1
            if not _opened[file.__name__, name]:
                setattr(file, name, getattr(file, name).__wrapped__)

    return close


def expect_doors_used(model: nn.Module, forward: ShardedForward) -> None:
    """Refuse recurrent layers that used no door in the forward just run. Raises `ModelError`: their types."""
    layer_types = getattr(model.config, "layer_types", None) or ()
    recurrent = sorted({str(kind) for kind in layer_types} & set(LAYER_TYPES))
    if recurrent and not forward.doors_used:
        raise ModelError(
            f"the layers of type {', '.join(recurrent)} of {type(model).__name__} did not call "
            f"{', '.join([_CONVOLUTION, *_SCANS])} of their own file, so that each rank would run them on its own "
            "tokens only. Something has replaced these layers, such as kernels of the Hub (use_kernels): load the "
            "model without it."
        )


def _doors_of(model: nn.Module) -> Iterator[tuple[ModuleType, str]]:
    for file in _files_of(model):
        for name in (_CONVOLUTION, _FUSED, *_SCANS):
            if hasattr(file, name):
                yield file, name


def _files_of(model: nn.Module) -> Iterator[ModuleType]:
    """The modelling files of transformers that the modules' classes are of."""
    files = {type(module).__module__: None for module in model.modules()}
    return (sys.modules[file] for file in files if file.startswith("transformers."))


def _door(name: str, original: Function) -> Function:
    """Function that stands in a file for ``original``."""

    @functools.wraps(original)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def door(*args: object, **kwargs: object) -> object:
        forward = kwargs.pop(KEYWORD, None)
        if not isinstance(forward, ShardedForward):
            expect_whole_batch()
            return original(*args, **kwargs)
        if name == _FUSED:
            return None
        forward.doors_used.add(name)
        given = _Arguments(args, {key: value for key, value in kwargs.items() if key not in _PACKING})
        if name == _CONVOLUTION:
            return _convolution(original, forward, given)
        return _scan(name, original, forward, given)

    return door


def _convolution(original: Callable[..., Tensor], forward: ShardedForward, given: _Arguments) -> Tensor:
    """The convolution of hidden states [B, C, s] with a weight [C, k]."""
    by_name = given.by_name(_CONVOLUTION_PLACES)
    x, size = by_name["hidden_states"], by_name["weight"].shape[-1]

    def compute(inputs: Tensor) -> Tensor:
        out: Tensor = given.call(original, _CONVOLUTION_PLACES, {**by_name, "hidden_states": inputs})
        return out

    x = x[:, :, :0] if forward.is_placeholder else x
    out = convolution(x, size, compute, forward.replica, forward.batch, forward.clock)
    return nn.functional.pad(out, (0, 1)) if forward.is_placeholder else out


def _scan(name: str, original: Function, forward: ShardedForward, given: _Arguments) -> Any:
    function = _SCANS[name]
    by_name = given.by_name(function.positional)
    asks_for_state = not function.returns_state and by_name.get("return_final_states")
    if asks_for_state or any(by_name.get(given_one) is not None for given_one in (*_STATES, "z")):
        raise ModelError(
            f"{name} is given or asked for a state, or given a gate, in a sharded forward, which cannot be split. Call "
            "the model with use_cache=False."
        )
    inputs = {key: by_name[key][:, :0] if forward.is_placeholder else by_name[key] for key in function.inputs}
    parameters = {key: by_name[key] for key in function.parameters if by_name.get(key) is not None}

    def compute(inputs: Tensors, parameters: Tensors) -> Tensor:
        result = given.call(original, function.positional, {**by_name, **inputs, **parameters})
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    passed = None if function.reader is None else _passed_state(function, function.reader, original, given)
    call = Scan(
        inputs=inputs, output_like=function.output_like, parameters=parameters, compute=compute, passed_state=passed
    )
    out = scan(call, forward.replica, forward.batch, forward.clock)
    if forward.is_placeholder:
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, 1))
    return (out, None) if function.returns_state else out


def _passed_state(function: _ScanFunction, reader: str, original: Function, given: _Arguments) -> PassedState | None:
    """Of Mamba-2: a token leaves exp(A dt) of the state before it; None where the last state cannot be asked for."""
    by_name = given.by_name(function.positional)
    if "return_final_states" not in given.kwargs:
        return None

    def compute(inputs: Tensors, parameters: Tensors) -> tuple[Tensor, Tensor]:
        asked = {**by_name, **inputs, **parameters, "return_final_states": True}
        out, state = given.call(original, function.positional, asked)
        return out, state

    def log_decay(inputs: Tensors, parameters: Tensors) -> Tensor:
        dt = inputs["dt"].float()
        if "dt_bias" in parameters:
            dt = dt + parameters["dt_bias"].float()
        if by_name.get("dt_softplus"):
            dt = nn.functional.softplus(dt)
        low, high = by_name.get("dt_limit") or (0.0, float("inf"))
        return parameters["A"].float() * dt.clamp(low, high)

    return PassedState(reader=reader, log_decay=log_decay, compute=compute)
