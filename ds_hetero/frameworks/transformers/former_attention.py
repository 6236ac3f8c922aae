"""Attention that a model had before it was switched to ours, kept by the model's configs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from ds_hetero.engine.adapters import SplitModel
from ds_hetero.frameworks.transformers.protocols import ModelConfig

_former: dict[int, str | None] = {}  # by id of a switched config that exists: its implementation before
_owners: weakref.WeakValueDictionary[int, SplitModel] = weakref.WeakValueDictionary()  # likewise: whose config it is


def remember_implementation(config: ModelConfig, owner: SplitModel) -> None:
    """Remember which attention a ``config`` names before it is switched to ours; ``owner`` is not kept alive."""
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


def owner_of(config: ModelConfig) -> SplitModel | None:
    """The model that a switched config belongs to; None for a copy of a switched config."""
    return _owners.get(id(config))
