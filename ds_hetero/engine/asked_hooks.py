"""Make hooks on saved tensors name themselves in torch 2.9, whose saved tensors do not name their hooks.

Hooks of one saved tensor (``_raw_saved_NAME.register_hooks``) are not among them: the checks of losses run these.
"""

from __future__ import annotations

from torch.autograd.graph import saved_tensors_hooks

from ds_hetero.engine.patching import Function, Patches, around
from ds_hetero.runtime.data.saved_hooks import Hook, asks_first, let_hooks_answer, torch_names_hooks


def install(patches: Patches) -> None:
    """Replace the constructor of ``saved_tensors_hooks``, from which checkpoints and offloading derive, if needed."""
    if not torch_names_hooks():
        install_always(patches)


def install_always(patches: Patches) -> None:
    """As `install`, with every torch."""
    patches.replace(saved_tensors_hooks, "__init__", around(_make_hooks))
    let_hooks_answer(True)
    patches.on_undo(lambda: let_hooks_answer(False))


def _make_hooks(stock: Function, hooks: saved_tensors_hooks, pack_hook: Function, unpack_hook: Hook) -> None:
    """Replace ``saved_tensors_hooks.__init__``: the hook that unpacks names itself while it is asked."""
    stock(hooks, pack_hook, asks_first(unpack_hook))
