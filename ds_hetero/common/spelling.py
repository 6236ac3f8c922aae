"""The known word that a misspelled one probably stands for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that ``word`` is probably a misspelling of, upper and lower case aside; None if none is close.

    Args:
        cutoff: least similarity, from 0 (anything) to 1 (equal).
    """
    if len(word) > 100:  # no misspelling, and the comparison takes quadratic time
        return None
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in islice(known, 1000) if len(name) <= 100}
    close = get_close_matches(word.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`` (did you mean "x"?)`` with the known word nearest to ``word``; empty if none is near. See `nearest`."""
    near = nearest(word, known, cutoff)
    return f' (did you mean "{near}"?)' if near else ""
