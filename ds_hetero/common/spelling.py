"""Guesses of the word that a misspelled one stands for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is most similar to ``word``, upper or lower case; None if none is similar enough.

    Args:
        cutoff: least similarity, from 0 (anything) to 1 (equal).
    """
    if len(word) > 100:  # too long for a misspelling, and the comparison takes quadratic time
        return None
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in islice(known, 1000) if len(name) <= 100}
    close = get_close_matches(word.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `` (did you mean "x"?)`` with the word from `nearest`; empty without one."""
    near = nearest(word, known, cutoff)
    return f' (did you mean "{near}"?)' if near else ""
