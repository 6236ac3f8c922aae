"""Experts whose weights bitsandbytes has packed in 4 bits: which can be divided among ranks, and how they are.

``bitsandbytes.nn.parametrize.replace_parameter_4bit`` packs all experts of a weight one after the other, two values in
a byte, in blocks that share one constant. It keeps them as a parametrization of the module: whoever reads the weight
gets it unpacked. A rank can keep its experts if no block has values of two of them:

    weight [8, 64, 32], blocks of 64 values    an expert has 32 blocks: 1,024 bytes, 32 constants
    weight [8, 9, 5]                           a block has values of two experts: refused

Constants that were quantized in turn (``compress_statistics``) are kept unpacked, in fp32, which changes no value:
their blocks of 256 need not end where experts end.

Dimension key: E experts of a layer, n those of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hetero.values.splits import Split

_PARAMETRIZATION = ("bitsandbytes.nn.parametrize", "Bnb4bitParametrization")  # module and name of the class


class PackedWeight(NamedTuple):
    """A packed weight of a module of experts."""

    name: str
    container: Any  # torch's list of parametrizations, whose parameter ``original`` has the packed values
    parametrization: Any  # unpacks them; the last of the list


def packed_weights(module: nn.Module) -> Iterator[PackedWeight]:
    """Yield the parametrized weights of a module of experts; `packing_problem` says whether they are packed."""
    for name, container in getattr(module, "parametrizations", {}).items():
        yield PackedWeight(name, container, container[-1])


def packing_problem(module: Any) -> str:
    """Return why the packed weights of a layer's experts cannot be cut by expert; empty if they can, or if none is."""
    for name, container, parametrization in packed_weights(module):
        kind = type(parametrization)
        if (kind.__module__, kind.__name__) != _PARAMETRIZATION or len(container) > 1:
            return f"has a parametrization of the class {kind.__name__} on {name}, which is not cut by expert"
        state = parametrization.quant_state
        values = math.prod(state.shape[1:])  # of an expert
        if state.shape[0] != module.num_experts or container.original.shape[0] % module.num_experts:
            return f"has packed weights {name} of shape {tuple(state.shape)} without a part for each expert"
        if values % state.blocksize:
            return (
                f"has {name} packed by bitsandbytes in blocks of {state.blocksize} values, but an expert has "
                f"{values:,}, so that a block has values of two experts"
            )
    return ""


def cut_constants(packed: PackedWeight, experts: Split, rank: int) -> None:
    """Keep the constants of this rank's experts; the packed values are cut as other parameters."""
    state = packed.parametrization.quant_state
    start, stop = experts.ranges[rank]
    blocks = math.prod(state.shape[1:]) // state.blocksize  # of an expert
    packed.parametrization.quant_state = type(state)(
        absmax=_constants_of(state)[start * blocks : stop * blocks].clone(),
        shape=torch.Size((stop - start, *state.shape[1:])),
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )


def _constants_of(state: Any) -> Tensor:
    """Return the constant of every block, as ``bitsandbytes.functional.dequantize_4bit`` computes it."""
    constants: Tensor = state.absmax
    if state.nested:
        from bitsandbytes.functional import dequantize_blockwise

        constants = dequantize_blockwise(state.absmax, state.state2) + state.offset
    return constants.float()
