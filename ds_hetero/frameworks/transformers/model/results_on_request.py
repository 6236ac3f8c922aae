"""Outputs of a model some of whose entries are made when they are read by name, and not before.

    outputs.logits, outputs["logits"], outputs.get("logits"), outputs.to_tuple()      make them
    for name in outputs, outputs.keys(), outputs.items(), outputs.values()            leave them out

ZeRO-3 and others go over all that a module returns; they would make every entry. To make one is a collective call of
the ranks that share the sequences: whoever reads it on one rank has to read it on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

Makers = Mapping[str, Callable[[], Any]]


class _OnRequest:
    """What `results_on_request` puts before a class of outputs."""

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
        """As of a dictionary."""
        return self[key] if key in self else default  # noqa: SIM401  (it is this method)

    def to_tuple(self) -> tuple[Any, ...]:
        """All entries, in the order in which the model declares them."""
        for name in list(self._waiting):
            self._make(name)
        return super().to_tuple()  # type: ignore[misc,no-any-return]

    def _make(self: Any, name: str) -> None:
        made = self._waiting.pop(name)()
        if made is None:
            return
        self[name] = made
        present = list(self)
        for known in type(self).__dataclass_fields__:  # in this order, whenever an entry was made
            if known in present:
                self.move_to_end(known)


@functools.cache
def _kind_of(kind: Any) -> Any:
    return type(kind.__name__, (_OnRequest, kind), {"__module__": kind.__module__})


def results_on_request(kind: type, present: Mapping[str, Any], waiting: Makers) -> Any:
    """Outputs of class ``kind`` with entries that are ``present``, and others that are made when they are read."""
    made = _kind_of(kind)(**present)
    vars(made)["_waiting"] = dict(waiting)
    return made
