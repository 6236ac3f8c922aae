"""Describe values that differ between ranks, as lines of a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_hetero.common.text import ranks_by_value

_MAX_LINES = 5  # differing keys in one message
_MAX_CHARACTERS = 60  # of a value in a message


def differing_lines(views: Sequence[Mapping[str, str]], labels: Mapping[str, str], *, absent: str) -> list[str]:
    """Return a line for each key whose values differ between ranks, with the ranks of every value; at most six lines.

    Args:
        views: for every rank, values by key, as texts.
        labels: the text for each key; only these keys are compared.
        absent: the text for a key that a rank does not have.
    """
    lines = []
    for key, label in labels.items():
        values = [view.get(key, absent) for view in views]
        if len(set(values)) > 1:
            lines.append(f"  {label}: {_by_rank(values)}")
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  and {len(lines) - _MAX_LINES} more"]
    return lines


def _by_rank(values: Sequence[str]) -> str:
    """Return every value with its ranks: ``1.0 on rank 0, 2; missing on rank 1``."""
    parts = []
    for value, ranks in ranks_by_value(enumerate(values)).items():
        parts.append(f"{_shorten(value)} on rank {', '.join(map(str, ranks))}")
    return "; ".join(parts)


def _shorten(value: str) -> str:
    """Return a value, cut off after `_MAX_CHARACTERS`."""
    return value if len(value) <= _MAX_CHARACTERS else value[: _MAX_CHARACTERS - 3] + "..."
