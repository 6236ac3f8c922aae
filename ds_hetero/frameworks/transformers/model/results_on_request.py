"""Model outputs with lazy entries: each is computed when it is first read by name.

    outputs.logits, outputs["logits"], outputs.get("logits"), outputs.to_tuple()      compute the entry
    for name in outputs, outputs.keys(), outputs.items(), outputs.values()            leave it out

Iteration leaves lazy entries out: ZeRO-3 and others iterate over all outputs of a module, and would compute every
entry. Computing an entry is collective over the ranks that share the sequences: if one rank reads it, all have
to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

LazyEntries = Mapping[str, Callable[[], Any]]
"""Functions that compute entries, by the name of the entry."""


class _LazyOutputs:
    """Base class that `results_on_request` adds to a class of outputs."""

    _lazy: dict[str, Callable[[], Any]]

    def __getattribute__(self, name: str) -> Any:
        lazy = object.__getattribute__(self, "__dict__").get("_lazy")
        if lazy and name in lazy:
            self._compute(name)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and key in self._lazy:
            self._compute(key)
        return super().__getitem__(key)  # type: ignore[misc]

    def __contains__(self, key: object) -> bool:
        return key in self._lazy or super().__contains__(key)  # type: ignore[misc]

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry, as a dictionary does."""
        return self[key] if key in self else default  # noqa: SIM401  (it is this method)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return all entries, lazy ones too, in the order in which the class declares them."""
        for name in list(self._lazy):
            self._compute(name)
        return super().to_tuple()  # type: ignore[misc,no-any-return]

    def _compute(self: Any, name: str) -> None:
        """Compute a lazy entry, and move all entries to the order of the class."""
        entry = self._lazy.pop(name)()
        if entry is None:
            return
        self[name] = entry
        present = list(self)
        for field in type(self).__dataclass_fields__:
            if field in present:
                self.move_to_end(field)


@functools.cache
def _lazy_class_of(output_class: Any) -> Any:
    """Return a subclass of a class of outputs, with the same name, that has lazy entries."""
    return type(output_class.__name__, (_LazyOutputs, output_class), {"__module__": output_class.__module__})


def results_on_request(output_class: type, entries: Mapping[str, Any], lazy: LazyEntries) -> Any:
    """Return outputs of class ``output_class``, with ``entries`` and with lazy entries."""
    outputs = _lazy_class_of(output_class)(**entries)
    vars(outputs)["_lazy"] = dict(lazy)
    return outputs
