"""Make hooks around an engine's methods, and wrap the methods with them.

A hook is a function ``hook(method, *args, **kwargs)`` that is called in place of an engine's method. It may call
``method``, which is the next hook or the engine's own method, and returns what the caller of the engine gets.

`before`, `after` and `within` make hooks from functions that act before or after a method, or from context managers
around it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Concatenate, NamedTuple, TypeVar

from ds_hetero.engine.patching import Function, around
from ds_hetero.frameworks.deepspeed.protocols import Engine
from ds_hetero.runtime.peers.calls import own_calls
from ds_hetero.runtime.peers.watch import waiting_for_peers

Part = TypeVar("Part")

Hook = Function
"""A function that is called in place of an engine's method, as ``hook(method, *args, **kwargs)``."""


class HookRow(NamedTuple):
    """An engine's method, and a hook around this method."""

    method: str  # name of the engine's method
    hook: Hook


class EngineHooks:
    """Wraps the methods of one engine with hooks.

    Args:
        rows: the hooks; those of the same method are listed outermost first.
    """

    def __init__(self, engine: Engine, rows: Sequence[HookRow]) -> None:
        self._engine, self._names = weakref.ref(engine), {row.method for row in rows}
        for row in reversed(rows):
            method = getattr(engine, row.method)
            setattr(engine, row.method, around(row.hook)(method))

    def remove(self) -> None:
        """Restore the engine's own methods, if the engine still exists."""
        if (engine := self._engine()) is not None:
            for name in self._names & vars(engine).keys():
                delattr(engine, name)


def before(act: Callable[[], object]) -> Hook:
    """Make a hook that calls ``act``, which may raise, and then the method."""

    @functools.wraps(act)
    def act_and_go_on(method: Function, *args: object, **kwargs: object) -> object:
        act()
        return method(*args, **kwargs)

    return act_and_go_on


def after(act: Callable[[], object]) -> Hook:
    """Make a hook that calls the method, and then ``act``."""

    @functools.wraps(act)
    def go_on_and_act(method: Function, *args: object, **kwargs: object) -> object:
        result = method(*args, **kwargs)
        act()
        return result

    return go_on_and_act


def after_optimizer_step(engine: Engine, act: Callable[[], object]) -> Hook:
    """Make a hook that calls the engine's step, and then ``act`` if this was an optimizer step, not an accumulation."""

    @functools.wraps(act)
    def step_and_act(step: Function, *args: object, **kwargs: object) -> object:
        steps_before = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > steps_before:
            act()
        return result

    return step_and_act


def within(make_context: Callable[[], AbstractContextManager[None]]) -> Hook:
    """Make a hook that runs the method inside the context that ``make_context`` returns."""

    @functools.wraps(make_context)
    def go_on_within(method: Function, *args: object, **kwargs: object) -> object:
        with make_context():
            return method(*args, **kwargs)

    return go_on_within


def of(part: Part, hook: Callable[Concatenate[Part, Any, ...], object]) -> Hook:
    """Make a hook from a function ``hook(part, method, *args, **kwargs)``, by giving it ``part``."""

    @functools.wraps(hook)
    def call_with_part(method: Function, *args: object, **kwargs: object) -> object:
        return hook(part, method, *args, **kwargs)

    return call_with_part


def waiting(phase: str) -> Hook:
    """Make a hook that raises `PeerError` when a collective inside the engine's method fails or times out.

    Args:
        phase: what the engine does in the method, for the message.
    """

    def name_lost_peers() -> AbstractContextManager[None]:
        return waiting_for_peers(phase)

    return within(name_lost_peers)


def recording(call: str) -> Hook:
    """Make a hook that records the call of a method, for the diagnosis of ranks that hang.

    Args:
        call: the kind of call, see `ds_hetero.runtime.peers.calls`.
    """

    def record_call() -> AbstractContextManager[None]:
        return recorded(call)

    return within(record_call)


@contextlib.contextmanager
def recorded(call: str) -> Iterator[None]:
    """Inside the context, record that this rank makes ``call``, and the error if the call fails."""
    own_calls.record(call)
    try:
        yield
    except Exception as error:
        own_calls.fail(error)
        raise
