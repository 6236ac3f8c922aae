"""The loss that a transformers model computes itself: which labels it takes, by which function, and its added terms."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor

from ds_hetero.frameworks.transformers.model.class_loss import class_with_own_forward
from ds_hetero.frameworks.transformers.model.own_loss import own_loss_function
from ds_hetero.frameworks.transformers.model.router_losses import has_router_loss, router_term
from ds_hetero.frameworks.transformers.protocols import PretrainedModel

# Suffixes of classes in which a token predicts its own label, not that of the next token.
_OWN_LABEL_CLASSES = ("ForMaskedLM", "ForTokenClassification")


class TransformersLoss:
    """The loss of one model; implements `ds_hetero.engine.trained.split_model.ModelLoss`.

    Args:
        pretrained: the model.
        has_towers: True if it puts images or sounds before its text decoder.

    Attributes:
        has_router_term: True if the model adds an auxiliary loss of its routers.
    """

    def __init__(self, pretrained: PretrainedModel, *, has_towers: bool) -> None:
        self._pretrained, self._has_towers = pretrained, has_towers
        self.has_router_term = has_router_loss(pretrained)

    @property
    def moves_labels(self) -> bool:
        """True if a token predicts the label of the next one, as in language models; False if it predicts its own."""
        return not type(self._pretrained).__name__.endswith(_OWN_LABEL_CLASSES)

    @functools.cached_property
    def takes_shifted_labels(self) -> bool:
        """True if the model's forward takes ``shift_labels``, by name or in ``**kwargs``."""
        parameters = inspect.signature(type(self._pretrained).forward).parameters
        takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return takes_any_keyword or "shift_labels" in parameters

    @functools.cached_property
    def shifts_labels_itself(self) -> bool:
        """True if the model's own loss shifts labels; this engine then computes the loss from its logits."""
        if self.moves_labels and not self.takes_shifted_labels:
            return True
        if not self.moves_labels or not self._has_towers:
            return False
        try:
            return "loss_function" not in inspect.getsource(type(self._pretrained).forward)
        except (OSError, TypeError):  # a function without source, such as from exec
            return False

    @property
    def custom_function(self) -> str:
        """Name of the custom loss function that the script has set; empty for the cross entropy of tokens."""
        return own_loss_function(self._pretrained)

    @property
    def class_with_own_forward(self) -> str:
        """Name of the model's class if the script wrote it and its forward may compute a loss; else empty."""
        return class_with_own_forward(self._pretrained)

    def router_term(self, outputs: Any) -> Tensor | float:
        """Return the auxiliary loss that the model adds to the mean loss of its tokens; 0 if it adds none."""
        return router_term(self._pretrained, outputs) if self.has_router_term else 0.0
