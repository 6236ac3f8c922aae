"""Find the buffers of a module whose values have changed since the last look.

A tensor counts its in-place changes (``_version``), so an unchanged one costs nothing. If a buffer was written to or
replaced, the sum of its elements (its total) is compared, since a module may write the same values again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn


class ChangedBuffers:
    """Remembers version and total (sum of the elements) of every buffer, and compares them at every `look`.

    Args:
        read: returns the present buffers with their names.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._read = read
        self._seen: dict[str, tuple[object, float]] = {}  # (version, total) of each buffer at the last look

    @property
    def is_watching(self) -> bool:
        """Whether the last look found buffers."""
        return bool(self._seen)

    def look(self) -> dict[str, float]:
        """Return the new totals of the buffers whose total has changed since the last look, by name.

        A new buffer does not count as changed. Waits for the device if a buffer was written to.
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
    """Yield names and buffers that are part of a module's state; others are caches that a forward computes again."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
