"""Ask an optimizer of DeepSpeed, of any admitted release, whether the last micro-batch of a step runs."""

from __future__ import annotations

from typing import Any


def is_at_boundary(optimizer: Any) -> bool:
    """Return whether the running backward is that of a step's last micro-batch.

    ``is_gradient_accumulation_boundary`` is an attribute in DeepSpeed 0.18, and a method from 0.19 on.
    """
    is_boundary: Any = optimizer.is_gradient_accumulation_boundary
    return bool(is_boundary() if callable(is_boundary) else is_boundary)
