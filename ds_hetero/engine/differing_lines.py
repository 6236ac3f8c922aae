"""Lines of a message for values that differ between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_hetero.common.text import ranks_by_value

_MOST_SHOWN = 5  # differing keys in one message
_LONGEST_SHOWN = 60  # characters of a value in a message


def differing_lines(views: Sequence[Mapping[str, str]], labels: Mapping[str, str], *, absent: str) -> list[str]:
    """Return one line for each key whose values differ between ranks, with the ranks of every value; at most six.

    Args:
        views: of every rank, texts by key.
        labels: how each key that is compared is written.
        absent: stands for a key that a rank does not have.
    """
    lines = []
    for key, label in labels.items():
        values = [view.get(key, absent) for view in views]
        if len(set(values)) > 1:
            lines.append(f"  {label}: {_by_rank(values)}")
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"  and {len(lines) - _MOST_SHOWN} more"]
    return lines


def _by_rank(values: Sequence[str]) -> str:
    """Return every value with its ranks: ``1.0 on rank 0, 2; missing on rank 1``."""
    parts = []
    for value, ranks in ranks_by_value(enumerate(values)).items():
        parts.append(f"{_short(value)} on rank {', '.join(map(str, ranks))}")
    return "; ".join(parts)


def _short(value: str) -> str:
    """Return a value, cut where it is long."""
    return value if len(value) <= _LONGEST_SHOWN else value[: _LONGEST_SHOWN - 3] + "..."
