"""Linear attention, state-space layers and short convolutions of transformers' models, on shards.

A modelling file calls its convolution and its scan by names of its module, such as ``causal_conv1d_fn``. While a model
of the file is sharded, these names are bound to wrappers:

    call of a wrapper            action
    with the sharded forward     run the layer over the whole sequence: convolutions get the last tokens of the rank
                                 before, scans exchange tokens for heads or pass states
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

KEYWORD = "ds_hetero_forward"  # keyword argument by which layers pass the sharded forward to the wrappers

LAYER_TYPES = ("linear_attention", "conv", "hybrid")
"""Values of ``layer_types`` in configurations whose layers call wrapped functions."""

_CONVOLUTION = "causal_conv1d_fn"
_CONVOLUTION_ARGUMENTS = ("hidden_states", "weight", "bias", "activation")  # names of its positional arguments
# Fuses convolution and scan. Without its kernel it returns None, and models then call the two others.
_FUSED = "mamba2_split_conv1d_scan_combined"
_UNSUPPORTED_SCAN = "mamba_selective_scan"  # of Mamba-1: its arguments are [B, channels, s], and it gets no keywords
_PACKING_ARGUMENTS = ("cu_seqlens", "seq_idx")  # dropped: the batch layout has the documents
_STATE_ARGUMENTS = ("initial_state", "initial_states")


@dataclass(frozen=True, slots=True)
class _ScanFunction:
    """What a wrapper must know of a scan function: its arguments, their shapes, and what it returns."""

    positional: tuple[str, ...]  # names of its positional arguments
    inputs: tuple[str, ...]  # arguments with a value for every token, [B, s, N, ...]
    parameters: tuple[str, ...]  # arguments with a value for every head, [H]
    output_like: str  # the input whose shape the output has
    returns_state: bool  # whether it returns (output, last state) or only the output
    reader: str | None = None  # if the state only decays (Mamba-2): the input that reads the state; else None


_DELTA_INPUTS = ("query", "key", "value", "g", "beta")
_DELTA_RULE = _ScanFunction(
    positional=_DELTA_INPUTS[:3], inputs=_DELTA_INPUTS, parameters=(), output_like="value", returns_state=True
)
_SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _ScanFunction(
        positional=("hidden_states", "dt", "A", "B", "C"),
        inputs=("hidden_states", "dt", "B", "C"),
        parameters=("A", "D", "dt_bias"),
        output_like="hidden_states",
        returns_state=False,
        reader="C",
    ),
}


class _Arguments(NamedTuple):
    """Arguments of one call. Positional arguments stay positional: kernels may give their parameters other names."""

    args: tuple[Any, ...]
    kwargs: Entries

    def by_name(self, positional: tuple[str, ...]) -> Entries:
        """Return all arguments by name. ``positional``: names of the positional arguments, in their order."""
        return dict(zip(positional, self.args, strict=False)) | self.kwargs

    def call(self, function: Function, positional: tuple[str, ...], by_name: Batch) -> Any:
        """Call ``function`` with the values of ``by_name``, in the positions and keywords of the original call."""
        args = (by_name[name] for name in positional[: len(self.args)])
        return function(*args, **{name: by_name[name] for name in self.kwargs})


_num_models: Counter[tuple[str, str]] = Counter()  # sharded models that use a wrapper, by (file, name)


def has_recurrent_functions(model: nn.Module) -> bool:
    """Return True if a modelling file of ``model`` has a scan or a convolution that `wrap_functions` can wrap."""
    return any(True for _ in _find_functions(model))


def has_unsupported_scan(model: nn.Module) -> bool:
    """Return True if a modelling file of ``model`` has the scan of Mamba-1, which no wrapper can split."""
    return any(hasattr(file, _UNSUPPORTED_SCAN) for file in _find_files(model))


def is_depthwise_convolution(module: nn.Module) -> bool:
    """Return True if a module is a depthwise convolution.

    Models do not call such a module: they pass its weight to a function that `wrap_functions` wraps.
    """
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels


def wrap_functions(model: nn.Module) -> Callable[[], None]:
    """Wrap the convolutions and scans in the modelling files of ``model``.

    Returns:
        A function that ends the wrapping for ``model``. The original functions of a file are restored when the last
        model of the file has called it.
    """
    names = list(_find_functions(model))
    for file, name in names:
        if not _num_models[file.__name__, name]:
            setattr(file, name, _make_wrapper(name, getattr(file, name)))
        _num_models[file.__name__, name] += 1

    def unwrap() -> None:
        while names:
            file, name = names.pop()
            _num_models[file.__name__, name] -= 1
            if not _num_models[file.__name__, name]:
                setattr(file, name, getattr(file, name).__wrapped__)

    return unwrap


def expect_wrappers_called(model: nn.Module, forward: ShardedForward) -> None:
    """Refuse a model whose recurrent layers called no wrapper in the forward that has just ended.

    Raises:
        ModelError: no layer called a wrapper; the message has the types of the layers.
    """
    layer_types = getattr(model.config, "layer_types", None) or ()
    recurrent = sorted({str(kind) for kind in layer_types} & set(LAYER_TYPES))
    if recurrent and not forward.wrapped_calls:
        raise ModelError(
            f"the layers of type {', '.join(recurrent)} of {type(model).__name__} did not call "
            f"{', '.join([_CONVOLUTION, *_SCANS])} of their own file, so that each rank would run them on its own "
            "tokens only. Something has replaced these layers, such as kernels of the Hub (use_kernels): load the "
            "model without it."
        )


def _find_functions(model: nn.Module) -> Iterator[tuple[ModuleType, str]]:
    """Yield (file, name) of the functions that `wrap_functions` wraps."""
    for file in _find_files(model):
        for name in (_CONVOLUTION, _FUSED, *_SCANS):
            if hasattr(file, name):
                yield file, name


def _find_files(model: nn.Module) -> Iterator[ModuleType]:
    """Yield transformers' modules in which the classes of the model's modules are defined, each once."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    for name in names:
        if name.startswith("transformers."):
            yield sys.modules[name]


