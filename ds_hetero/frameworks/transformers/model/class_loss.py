"""Losses that a class of the script's computes in its own ``forward``, from labels.

Shards have no ``labels``, so that such a forward makes no loss of them. Here the class is given labels of the shard,
for a check (`ds_hetero.runtime.step_checks.ClassLoss`), and what it made of them is taken out of its outputs again.
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
    """Name of a model's class if its forward is not one of a framework's; else empty.

    One that takes no labels, or computes its loss from ``shift_labels``, which shards have, needs no look.
    """
    kind = type(pretrained)
    owner = next((base for base in kind.__mro__ if "forward" in vars(base)), object)
    if owner is object or owner.__module__.startswith(_STOCK):
        return ""
    parameters = inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    takes_labels = "labels" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    try:
        reads_moved_labels = "shift_labels" in inspect.getsource(vars(owner)["forward"])
    except (OSError, TypeError):  # made while the program runs
        reads_moved_labels = "shift_labels" in parameters
    return kind.__name__ if takes_labels and not reads_moved_labels else ""


class ClassLossCall:
    """One call of a model on a shard, whose class is given labels.

    Args:
        arguments: of the call, with ``shift_labels`` [B, s] and without ``labels``.
    """

    def __init__(self, model: Called, arguments: Batch) -> None:
        self._model = model
        moved: Tensor = arguments["shift_labels"]
        # Labels of the next token stand one place later; that of the last is on another rank.
        labels = nn.functional.pad(moved[:, :-1], (1, 0), value=IGNORE_INDEX) if model.moves_labels else moved
        self._num_tokens = moved.shape[1] - model.moves_labels
        self._compared: Tensor = moved[:, : self._num_tokens]
        without = ("shift_labels", "num_items_in_batch")
        self.arguments: Entries = {k: v for k, v in arguments.items() if k not in without} | {"labels": labels}
        self._loss: Tensor | None = None

    def take_loss(self, outputs: Any) -> Any:
        """The outputs without the loss that the class made, as they are without labels."""
        if not isinstance(outputs, ModelOutput):
            is_loss = isinstance(outputs, tuple) and isinstance(outputs[0], Tensor) and not outputs[0].dim()
            return outputs[1:] if is_loss else outputs
        if not isinstance(outputs.get("loss"), Tensor):
            return outputs
        self._loss = outputs["loss"].detach()
        return type(outputs)(**{name: entry for name, entry in outputs.items() if name != "loss"})

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compare(self, outputs: Any) -> None:
        """Note what the class made beside the cross entropy of its logits; ``outputs`` have the engine's loss."""
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
