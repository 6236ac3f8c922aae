"""A row of a table that decides what becomes of a name that a user gives: of a key of DeepSpeed's, of an argument.

What changes what is computed and that nobody has tried must not pass. So each such table has a row for every name, and
its refusals and its page in docs/ are made of the rows. Imports no framework.
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
    """Effect of one name, or of all names of a pattern.

    Args:
        kind: ``"exact"``: training equals one process with the same value, which a test shows; ``"untried"``: it
            should, and no machine without a GPU can show it; ``"harmless"``: it changes nothing of what is computed;
            ``"refused"``: any value that is not in ``off`` ends the job; ``"ignored"``: it is not read in such a job.
        why: the reason, for people.
        off: values with which a refused name does nothing. Texts are compared without regard to case.
    """

    kind: Kind
    why: str = ""
    off: tuple[object, ...] = (None, False)


def row_of(table: Mapping[str, RowT], name: str) -> RowT | None:
    """The row of a name, its own or that of the longest pattern with a ``*`` that it fits; None where there is none."""
    if name in table:
        return table[name]
    patterns = [pattern for pattern in table if "*" in pattern and fnmatch.fnmatchcase(name, pattern)]
    return table[max(patterns, key=len)] if patterns else None


def is_in(value: object, values: tuple[object, ...]) -> bool:
    """Whether ``values`` hold a value of the same type and content."""
    normal = value.lower() if isinstance(value, str) else value
    return any(type(normal) is type(other) and normal == other for other in values)
