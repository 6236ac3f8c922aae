"""Which attention a model had before it was switched to ours, kept by its configs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Protocol

from ds_hetero.frameworks.transformers.protocols import ModelConfig


class Owner(Protocol):
    """The model that a config belongs to, as far as attention has to know it."""

    @property
    def takes_shards(self) -> bool:
        """Whether a forward without a cache would now take a shard."""


_former: dict[int, str | None] = {}  # by id of a switched config that exists: its implementation before
_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()  # likewise: whose config it is


def remember_implementation(config: ModelConfig, owner: Owner) -> None:
    """Remember which attention a config names, before its model is switched to ours.

    Args:
        config: of the model or of a part of it.
        owner: the model; not kept alive.
    """
    _former[id(config)] = config._attn_implementation
    _owners[id(config)] = owner
    weakref.finalize(config, _former.pop, id(config), None).atexit = False


def restore_implementation(config: ModelConfig) -> None:
    """Give a switched config the attention that it named before."""
    config._attn_implementation_internal = _former.pop(id(config))
    _owners.pop(id(config), None)


def former_implementation(config: ModelConfig) -> str:
    """Name in ``config`` before the switch; eager, which is always exact, for a copy of a switched config."""
    return _former.get(id(config), "eager") or "eager"


@contextlib.contextmanager
def naming_former(config: ModelConfig) -> Iterator[None]:
    """Let the config name its former attention, which reads there which variant it is."""
    switched = config._attn_implementation
    config._attn_implementation_internal = former_implementation(config)
    try:
        yield
    finally:
        config._attn_implementation_internal = switched


def owner_of(config: ModelConfig) -> Owner | None:
    """The model that a switched config belongs to; None for a copy of a switched config."""
    return _owners.get(id(config))
