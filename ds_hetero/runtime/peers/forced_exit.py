"""Functions to call before the watch ends this process because it waits in vain."""

from __future__ import annotations

from collections.abc import Callable

_calls: list[Callable[[str], object]] = []


def before_forced_exit(call: Callable[[str], object]) -> Callable[[], None]:
    """Register ``call``: the watch calls it with the reason, in the watch's thread, before it ends this process.

    Returns:
        A function that removes ``call`` again.
    """
    _calls.append(call)
    return lambda: _calls.remove(call) if call in _calls else None


def run_before_forced_exit(reason: str) -> None:
    """Call the functions that were registered by `before_forced_exit` with ``reason``, in their order."""
    for call in _calls:
        call(reason)