def _make_wrapper(name: str, original: Function) -> Function:
    """Return the wrapper of ``original``, a function that modelling files call by ``name``."""

    @functools.wraps(original)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wrapper(*args: object, **kwargs: object) -> object:
        forward = kwargs.pop(KEYWORD, None)
        if not isinstance(forward, ShardedForward):
            expect_whole_batch()
            return original(*args, **kwargs)
        if name == _FUSED:
            return None  # as without its kernel, so that the model calls convolution and scan, which are wrapped
        forward.wrapped_calls.add(name)
        arguments = _Arguments(args, {key: value for key, value in kwargs.items() if key not in _PACKING_ARGUMENTS})
        if name == _CONVOLUTION:
            return _run_convolution(original, forward, arguments)
        return _run_scan(name, original, forward, arguments)

    return wrapper


def _run_convolution(original: Callable[..., Tensor], forward: ShardedForward, arguments: _Arguments) -> Tensor:
    """Convolve hidden states [B, C, s] with a weight [C, k] over the whole sequence.

    A rank without tokens has one dummy token, whose result is zeros.
    """
    by_name = arguments.by_name(_CONVOLUTION_ARGUMENTS)
    x, size = by_name["hidden_states"], by_name["weight"].shape[-1]

    def compute(inputs: Tensor) -> Tensor:
        out: Tensor = arguments.call(original, _CONVOLUTION_ARGUMENTS, {**by_name, "hidden_states": inputs})
        return out

    x = x[:, :, :0] if forward.is_placeholder else x
    out = convolution(x, size, compute, forward.replica, forward.batch, forward.clock)
    return nn.functional.pad(out, (0, 1)) if forward.is_placeholder else out


def _run_scan(name: str, original: Function, forward: ShardedForward, arguments: _Arguments) -> Any:
    """Run a scan over the whole sequence; see `_SCANS` for its arguments.

    Returns:
        The output for this rank's tokens, as the model expects it: alone, or in a tuple with the last state, None.

    Raises:
        ModelError: the call passes or requests a state, or passes a gate.
    """
    function = _SCANS[name]
    by_name = arguments.by_name(function.positional)
    asks_for_state = not function.returns_state and by_name.get("return_final_states")
    has_state_or_gate = any(by_name.get(argument) is not None for argument in (*_STATE_ARGUMENTS, "z"))
    if asks_for_state or has_state_or_gate:
        raise ModelError(
            f"{name} is called with a state or a gate, or is asked for its last state, in a forward on shards. Such a "
            "call cannot be split over the sequence. Call the model with use_cache=False."
        )
    inputs = {key: by_name[key][:, :0] if forward.is_placeholder else by_name[key] for key in function.inputs}
    parameters = {key: by_name[key] for key in function.parameters if by_name.get(key) is not None}

    def compute(inputs: Tensors, parameters: Tensors) -> Tensor:
        result = arguments.call(original, function.positional, {**by_name, **inputs, **parameters})
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    passed_state = None
    if function.reader is not None:
        passed_state = _make_passed_state(function, function.reader, original, arguments)
    call = Scan(
        inputs=inputs,
        output_like=function.output_like,
        parameters=parameters,
        compute=compute,
        passed_state=passed_state,
    )
    out = scan(call, forward.replica, forward.batch, forward.clock)
    if forward.is_placeholder:
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, 1))
    return (out, None) if function.returns_state else out


def _make_passed_state(
    function: _ScanFunction, reader: str, original: Function, arguments: _Arguments
) -> PassedState | None:
    """Return the functions with which a rank computes its part of Mamba-2's scan, and passes the state to the next.

    A token with step size dt multiplies the state before it by exp(A dt), so the state of the rank before decays by the
    product of these factors over this rank's tokens. None if the call has no ``return_final_states``: then the last
    state cannot be computed.
    """
    by_name = arguments.by_name(function.positional)
    if "return_final_states" not in arguments.kwargs:
        return None

    def compute(inputs: Tensors, parameters: Tensors) -> tuple[Tensor, Tensor]:
        with_state = {**by_name, **inputs, **parameters, "return_final_states": True}
        out, state = arguments.call(original, function.positional, with_state)
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
