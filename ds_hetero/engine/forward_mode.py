"""Mode in which models run: on whole batches or shards, as a sharded call, or as part of a comparison.

The mode is one context variable, which only this module sets. Context managers such as `sharding` set it for later
forwards, and take precedence over ``model.training``. Hooks around a forward set it for the running one. Each of them
changes some fields and restores only these, since generators and hooks may end in another order than they began.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import Clock
from ds_hetero.values.section import RingGradients


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which results sharded calls return, and in which form."""

    own_outputs: bool  # the model's outputs for all tokens; otherwise `ds_hetero.engine.adapters.ResultsOfTokens`
    logits: bool  # whether to include ``logits`` [B, L, V]
    hidden_state: bool = False  # whether to include ``hidden_state`` of the last layer
    shorter_outputs: tuple[str, ...] = ()  # classes of outputs that have one column less than the batch: next tokens
    on_request: bool = False  # whether outputs of ranks are gathered only when they are read, as in an evaluation
    of_sequence: Callable[[Tensor, int], Any] | None = None  # takes logits [1, L, V] of a row, and its number
    num_replicas: int = 1  # replicas whose labels ``num_items_in_batch`` counts; the caller multiplies the loss by it


@dataclass(frozen=True, eq=False)
class ShardedForward:
    """A forward of a model on a shard: what its attention and recurrent layers have to know about the batch."""

    batch: BatchLayout  # the layout that all ranks agreed on
    replica: Replica  # this rank's replica, with the schedule for which the batch was cut
    kernel: str | None  # name of the attention kernel in the configuration, if any
    is_placeholder: bool  # whether this rank holds no token of the batch, but one column of placeholders
    clock: Clock
    ring_gradients: RingGradients = "fp32"  # type in which partial dK/dV travel between the groups of a ring
    wrapped_calls: set[str] = field(default_factory=set)  # wrapped functions that recurrent layers have called


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ForwardMode:
    """How forwards run: what contexts around them have set, and the sharded forward that is running now."""

    takes_shards: bool | None = None  # whether forwards take shards or whole batches; None if no context sets it
    wanted: Wanted | None = None  # what sharded calls return; None if calls are not sharded
    forward: ShardedForward | None = None  # the running sharded forward; attention masks are made for it
    is_whole: bool = False  # whether a forward on whole sequences runs, to which attention belongs
    given_shard: str | None = None  # class of a model that was given a shard: other attention than its is refused
    is_compared: bool = False  # whether such attention is allowed, since its result is compared with a whole forward


_DEFAULT_MODE = ForwardMode()
_mode: ContextVar[ForwardMode] = ContextVar("_mode", default=_DEFAULT_MODE)


def forward_mode() -> ForwardMode:
    """Return the `ForwardMode` that holds now."""
    return _mode.get()


def change_mode(**fields: Any) -> Callable[[], None]:
    """Change fields of `ForwardMode`; return a function that restores these fields and leaves others alone."""
    mode = _mode.get()
    before = {name: getattr(mode, name) for name in fields}
    _mode.set(replace(mode, **fields))

    def undo() -> None:
        _mode.set(replace(_mode.get(), **before))

    return undo


@contextlib.contextmanager
def _in_mode(**fields: object) -> Iterator[None]:
    """Change fields of `ForwardMode` inside the context, and restore these fields at its end."""
    undo = change_mode(**fields)
    try:
        yield
    finally:
        undo()


def sharding(on: bool) -> contextlib.AbstractContextManager[None]:
    """Inside the context, let forwards take shards if ``on``, else whole batches; none of them is a sharded call."""
    return _in_mode(takes_shards=on)


def sharded_calls(wanted: Wanted | None) -> contextlib.AbstractContextManager[None]:
    """Inside the context, let calls of sharded models be sharded calls that return ``wanted``; None: plain calls."""
    return _in_mode(wanted=wanted)


ON_REQUEST = Wanted(own_outputs=True, logits=False, on_request=True)
"""What forwards return in an evaluation over shards in a custom loop."""


def evaluating(wanted: Wanted) -> contextlib.AbstractContextManager[None]:
    """Inside the context, let calls of sharded models be sharded calls that return ``wanted``, also in `sharding`."""
    return _in_mode(takes_shards=None, wanted=wanted)


def expecting_sharded_forward(model: str) -> contextlib.AbstractContextManager[None]:
    """Refuse attention inside that is not part of a sharded forward.

    Args:
        model: class of the model that was given a shard, for the error.
    """
    return _in_mode(given_shard=model)


def comparing_forwards() -> contextlib.AbstractContextManager[None]:
    """Allow, inside, attention that `expecting_sharded_forward` refuses: a wrong result would show in a comparison."""
    return _in_mode(is_compared=True)


def sharding_is_set() -> bool | None:
    """Return the value that `sharding` has set; None outside of it."""
    return _mode.get().takes_shards


def wanted_results() -> Wanted | None:
    """Return the results that sharded calls have to return; None if calls are not sharded now."""
    mode = _mode.get()
    return mode.wanted if mode.takes_shards is None else None
