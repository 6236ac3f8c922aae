"""Remember the attention implementation of a model's configurations from before the switch to this engine's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from ds_hetero.engine.trained.split_model import SplitModel
from ds_hetero.frameworks.transformers.protocols import ModelConfig

# By id of a switched config, as long as it exists: its former implementation, and the model that it belongs to.
_former: dict[int, str | None] = {}
_owners: weakref.WeakValueDictionary[int, SplitModel] = weakref.WeakValueDictionary()


def remember_implementation(config: ModelConfig, owner: SplitModel) -> None:
    """Remember the implementation that ``config`` has now. ``owner`` is not kept alive."""
    _former[id(config)] = config._attn_implementation
    _owners[id(config)] = owner
    weakref.finalize(config, _former.pop, id(config), None).atexit = False


def restore_implementation(config: ModelConfig) -> None:
    """Restore the former implementation of a switched config."""
    config._attn_implementation_internal = _former.pop(id(config))
    _owners.pop(id(config), None)


def former_implementation(config: ModelConfig) -> str:
    """Return the implementation of ``config`` before the switch; for a copy of a config "eager", which is exact."""
    return _former.get(id(config), "eager") or "eager"


@contextlib.contextmanager
def using_former(config: ModelConfig) -> Iterator[None]:
    """Inside the context, let ``config`` name its former implementation, which transformers' functions read there."""
    present = config._attn_implementation
    config._attn_implementation_internal = former_implementation(config)
    try:
        yield
    finally:
        config._attn_implementation_internal = present


def owner_of(config: ModelConfig) -> SplitModel | None:
    """Return the model that a switched config belongs to; None for a copy of a switched config."""
    return _owners.get(id(config))
