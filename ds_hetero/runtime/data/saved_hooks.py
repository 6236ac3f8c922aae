"""Find the hook of a tensor that an autograd node has saved for its backward, without running the hook.

Reading a saved tensor runs its hook. Since torch 2.10, ``_raw_saved_NAME.unpack_hook`` names the hook. In torch 2.9 it
does not, and `ds_hetero.engine.asked_hooks` makes all hooks answer instead: while `hook_of` reads, a hook made by
`asks_first` raises an exception that names it, and what it holds stays where it is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

Hook = Callable[[Any], torch.Tensor]
"""Returns the tensor for what was kept in its place."""

_thread = threading.local()  # ``is_asking`` while `hook_of` reads: backwards in other threads go on
_hooks_answer = False  # as `let_hooks_answer` has set it


class _HookFoundError(Exception):
    def __init__(self, hook: Hook) -> None:
        super().__init__("a hook was asked for its name")  # seen by nobody: `_ask` catches it
        self.hook = hook


def hook_of(node: Any, name: str) -> Hook | None:
    """Return the hook that unpacks what a node has saved under ``name``; None if it has none, or is not a tensor.

    Without `let_hooks_answer`, torch 2.9 gives None for every tensor.
    """
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None:
        return None
    return _ask(node, name) if _hooks_answer else getattr(saved, "unpack_hook", None)


def _ask(node: Any, name: str) -> Hook | None:
    _thread.is_asking = True
    try:
        getattr(node, f"_saved_{name}")
    except _HookFoundError as error:
        return error.hook
    finally:
        _thread.is_asking = False
    return None


def asks_first(hook: Hook) -> Hook:
    """Return a hook that names ``hook`` while `hook_of` reads, and calls it otherwise."""

    @functools.wraps(hook)
    def answer_or_unpack(packed: Any) -> torch.Tensor:
        if getattr(_thread, "is_asking", False):
            raise _HookFoundError(hook)
        return hook(packed)

    return answer_or_unpack


def let_hooks_answer(do_answer: bool) -> None:
    """Let `hook_of` ask hooks, which `asks_first` must have made, or read what torch says."""
    global _hooks_answer
    _hooks_answer = do_answer


def torch_names_hooks() -> bool:
    """Whether a saved tensor of this torch names its hook."""
    node: Any = (torch.ones(1, requires_grad=True) * torch.ones(1)).grad_fn
    return hasattr(node._raw_saved_other, "unpack_hook")
