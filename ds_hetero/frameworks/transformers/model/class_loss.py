"""Check the loss that a model class of the training script would compute in its own ``forward``.

Shards have ``shift_labels`` but no ``labels``, so such a forward computes no loss, and this engine computes the cross
entropy instead. To check that the two losses are equal, `ClassLossCall` gives the forward the shard's labels, hands its
loss to a check (`ds_hetero.runtime.step_checks.ClassLoss`), and removes it from the outputs.

Dimension key: B rows, s tokens of this rank.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ds_hetero.frameworks.transformers.model.sharded_call import SplitTransformer
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch, Entries

_FRAMEWORKS = ("transformers.", "peft.", "trl.")


def class_with_own_forward(pretrained: object) -> str:
    """Return the name of a model's class if its forward is the script's and may compute a loss; else "".

    Three kinds of forwards need no check: those of frameworks, those that take no labels, and those that use
    ``shift_labels``, which shards have.
    """
    model_class = type(pretrained)
    owner = next((base for base in model_class.__mro__ if "forward" in vars(base)), object)
    if owner is object or owner.__module__.startswith(_FRAMEWORKS):
        return ""
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_labels = "labels" in parameters or takes_any_keyword
    try:
        uses_shifted_labels = "shift_labels" in inspect.getsource(vars(owner)["forward"])
    except (OSError, TypeError):  # a function without source, such as from exec
        uses_shifted_labels = "shift_labels" in parameters
    return model_class.__name__ if takes_labels and not uses_shifted_labels else ""


class ClassLossCall:
    """One call of a model on a shard, with labels from which the model's class computes a loss.

    Args:
        arguments: arguments of the call, with ``shift_labels`` [B, s] and without ``labels``.

    Attributes:
        arguments: arguments for the class, with ``labels`` and without ``shift_labels``.
    """

    def __init__(self, model: SplitTransformer, arguments: Batch) -> None:
        self._model = model
        shifted: Tensor = arguments["shift_labels"]
        # The class shifts labels itself: shift_labels 7 8 9 become labels -100 7 8. The 9 is the label of this rank's
        # last token; the class would take it from the next token, which is on another rank.
        labels, moves_labels = shifted, model.model_loss.moves_labels
        if moves_labels:
            labels = nn.functional.pad(shifted[:, :-1], (1, 0), value=IGNORE_INDEX)
        self._num_tokens = shifted.shape[1] - moves_labels  # tokens whose label the class has, too
        self._compared_labels: Tensor = shifted[:, : self._num_tokens]
        self.arguments: Entries = {**arguments, "labels": labels}
        for name in ("shift_labels", "num_items_in_batch"):
            self.arguments.pop(name, None)
        self._loss: Tensor | None = None

    def take_loss(self, outputs: Any) -> Any:
        """Keep the loss that the model's class computed; return the outputs without a loss, as for a shard."""
        if not isinstance(outputs, ModelOutput):
            has_loss = isinstance(outputs, tuple) and isinstance(outputs[0], Tensor) and not outputs[0].dim()
            return outputs[1:] if has_loss else outputs
        if not isinstance(outputs.get("loss"), Tensor):
            return outputs
        self._loss = outputs["loss"].detach()
        return type(outputs)(**{name: entry for name, entry in outputs.items() if name != "loss"})

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compare(self, outputs: Any) -> None:
        """Give both losses of this call to the check.

        One is the loss that the model's class computed; the other is ``outputs.loss``, which the engine has set.
        """
        logits = outputs.get("logits") if isinstance(outputs, ModelOutput) else None
        if self._loss is None or self._model.losses.class_loss is None or not isinstance(logits, Tensor):
            return
        term = self._model.model_loss.router_term(outputs)
        self._model.losses.class_loss.note_forward(
            self._loss,
            logits[:, : self._num_tokens],
            self._compared_labels,
            term.detach() if isinstance(term, Tensor) else term,
            outputs.get("loss"),
        )
