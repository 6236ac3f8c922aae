"""How commands write: one JSON object for machines, shares of a block for people, and files that can be written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_hetero.common.reading import shortened
from ds_hetero.cost.prediction import Prediction
from ds_hetero.errors import PlanError

__all__ = ["check_out", "print_json", "terms_text", "write_out"]


def check_out(out: Path, option: str = "--out") -> None:
    """Refuse a file that cannot be written, before anything is computed for it.

    Args:
        out: the file.
        option: that names it.

    Raises:
        PlanError: its folder does not exist or may not be written to, or it is a folder itself.
    """
    try:
        folder, is_folder = out.resolve().parent, out.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a name that no file can have
        raise PlanError(f"{option} {shortened(str(out))} cannot be written: {_reason(error)}.") from None
    if is_folder or not os.access(folder, os.W_OK):
        where = shortened(str(folder))
        reason = "it is a folder" if is_folder else f"{where} is no folder that may be written to"
        raise PlanError(f"{option} {shortened(str(out))} cannot be written: {reason}.")


def write_out(out: Path, text: str) -> None:
    """Write the file that ``--out`` names.

    Raises:
        PlanError: it cannot be written, for a reason that `check_out` does not see, such as a full disk.
    """
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--out {shortened(str(out))} cannot be written: {_reason(error)}.") from None


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else shortened(str(error))


def print_json(data: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(data, allow_nan=False))


def terms_text(prediction: Prediction) -> str:
    """The terms of a block as shares of it."""
    terms = prediction.terms
    parts = (("non-attention", terms.non_attention_s), ("all-to-all", terms.all_to_all_s), ("ring", terms.ring_steps_s))
    return ", ".join(f"{name} {100 * seconds / prediction.block_s:.0f} %" for name, seconds in parts)
