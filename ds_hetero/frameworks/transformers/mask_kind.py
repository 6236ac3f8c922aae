"""Which tokens a layer's mask hides: read from the mask function that transformers composed for it."""

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
    """Tokens that a layer's mask hides beside padding and other documents."""

    causal: bool
    window: int | None  # keys further back than ``window - 1`` tokens; None if there is no limit


def mask_kind(mask_function: FunctionType) -> MaskKind:
    """Read a mask function of transformers' known parts. Raises `ModelError`: chunks, blocks, or the model's own."""
    parts = {_name(part): part for part in _parts(mask_function)}
    if unsupported := sorted(set(parts) - _SUPPORTED):
        raise ModelError(
            f"a mask made of {', '.join(unsupported)} cannot be split over the sequence; causal, bidirectional and "
            "causal sliding-window masks can, with padding or packed documents. Train this model with "
            '"sequence_parallel_size": 1.'
        )
    overlay: Any = parts.get("sliding_window_overlay")
    window = None if overlay is None else inspect.getclosurevars(overlay).nonlocals["sliding_window"]
    return MaskKind("causal_mask_function" in parts, window)


def _parts(mask_function: FunctionType) -> Iterator[FunctionType]:
    """The function and all functions in its closure, theirs included."""
    yield mask_function
    for cell in mask_function.__closure__ or ():
        contents = cell.cell_contents
        for inner in contents if isinstance(contents, tuple) else (contents,):
            if isinstance(inner, FunctionType):
                yield from _parts(inner)


def _name(part: FunctionType) -> str:
    """Of the function in `transformers.masking_utils` that made it; qualified with its module for any other."""
    if part.__module__ == masking_utils.__name__:
        return part.__qualname__.partition(".")[0]
    return f"{part.__module__}.{part.__qualname__}"
