"""Linear attention, state-space layers and short convolutions of transformers' models, on shards.

A modelling file calls its convolution and its scan by names of its module, such as ``causal_conv1d_fn``. While a model
of the file is sharded, wrappers ("doors") have these names:

    call of a door               action
    with the sharded forward     run the layer over the whole sequence: convolutions get the last tokens of the rank
                                 before, scans trade tokens for heads or pass states
    any other                    call the original function

The decoder's pre-hook adds the sharded forward to the decoder's keywords. transformers passes these to every layer and
on to both functions. Activation checkpointing saves them, so a recomputation gets the same forward.

The kernel behind a name (torch, flash-linear-attention, mamba-ssm, causal-conv1d) is not changed.

Dimension key: B rows, s tokens of this rank, C channels, k kernel size, N heads or groups, H heads.
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

KEYWORD = "ds_hetero_forward"  # keyword argument by which layers and functions get the sharded forward

LAYER_TYPES = ("linear_attention", "conv", "hybrid")
"""Values of ``layer_types`` in configurations whose layers call doors."""

_CONVOLUTION = "causal_conv1d_fn"
_CONVOLUTION_PLACES = ("hidden_states", "weight", "bias", "activation")
# Fuses convolution and scan. Without its kernel it returns None, and models then call the two others.
_FUSED = "mamba2_split_conv1d_scan_combined"
_WITHOUT_DOOR = "mamba_selective_scan"  # Mamba-1: its arguments are [B, channels, s], and it gets no keywords
_PACKING = ("cu_seqlens", "seq_idx")  # dropped: the batch layout has the documents
_STATES = ("initial_state", "initial_states")


@dataclass(frozen=True, slots=True)
class _ScanFunction:
    """Signature of a scan, as models call it."""

    positional: tuple[str, ...]  # names of its positional arguments
    inputs: tuple[str, ...]  # arguments with a value for every token, [B, s, N, ...]
    parameters: tuple[str, ...]  # arguments with a value for every head, [H]
    output_like: str  # the input whose shape the output has
    returns_state: bool  # whether it returns (output, last state) or only the output
    reader: str | None = None  # of a scan whose state only decays: the input that reads the state; else None


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
    """Arguments of one call. Positional ones stay positional, because kernels may have other names for them."""

    args: tuple[Any, ...]
    kwargs: Entries

    def by_name(self, positional: tuple[str, ...]) -> Entries:
        """Return all arguments by name. ``positional``: names of the positional ones."""
        return dict(zip(positional, self.args, strict=False)) | self.kwargs

    def call(self, function: Function, positional: tuple[str, ...], by_name: Batch) -> Any:
        """Call ``function`` with other values, in the same positions and keywords."""
        args = (by_name[name] for name in positional[: len(self.args)])
        return function(*args, **{name: by_name[name] for name in self.kwargs})


_opened: Counter[tuple[str, str]] = Counter()  # number of models that use a door, by (file, name)


def has_doors(model: nn.Module) -> bool:
    """Return True if a modelling file of ``model`` has a scan or a convolution for which there is a door."""
    return any(True for _ in _doors_of(model))


def has_scan_without_door(model: nn.Module) -> bool:
    """Return True if a modelling file of ``model`` has a scan for which there is no door."""
    return any(hasattr(file, _WITHOUT_DOOR) for file in _files_of(model))


def mixes_by_door(module: nn.Module) -> bool:
    """Return True for a depthwise convolution: models only read its weight, and call the function with the door."""
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels


def open_doors(model: nn.Module) -> Callable[[], None]:
    """Put doors into the modelling files of ``model``.

    Returns:
        A function that closes them. A door is removed when the last model of its file is closed.
    """
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
    """Refuse recurrent layers that called no door in the forward that has just ended. Raises `ModelError`."""
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
    """Yield (file, name) of the functions that get doors."""
    for file in _files_of(model):
        for name in (_CONVOLUTION, _FUSED, *_SCANS):
            if hasattr(file, name):
                yield file, name


def _files_of(model: nn.Module) -> Iterator[ModuleType]:
    """Yield transformers' modules in which the classes of the model's modules are defined, each once."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    for name in names:
        if name.startswith("transformers."):
            yield sys.modules[name]


def _door(name: str, original: Function) -> Function:
    """Return the door for ``original``."""

    @functools.wraps(original)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def door(*args: object, **kwargs: object) -> object:
        forward = kwargs.pop(KEYWORD, None)
        if not isinstance(forward, ShardedForward):
            expect_whole_batch()
            return original(*args, **kwargs)
        if name == _FUSED:
            return None  # as without its kernel, so that the model calls convolution and scan, which have doors
        forward.doors_used.add(name)
        given = _Arguments(args, {key: value for key, value in kwargs.items() if key not in _PACKING})
        if name == _CONVOLUTION:
            return _convolution(original, forward, given)
        return _scan(name, original, forward, given)

    return door


def _convolution(original: Callable[..., Tensor], forward: ShardedForward, given: _Arguments) -> Tensor:
    """Convolve hidden states [B, C, s] with a weight [C, k]. A rank without tokens has one dummy token."""
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
    has_state_or_gate = any(by_name.get(argument) is not None for argument in (*_STATES, "z"))
    if asks_for_state or has_state_or_gate:
        raise ModelError(
            f"{name} gets or returns a state, or gets a gate, in a sharded forward; such a call cannot be split over "
            "the sequence. Call the model with use_cache=False."
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
    """Describe how Mamba-2's state decays: a token leaves exp(A dt) of the state before it.

    None if the call has no ``return_final_states``, so that the last state cannot be computed.
    """
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
