"""Losses that a model class of the training script computes in its own ``forward``.

Shards have no ``labels``, so such a forward computes no loss, and this engine computes the cross entropy instead. To
check that this is right, the class gets the shard's labels here; its loss is compared
(`ds_hetero.runtime.step_checks.ClassLoss`) and removed from the outputs.

Dimension key: B rows, s tokens of this rank.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ds_hetero.frameworks.transformers.model.sharded_call import Called
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch, Entries

_STOCK = ("transformers.", "peft.", "trl.")


def class_with_own_forward(pretrained: object) -> str:
    """Return the name of a model's class if it computes a loss from ``labels`` in a forward of its own; else empty.

    Forwards of frameworks need no check, nor do those that take no labels, or that use ``shift_labels``, which shards
    have.
    """
    kind = type(pretrained)
    owner = next((base for base in kind.__mro__ if "forward" in vars(base)), object)
    if owner is object or owner.__module__.startswith(_STOCK):
        return ""
    parameters = inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_labels = "labels" in parameters or takes_any_keyword
    try:
        uses_shifted_labels = "shift_labels" in inspect.getsource(vars(owner)["forward"])
    except (OSError, TypeError):  # a function without source, such as from exec
        uses_shifted_labels = "shift_labels" in parameters
    return kind.__name__ if takes_labels and not uses_shifted_labels else ""


class ClassLossCall:
    """One call of a model on a shard, with labels for its class.

    Args:
        arguments: of the call, with ``shift_labels`` [B, s] and without ``labels``.
    """

    def __init__(self, model: Called, arguments: Batch) -> None:
        self._model = model
        shifted: Tensor = arguments["shift_labels"]
        # The class shifts labels itself: shift_labels 7 8 9 become labels -100 7 8. The 9 is the label of this rank's
        # last token; the class would take it from the next token, which is on another rank.
        labels = nn.functional.pad(shifted[:, :-1], (1, 0), value=IGNORE_INDEX) if model.moves_labels else shifted
        self._num_tokens = shifted.shape[1] - model.moves_labels  # that have a label in both
        self._compared: Tensor = shifted[:, : self._num_tokens]
        self.arguments: Entries = {**arguments, "labels": labels}
        for name in ("shift_labels", "num_items_in_batch"):
            self.arguments.pop(name, None)
        self._loss: Tensor | None = None

    def take_loss(self, outputs: Any) -> Any:
        """Remember the loss of the class, and return the outputs without it, as they are without labels."""
        if not isinstance(outputs, ModelOutput):
            has_loss = isinstance(outputs, tuple) and isinstance(outputs[0], Tensor) and not outputs[0].dim()
            return outputs[1:] if has_loss else outputs
        if not isinstance(outputs.get("loss"), Tensor):
            return outputs
        self._loss = outputs["loss"].detach()
        return type(outputs)(**{name: entry for name, entry in outputs.items() if name != "loss"})

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compare(self, outputs: Any) -> None:
        """Record the class's loss and its logits, for the comparison. ``outputs``: with the engine's loss."""
        logits = outputs.get("logits") if isinstance(outputs, ModelOutput) else None
        if self._loss is None or self._model.class_loss is None or not isinstance(logits, Tensor):
            return
        term = self._model.router_term(outputs)
        self._model.class_loss.note_forward(
            self._loss,
            logits[:, : self._num_tokens],
            self._compared,
            term.detach() if isinstance(term, Tensor) else term,
            outputs.get("loss"),
        )
