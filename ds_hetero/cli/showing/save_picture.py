"""Write a picture so that its file changes only where the picture does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120  # of pictures of points


def save_picture(figure: Figure, out: Path) -> None:
    """Write a figure as .svg or .png, by the ending of ``out``; an SVG has no date, and the same ids each time."""
    from matplotlib import rc_context

    metadata = {"Date": None} if out.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": "ds_hetero"}):
        figure.savefig(out, dpi=DPI, metadata=metadata)
