"""The load-balancing loss of transformers' mixtures of experts, taken over the whole replica.

A model with a head calls ``load_balancing_loss_func`` by that name of its modelling file, behind its decoder. While a
model of the file is split, a door stands there: router logits that a sharded forward made are marked with the forward,
and go to `ds_hetero.runtime.loss`; any others go on to the original.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from transformers.models.mixtral import modeling_mixtral

from ds_hetero.engine.forward_mode import ShardedForward
from ds_hetero.engine.patching import Function
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.runtime.data.shards import Entries
from ds_hetero.runtime.loss import load_balancing_loss

_NAME = "load_balancing_loss_func"
_MARK = "ds_hetero_forward"
_NODES_ABOVE_LOGITS = 4  # of the graph above router logits

_opened: Counter[str] = Counter()  # file: models that use its door


def has_router_loss(pretrained: PretrainedModel) -> bool:
    """Whether the model's loss of its routers goes through a door."""
    return hasattr(_file_of(pretrained), _NAME)


def adds_router_loss(pretrained: PretrainedModel) -> bool:
    """Whether the model's loss has a term of its routers, by its configuration."""
    return has_router_loss(pretrained) and bool(getattr(pretrained.config.get_text_config(), "output_router_logits", 0))


def open_router_loss(pretrained: PretrainedModel) -> Callable[[], None]:
    """Put doors into the model's file, if it calls the function; return what takes them out with their last model.

    TRL's fused head calls the function of Mixtral's file for every model, so there is one there, too.
    """
    if not has_router_loss(pretrained):
        return lambda: None
    files = {_file_of(pretrained), modeling_mixtral}
    for file in files:
        if not _opened[file.__name__]:
            setattr(file, _NAME, _door(getattr(file, _NAME)))
        _opened[file.__name__] += 1

    def close() -> None:
        for file in files:
            _opened[file.__name__] -= 1
            if not _opened[file.__name__]:
                setattr(file, _NAME, getattr(file, _NAME).__wrapped__)

    return close


def mark_router_logits(output: object, forward: ShardedForward) -> None:
    """Remember which forward made the router logits in a decoder's ``output``."""
    for logits in getattr(output, "router_logits", None) or ():
        if isinstance(logits, Tensor):
            setattr(logits, _MARK, forward)
            if logits.grad_fn is not None:  # which ZeRO-3 keeps where it puts other tensors into a module's output
                cast("Entries", logits.grad_fn.metadata)[_MARK] = forward


def _forward_of(logits: Tensor) -> ShardedForward | None:
    """The forward that `mark_router_logits` has marked router logits with."""
    forward: ShardedForward | None = getattr(logits, _MARK, None)
    node = logits.grad_fn
    for _ in range(_NODES_ABOVE_LOGITS):
        if forward is not None or node is None:
            break
        forward = cast("Entries", node.metadata).get(_MARK)
        node = node.next_functions[0][0] if node.next_functions else None
    return forward


def router_term(pretrained: PretrainedModel, outputs: object) -> Tensor | float:
    """Term that the model adds to its loss for its routers, for a loss that is made from its logits."""
    loss = getattr(outputs, "aux_loss", None)
    weight = getattr(pretrained.config.get_text_config(), "router_aux_loss_coef", 0) or 0
    return weight * loss if isinstance(loss, Tensor) else 0.0


def _file_of(pretrained: PretrainedModel) -> ModuleType:
    return sys.modules[type(pretrained).__module__]


def _door(original: Function) -> Function:
    @functools.wraps(original)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def load_balancing_loss_func(
        gate_logits: Sequence[Tensor] | None,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Any:
        forward = _forward_of(gate_logits[0]) if gate_logits else None
        if gate_logits is None or forward is None:
            return original(gate_logits, num_experts, top_k, attention_mask)
        gates = [logits.reshape(-1, logits.shape[-1]) for logits in gate_logits]
        real = torch.ones(len(gates[0]), device=gates[0].device)
        if attention_mask is not None:
            real = attention_mask.reshape(-1).to(real)
        if forward.is_placeholder:
            real = torch.zeros_like(real)
        return load_balancing_loss(gates, top_k, real, forward.replica)

    return load_balancing_loss_func
