"""How much a call computes, in a measure that no machine and no neighbour changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs in this thread; a loop counts its lines as often as it passes them."""
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    tracer = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(tracer)
    return lines
