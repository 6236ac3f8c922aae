"""The modules that hold all experts of a layer, and call what is inside them once for each expert that a token chose.

How often that is depends on the tokens, and so differs from rank to rank and from run to run.
"""

from __future__ import annotations

from torch import nn

_EXPERTS = "Experts"  # how transformers ends the names of their classes


def containers_of_experts(model: nn.Module) -> list[nn.Module]:
    """Return those of a model, in the order of its modules."""
    return [module for module in model.modules() if type(module).__name__.endswith(_EXPERTS)]
