"""Rows of tables of the names that a user may write: keys of DeepSpeed, arguments of a forward, types of adapters.

Every row says whether training with the name equals one process. A table has a row for every name, since a name that
changes the training and was never tried must be refused. Messages of refusals and pages of docs/ are made from the
rows.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Kind = Literal["exact", "untried", "harmless", "refused", "ignored"]

RowT = TypeVar("RowT", bound="NameRow")


@dataclass(frozen=True, kw_only=True, slots=True)
class NameRow:
    """Decision on one name, or on all names of a pattern.

    Args:
        kind: ``"exact"``: training equals that of one process with the same value, as a test shows; ``"untried"``: it
            should, but only a GPU could show it; ``"harmless"``: it does not change the results of training;
            ``"refused"``: any value that is not in ``off`` ends the job; ``"ignored"``: such a job does not read it.
    """

    kind: Kind
    why: str = ""  # reason of the decision, for messages and docs
    off: tuple[object, ...] = (None, False)  # values with which a refused name has no effect; text in any case


def row_of(table: Mapping[str, RowT], name: str) -> RowT | None:
    """Return the row of a name, or of the longest pattern with a ``*`` that matches it; None if there is neither."""
    if name in table:
        return table[name]
    patterns = [pattern for pattern in table if "*" in pattern and fnmatch.fnmatchcase(name, pattern)]
    return table[max(patterns, key=len)] if patterns else None


def is_in(value: object, values: tuple[object, ...]) -> bool:
    """Return True if ``values`` has an equal value of the same type: "AUTO" equals "auto", 1 does not equal True.

    Texts in ``values`` are in lower case.
    """
    lowered = value.lower() if isinstance(value, str) else value
    return any(type(lowered) is type(candidate) and lowered == candidate for candidate in values)
