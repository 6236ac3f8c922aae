"""Model outputs with lazy entries, which are computed when they are first read by name.

    outputs.logits, outputs["logits"], outputs.get("logits"), outputs.to_tuple()      compute the entry
    for name in outputs, outputs.keys(), outputs.items(), outputs.values()            leave it out

Iteration leaves lazy entries out, because ZeRO-3 and others iterate over all outputs of a module and would compute
every entry. Computing an entry is collective over the ranks that share the sequences: if one rank reads it, all have
to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

Makers = Mapping[str, Callable[[], Any]]


class _OnRequest:
    """Base class that `results_on_request` adds to a class of outputs."""

    _waiting: dict[str, Callable[[], Any]]

    def __getattribute__(self, name: str) -> Any:
        waiting = object.__getattribute__(self, "__dict__").get("_waiting")
        if waiting and name in waiting:
            self._make(name)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and key in self._waiting:
            self._make(key)
        return super().__getitem__(key)  # type: ignore[misc]

    def __contains__(self, key: object) -> bool:
        return key in self._waiting or super().__contains__(key)  # type: ignore[misc]

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry, as a dictionary does."""
        return self[key] if key in self else default  # noqa: SIM401  (it is this method)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return all entries, lazy ones too, in the order in which the class declares them."""
        for name in list(self._waiting):
            self._make(name)
        return super().to_tuple()  # type: ignore[misc,no-any-return]

    def _make(self: Any, name: str) -> None:
        """Compute a lazy entry, and move all entries to the order of the class."""
        entry = self._waiting.pop(name)()
        if entry is None:
            return
        self[name] = entry
        present = list(self)
        for field in type(self).__dataclass_fields__:
            if field in present:
                self.move_to_end(field)


@functools.cache
def _kind_of(kind: Any) -> Any:
    return type(kind.__name__, (_OnRequest, kind), {"__module__": kind.__module__})


def results_on_request(kind: type, present: Mapping[str, Any], waiting: Makers) -> Any:
    """Return outputs of class ``kind`` with the ``present`` entries, and lazy ones that ``waiting`` computes."""
    outputs = _kind_of(kind)(**present)
    vars(outputs)["_waiting"] = dict(waiting)
    return outputs
