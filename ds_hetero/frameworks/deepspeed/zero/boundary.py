"""The last micro-batch of an optimizer step, in any release of DeepSpeed."""

from __future__ import annotations

from typing import Any


def is_at_boundary(optimizer: Any) -> bool:
    """Whether the step is to use the gradients of the backward that runs.

    DeepSpeed's optimizers say it by an attribute before 0.19, by a method from 0.19 on.
    """
    at_boundary: Any = optimizer.is_gradient_accumulation_boundary
    return bool(at_boundary() if callable(at_boundary) else at_boundary)
