"""Colours that tell groups of ranks and kinds of devices apart in pictures."""

from __future__ import annotations

COLOURS = ("#4c78a8", "#f2a33a", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")
