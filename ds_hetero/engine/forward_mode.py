"""Mode of the forwards of models: whole or on shards, a sharded call, compared; one variable, which is set here alone.

The scripts' contexts say it of forwards to come, whatever ``model.training`` says; the hooks around a forward say it of
the one that runs. Each of them changes fields of the mode and puts back these alone: a generator or a hook may end in
another order than it began.
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


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Results of sharded calls."""

    own_outputs: bool  # the model's own outputs, put together; else `ds_hetero.engine.adapters.ResultsOfTokens`
    logits: bool  # with ``logits`` [B, L, V]
    hidden_state: bool = False  # with ``hidden_state``, which is no output of the model's
    shorter_outputs: tuple[str, ...] = ()  # classes of outputs of next tokens: a column less than the batch
    on_request: bool = False  # a forward of an evaluation: without ``logits``, results are put together when read
    of_sequence: Callable[[Tensor, int], Any] | None = None  # made of the logits [1, L, V] of a row, by its number
    num_replicas: int = 1  # whose labels ``num_items_in_batch`` counts, and by which the caller multiplies the loss


@dataclass(frozen=True, eq=False)
class ShardedForward:
    """One sharded forward of one model."""

    batch: BatchLayout  # the layout that all ranks agreed on
    replica: Replica  # this rank's replica, with the schedule for which the batch was cut
    kernel: str | None  # the name of the kernel in the configuration, or None
    is_placeholder: bool  # this rank holds no token of the batch; its one column stands for none
    clock: Clock
    doors_used: set[str] = field(default_factory=set)  # by its recurrent layers, see `recurrent_layers`


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ForwardMode:
    """Mode of the forwards to come, and of the one that runs."""

    takes_shards: bool | None = None  # whether forwards take shards, or whole batches; None where no context says it
    wanted: Wanted | None = None  # results of sharded calls; None where calls are none
    forward: ShardedForward | None = None  # the sharded forward that runs; masks that are made are its own
    is_whole: bool = False  # a forward on whole sequences runs, so that attention is theirs
    given_shard: str | None = None  # class of the model given a shard; attention outside of its forward is refused
    is_compared: bool = False  # such attention may pass: its result is compared with that of a whole forward


_USUAL = ForwardMode()
_mode: ContextVar[ForwardMode] = ContextVar("_mode", default=_USUAL)


def forward_mode() -> ForwardMode:
    """Return the mode of the moment."""
    return _mode.get()


def change_mode(**fields: Any) -> Callable[[], None]:
    """Change fields of `ForwardMode`; return what puts these fields back, whatever has become of the others."""
    mode = _mode.get()
    before = {name: getattr(mode, name) for name in fields}
    _mode.set(replace(mode, **fields))

    def undo() -> None:
        _mode.set(replace(_mode.get(), **before))

    return undo


@contextlib.contextmanager
def _in_mode(**fields: object) -> Iterator[None]:
    undo = change_mode(**fields)
    try:
        yield
    finally:
        undo()


def sharding(on: bool) -> contextlib.AbstractContextManager[None]:
    """Let forwards inside take shards, or whole batches, and none be a sharded call."""
    return _in_mode(takes_shards=on)


def sharded_calls(wanted: Wanted | None) -> contextlib.AbstractContextManager[None]:
    """Let calls of sharded models inside be sharded calls, with these results; None for none."""
    return _in_mode(wanted=wanted)


ON_REQUEST = Wanted(own_outputs=True, logits=False, on_request=True)
"""Results of the forwards of an evaluation over shards, in a loop of one's own."""


def evaluating(wanted: Wanted) -> contextlib.AbstractContextManager[None]:
    """Let calls of sharded models inside be sharded calls with these results, whatever `sharding` says outside."""
    return _in_mode(takes_shards=None, wanted=wanted)


def expecting_sharded_forward(model: str) -> contextlib.AbstractContextManager[None]:
    """Refuse attention inside that is not part of a sharded forward: ``model``, by its class, was given a shard."""
    return _in_mode(given_shard=model)


def comparing_forwards() -> contextlib.AbstractContextManager[None]:
    """Let such attention pass inside, see `ForwardMode.is_compared`."""
    return _in_mode(is_compared=True)


def sharding_is_set() -> bool | None:
    """Value that `sharding` has set; None outside of it."""
    return _mode.get().takes_shards


def wanted_results() -> Wanted | None:
    """Return results that calls return, if they are sharded calls."""
    mode = _mode.get()
    return mode.wanted if mode.takes_shards is None else None
