"""Determine which tokens a mask hides, from transformers' composed mask function.

transformers composes a mask of functions. For example, a causal mask with a window of 4096 is
``and_masks(causal_mask_function, sliding_window_overlay(4096))``. The parts are found in the closure of the composed
function; a mask with an unknown part is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

from transformers import masking_utils

from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.names import MASK_PARTS

_SUPPORTED = {*MASK_PARTS, "remap_positions_for_packed_sequence"}  # the last since transformers 5.21


class MaskKind(NamedTuple):
    """Kind of a layer's mask, apart from padding and documents."""

    causal: bool  # hides keys after the query
    window: int | None  # hides keys more than ``window - 1`` tokens before the query; None if it hides none of these


def mask_kind(mask_function: FunctionType) -> MaskKind:
    """Return the kind of a mask function. Raises `ModelError`: it has other parts, such as chunks or a custom mask."""
    parts = {_name_of_part(part): part for part in _functions_in(mask_function)}
    unsupported = sorted(set(parts) - _SUPPORTED)
    if unsupported:
        raise ModelError(
            f"a mask made of {', '.join(unsupported)} cannot be split over the sequence; causal, bidirectional and "
            "causal sliding-window masks can, with padding or packed documents. Train this model with "
            '"sequence_parallel_size": 1.'
        )
    overlay: Any = parts.get("sliding_window_overlay")
    window = None if overlay is None else inspect.getclosurevars(overlay).nonlocals["sliding_window"]
    return MaskKind("causal_mask_function" in parts, window)


def _functions_in(mask_function: FunctionType) -> Iterator[FunctionType]:
    """Yield the function and, recursively, all functions in its closure."""
    yield mask_function
    for cell in mask_function.__closure__ or ():
        contents = cell.cell_contents
        for inner in contents if isinstance(contents, tuple) else (contents,):
            if isinstance(inner, FunctionType):
                yield from _functions_in(inner)


def _name_of_part(part: FunctionType) -> str:
    """Return the name of the function of `transformers.masking_utils` that a part is or comes from.

    For a part from elsewhere it is MODULE.NAME.
    """
    if part.__module__ == masking_utils.__name__:
        return part.__qualname__.partition(".")[0]
    return f"{part.__module__}.{part.__qualname__}"
