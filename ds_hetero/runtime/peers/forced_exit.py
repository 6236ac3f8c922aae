"""Calls before a process that waits in vain is ended, where no exception can reach its main thread."""

from __future__ import annotations

from collections.abc import Callable

_calls: list[Callable[[str], object]] = []


def before_forced_exit(call: Callable[[str], object]) -> Callable[[], None]:
    """Register ``call``, which gets the reason before a process that waits in vain is ended, in the watch's thread.

    Returns:
        What takes this back.
    """
    _calls.append(call)
    return lambda: _calls.remove(call) if call in _calls else None


def run_before_forced_exit(reason: str) -> None:
    """Call what was given to `before_forced_exit`."""
    for call in _calls:
        call(reason)
