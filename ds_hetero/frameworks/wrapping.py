"""A function of ours in the place of a framework's, around it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ds_hetero.engine.patching import Function


def around(hook: Function, *context: object) -> Callable[[Function], Function]:
    """Make the replacement that `Patches.replace` takes of ``hook(*context, stock, *args, **kwargs)``.

    Args:
        hook: calls ``stock``, or does not, and returns what the caller of ``stock`` gets.
        context: what the hook needs beside the call.
    """

    def replacement_of(stock: Function) -> Function:
        @functools.wraps(stock)
        def call(*args: object, **kwargs: object) -> object:
            return hook(*context, stock, *args, **kwargs)

        return call

    return replacement_of
