"""Operations and bytes of one transformer layer, per token: numbers in, numbers out.

Every count is for one sequence; multiply by the micro-batch. Backward is counted apart from forward.
"""

from __future__ import annotations

from ds_hetero.models import ModelSpec

__all__ = [
    "ATTENTION_BACKWARD_FLOPS",
    "ATTENTION_FORWARD_FLOPS",
    "MATMUL_BACKWARD",
    "elementwise_elements",
    "logit_elements",
    "logit_flops",
    "matmul_flops",
]

# Per query token x key token x head x head_dim, no causal discount. QK^T and PV are two products forward; backward
# computes the scores again and dV, dP, dQ, dK: five products (FlashAttention-2, arXiv:2307.08691, section 3.1.2).
# HexiSeq's Eq. 7 counts 16 in all: 4 forward, 4 recomputed and 8 backward.
ATTENTION_FORWARD_FLOPS = 4
ATTENTION_BACKWARD_FLOPS = 10

MATMUL_BACKWARD = 2  # gradients of the input and of the weight, as many operations each as the forward product


def matmul_flops(model: ModelSpec) -> int:
    """Forward operations of all products of one layer with weights, per token: two per weight it is multiplied with.

    With the 4H-wide MLP of GPT this is 24 H^2, a third of HexiSeq's Eq. 5 (72 H^2, forward and backward).
    """
    return 2 * model.active_layer_parameters


def elementwise_elements(model: ModelSpec) -> int:
    """Elements that memory-bound kernels of one layer's forward read and write, per token; backward takes twice that.

    Two norms (read, write), two residual additions (two reads, one write), rotary embedding of q and k (read, write)
    and the activation (read and write the MLP's width; read it twice if gated). HexiSeq's Eq. 4 counts 20 H with the
    operands of the products in it, which here belong to the products' own efficiency.
    """
    rotary = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    activation = (3 if model.gated_mlp else 2) * model.mlp_size * max(model.experts_per_token, 1)
    return 10 * model.hidden_size + rotary + activation


def logit_flops(model: ModelSpec, *, tiled: bool) -> int:
    """Operations of the language-model head, forward and backward, per token; tiles compute the forward again."""
    return 2 * model.hidden_size * model.vocab_size * (4 if tiled else 3)


def logit_elements(model: ModelSpec) -> int:
    """fp32 elements that the loss reads and writes per token: logits, their softmax and its gradient, twice each."""
    return 6 * model.vocab_size
