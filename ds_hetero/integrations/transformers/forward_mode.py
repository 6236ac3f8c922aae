"""What forwards of sharded models take and return, whatever ``model.training`` says: set by the scripts' contexts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["Wanted", "sharded_calls", "sharding", "sharding_is_set", "wanted_results"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What sharded calls return, see `ds_hetero.integrations.transformers.sharded_call`.

    Args:
        own_outputs: the model's own outputs, put together; else `TokenResults`.
        logits: with ``logits`` [B, L, V].
        hidden_state: `TokenResults` with ``hidden_state``.
    """

    own_outputs: bool
    logits: bool
    hidden_state: bool = False


_sharding: ContextVar[bool | None] = ContextVar("_sharding", default=None)
_wanted: ContextVar[Wanted | None] = ContextVar("_wanted", default=None)


@contextlib.contextmanager
def sharding(on: bool) -> Iterator[None]:
    """Have forwards inside take shards, or whole batches, and none be a sharded call."""
    token = _sharding.set(on)
    try:
        yield
    finally:
        _sharding.reset(token)


def sharding_is_set() -> bool | None:
    """What `sharding` has set; None outside of it."""
    return _sharding.get()


@contextlib.contextmanager
def sharded_calls(wanted: Wanted | None) -> Iterator[None]:
    """Have calls of sharded models inside be sharded calls, with these results; None for none."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def wanted_results() -> Wanted | None:
    """What calls are to return, if they are sharded calls."""
    return _wanted.get() if _sharding.get() is None else None
