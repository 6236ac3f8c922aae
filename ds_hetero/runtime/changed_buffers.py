"""Buffers of a module that have changed since they were looked at last.

A tensor counts its changes in place (``_version``), so that an unchanged one costs nothing. Of one that
was written to, or replaced, the total is compared: a module may write the values that were there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn


class ChangedBuffers:
    """Watches buffers by their totals.

    Args:
        read: names and buffers of the moment.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._read = read
        self._seen: dict[str, tuple[object, float]] = {}  # version, total

    @property
    def is_watching(self) -> bool:
        """Whether there are buffers that were looked at."""
        return bool(self._seen)

    def look(self) -> dict[str, float]:
        """Return totals of the buffers that have changed since the last look, by name; one that is new has not changed.

        Waits for the device where a buffer was written to.
        """
        changed = {}
        for name, buffer in self._read():
            version = id(buffer), buffer._version
            if self._seen.get(name, (None, 0.0))[0] == version or buffer.is_complex() or buffer.is_meta:
                continue
            total = float(buffer.detach().double().sum())
            before = self._seen[name][1] if name in self._seen else None
            self._seen[name] = version, total
            if before is not None and not (total == before or (total != total and before != before)):
                changed[name] = total
        return changed


def persistent_buffers(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Names and buffers that are part of a module's state; others are caches, made of what a forward is given."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
