"""Read from a composed mask function of transformers which tokens the mask hides.

transformers composes masks from functions, which are in closures. For example, a causal mask with a window of 4096 is
``and_masks(causal_mask_function, sliding_window_overlay(4096))``. Other parts than the known ones are refused.
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
    """Tokens that a layer's mask hides, apart from padding and other documents."""

    causal: bool
    window: int | None  # keys further back than ``window - 1`` tokens; None if there is no limit


def mask_kind(mask_function: FunctionType) -> MaskKind:
    """Return the kind of a mask function. Raises `ModelError`: it has other parts, such as chunks or a custom mask."""
    parts = {_name(part): part for part in _parts(mask_function)}
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


def _parts(mask_function: FunctionType) -> Iterator[FunctionType]:
    """Yield the function and, recursively, all functions in its closure."""
    yield mask_function
    for cell in mask_function.__closure__ or ():
        contents = cell.cell_contents
        for inner in contents if isinstance(contents, tuple) else (contents,):
            if isinstance(inner, FunctionType):
                yield from _parts(inner)


def _name(part: FunctionType) -> str:
    """Return the name of the `transformers.masking_utils` function that made a part; MODULE.NAME for other parts."""
    if part.__module__ == masking_utils.__name__:
        return part.__qualname__.partition(".")[0]
    return f"{part.__module__}.{part.__qualname__}"
