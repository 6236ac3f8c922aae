"""Numbers of groups, or of nodes, that are tried: all small ones, then ever fewer."""

from __future__ import annotations

# All small counts, then about three per octave. Chosen, never measured.
_LADDER = (
    *range(1, 9),
    *range(10, 17, 2),
    *range(20, 33, 4),
    *range(40, 65, 8),
    *range(80, 129, 16),
    *(160, 192, 256, 384, 512),
)


def ladder(limit: int) -> list[int]:
    """Return the numbers to try up to ``limit``: 1, 2, ... 8, 10, 12, ... 16, 20, 24, ..., and at most 512."""
    return [number for number in _LADDER if number <= limit]
