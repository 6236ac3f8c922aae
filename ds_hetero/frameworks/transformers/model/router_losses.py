"""Compute the load-balancing loss of transformers' mixtures of experts over the whole replica.

A model with a head calls ``load_balancing_loss_func`` of its modelling file after its decoder. While a model of the
file is sharded, this name is bound to a wrapper, which computes the loss by the router logits that it gets:

    router logits of a sharded forward (marked by `mark_router_logits`)    `ds_hetero.runtime.loss.load_balancing_loss`
    any other router logits                                                the original function
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
# Autograd nodes in which a mark is searched: views and casts between the router and the loss. Chosen, never measured.
_MAX_SEARCHED_NODES = 4

_num_models: Counter[str] = Counter()  # sharded models that use the wrapper, by file


def has_router_loss(pretrained: PretrainedModel) -> bool:
    """Return True if the model's file has the function that computes the auxiliary loss of routers."""
    return hasattr(_file_of(pretrained), _NAME)


def adds_router_loss(pretrained: PretrainedModel) -> bool:
    """Return True if the model adds an auxiliary loss of routers, by its configuration."""
    return has_router_loss(pretrained) and bool(getattr(pretrained.config.get_text_config(), "output_router_logits", 0))


def wrap_router_loss(pretrained: PretrainedModel) -> Callable[[], None]:
    """Wrap the function in the model's file, and in Mixtral's, which TRL's fused head calls for every model.

    Returns:
        A function that ends the wrapping for the model. The original function of a file is restored when the last model
        that uses the wrapper has called it.
    """
    if not has_router_loss(pretrained):
        return lambda: None
    files = {_file_of(pretrained), modeling_mixtral}
    for file in files:
        if not _num_models[file.__name__]:
            setattr(file, _NAME, _make_wrapper(getattr(file, _NAME)))
        _num_models[file.__name__] += 1

    def unwrap() -> None:
        for file in files:
            _num_models[file.__name__] -= 1
            if not _num_models[file.__name__]:
                setattr(file, _NAME, getattr(file, _NAME).__wrapped__)

    return unwrap


def mark_router_logits(output: object, forward: ShardedForward) -> None:
    """Mark the router logits in a decoder's ``output`` with the forward that computed them."""
    for logits in getattr(output, "router_logits", None) or ():
        if isinstance(logits, Tensor):
            setattr(logits, _MARK, forward)
            # ZeRO-3 replaces the tensors in a module's output by others, but keeps their graph.
            if logits.grad_fn is not None:
                cast("Entries", logits.grad_fn.metadata)[_MARK] = forward


def _forward_of(logits: Tensor) -> ShardedForward | None:
    """Return the forward that computed router logits, from a mark on them or on their graph; None without a mark."""
    forward: ShardedForward | None = getattr(logits, _MARK, None)
    node = logits.grad_fn
    for _ in range(_MAX_SEARCHED_NODES):
        if forward is not None or node is None:
            break
        forward = cast("Entries", node.metadata).get(_MARK)
        node = node.next_functions[0][0] if node.next_functions else None
    return forward


def router_term(pretrained: PretrainedModel, outputs: object) -> Tensor | float:
    """Return the weighted auxiliary loss of routers in a model's outputs; 0 if there is none."""
    loss = getattr(outputs, "aux_loss", None)
    weight = getattr(pretrained.config.get_text_config(), "router_aux_loss_coef", 0) or 0
    return weight * loss if isinstance(loss, Tensor) else 0.0


def _file_of(pretrained: PretrainedModel) -> ModuleType:
    return sys.modules[type(pretrained).__module__]


def _make_wrapper(original: Function) -> Function:
    """Return the wrapper of ``original``, a ``load_balancing_loss_func``."""

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
        gates = [logits.reshape(-1, logits.shape[-1]) for logits in gate_logits]  # [B s, experts] of each layer
        real = torch.ones(len(gates[0]), device=gates[0].device)
        if attention_mask is not None:
            real = attention_mask.reshape(-1).to(real)
        if forward.is_placeholder:
            real = torch.zeros_like(real)
        return load_balancing_loss(gates, top_k, real, forward.replica)

    return load_balancing_loss_func
