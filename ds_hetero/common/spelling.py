"""Suggest known words for misspelled ones."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

MAX_LETTERS = 100  # longer words are no misspellings, and a comparison takes quadratic time; chosen, never measured
MAX_WORDS = 1000  # known words that are compared; chosen, never measured


def nearest(word: str, known_words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word most similar to ``word``, upper and lower case being equal; None if none is similar.

    Args:
        cutoff: smallest similarity that counts, from 0 (anything) to 1 (equal).
    """
    if len(word) > MAX_LETTERS:
        return None
    from difflib import get_close_matches

    names = islice(known_words, MAX_WORDS)
    name_of_lower = {name.lower(): name for name in names if len(name) <= MAX_LETTERS}
    closest = get_close_matches(word.lower(), list(name_of_lower), n=1, cutoff=cutoff)
    return name_of_lower[closest[0]] if closest else None


def did_you_mean(word: str, known_words: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `` (did you mean "x"?)`` for a message, with the word from `nearest`; empty if there is none."""
    suggestion = nearest(word, known_words, cutoff)
    return f' (did you mean "{suggestion}"?)' if suggestion else ""
