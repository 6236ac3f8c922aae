"""The call of a sharded model: what happens before its ``forward``, and to what it returns.

PEFT and others call ``model.forward`` itself, past the hooks of the module, so an attribute of the model takes its
place, as TRL does.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch

from ds_hetero.integrations.transformers.attention import ShardedForward
from ds_hetero.integrations.transformers.protocols import PretrainedModel
from ds_hetero.integrations.transformers.shard_loss import add_loss

__all__ = ["Entrance"]


class Entrance:
    """Stands in the place of a model's ``forward``; `close` puts that back.

    Args:
        pretrained: the outermost transformers model.
    """

    def __init__(self, pretrained: PretrainedModel) -> None:
        self._pretrained = pretrained
        self._former = vars(pretrained).get("forward")  # that of TRL, for one
        self._latest: ShardedForward | None = None
        pretrained.forward = MethodType(self._standing_in(), pretrained)  # type: ignore[method-assign]

    def close(self) -> None:
        """Put back the ``forward`` that the model had."""
        del self._pretrained.forward
        if self._former is not None:
            self._pretrained.forward = self._former  # type: ignore[method-assign]

    def note(self, forward: ShardedForward) -> None:
        """The decoder runs ``forward`` in the call of the model that is running."""
        self._latest = forward

    def _standing_in(self) -> Any:
        former = self._former
        plain = type(self._pretrained).forward if former is None else getattr(former, "__func__", None)

        @functools.wraps(type(self._pretrained).forward)
        def forward(pretrained: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin()
            output = former(*args, **kwargs) if plain is None else plain(pretrained, *args, **kwargs)  # type: ignore[misc]
            self._end(kwargs, output)
            return output

        return forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self) -> None:
        self._latest = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, kwargs: dict[str, Any], output: Any) -> None:
        forward, self._latest = self._latest, None
        if forward is not None:
            add_loss(output, kwargs, forward)
