"""Memory of one rank: model states under ZeRO, activations, attention and exchange buffers, logits.

Dimension key: D ranks, K groups.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.heads import kv_heads_of_ranks
from ds_hetero.cost.workload import Workload
from ds_hetero.models import ModelSpec

__all__ = [
    "LOGIT_TILE_TOKENS",
    "MLP_TILE_TOKENS",
    "WIDE",
    "joined_layers",
    "memory_parts",
    "partitioned_bytes",
    "recurrent_bytes",
    "scan_bytes",
    "state_bytes",
    "static_bytes",
]


LOGIT_TILE_TOKENS = 1024  # tokens of one tile of a tiled loss
MLP_TILE_TOKENS = 4096  # tokens of one tile of a tiled MLP
WIDE = 4  # bytes of fp32


def static_bytes(model: ModelSpec, workload: Workload, num_ranks: int) -> Floats:
    """Parameters, gradients and optimizer state that every rank keeps, ``[D]``.

    ZeRO (arXiv:1910.02054, section 3): stage 1 partitions the optimizer state, stage 2 the gradients too, stage 3 the
    parameters too, each over all ranks of all replicas. ``zero_weights`` are the shares of one replica's ranks;
    left out, all are equal.
    """
    partitioned, whole = _by_stage(model, workload)
    return np.asarray(partitioned * _share_D(workload, num_ranks) + whole)


def state_bytes(model: ModelSpec, workload: Workload, num_ranks: int) -> dict[str, Floats]:
    """The parts of `static_bytes`: ``optimizer_state``, ``gradients`` and ``weights``, each ``[D]``."""
    share_D, whole_D = _share_D(workload, num_ranks), np.ones(num_ranks)
    return {
        name: np.asarray(model.num_parameters * each * (share_D if stage <= workload.zero_stage else whole_D))
        for name, stage, each in _bytes_from_stage(workload)
    }


def _share_D(workload: Workload, num_ranks: int) -> Floats:
    weights_D = np.ones(num_ranks) if workload.zero_weights is None else np.array(workload.zero_weights)
    return np.asarray(weights_D / weights_D.sum() / workload.data_parallel)


def partitioned_bytes(model: ModelSpec, workload: Workload) -> float:
    """Bytes of one copy of the model states that ZeRO partitions over all ranks, as far as they are on devices."""
    return _by_stage(model, workload)[0]


def _by_stage(model: ModelSpec, workload: Workload) -> tuple[float, float]:
    """Bytes of optimizer state, gradients and parameters that are partitioned, and of those that every rank has."""
    bytes_from_stage = _bytes_from_stage(workload)
    partitioned = sum(each for _, stage, each in bytes_from_stage if stage <= workload.zero_stage)
    whole = sum(each for _, stage, each in bytes_from_stage if stage > workload.zero_stage)
    return partitioned * model.num_parameters, whole * model.num_parameters


def _bytes_from_stage(workload: Workload) -> tuple[tuple[str, int, float], ...]:
    """Model states by name, the ZeRO stage from which they are partitioned, and their bytes per parameter."""
    return (
        ("optimizer_state", 1, 0 if workload.offload_optimizer else workload.optimizer_bytes),
        ("gradients", 2, workload.gradient_bytes),
        ("weights", 3, 0 if workload.offload_parameters else workload.element_bytes),
    )


def memory_parts(
    model: ModelSpec, workload: Workload, grouping: Grouping, tokens_D: Floats, heads_D: Ints
) -> dict[str, Floats]:
    """Peak memory of every rank of the runtime by part, each ``[D]``; leading dimensions of the arguments are kept.

    Unlike HexiSeq's Eq. 3 (arXiv:2605.07569) activations count once per layer. The peak is in the backward of a
    layer, while everything that the layers before it have kept is still there:

        model_states     see `static_bytes`
        gathered         ZeRO-3: this layer's and the next one's parameters, this layer's full gradients, the embedding
        activations      per layer its input if checkpointed, else all that its backward needs; of one layer if that
                         is in the host's memory
        layer            what one layer's backward needs, if checkpointed, and the gradients of its widest part
        ring_buffers     two visiting KV blocks, two fp32 dK/dV blocks, fp32 partial results
        exchange_buffers packed q, k, v of the all-to-all
        logits           of one tile, or of all tokens: in the compute type, in fp32 and their gradient
    """
    batch, element = workload.micro_batch, workload.element_bytes
    hidden, head_dim, all_heads = model.hidden_size, model.head_dim, model.num_heads
    tokens = batch * tokens_D
    length_K = grouping.by_group(np.add, tokens_D)
    rows = batch * length_K[..., grouping.group_of] * heads_D
    kv_D = kv_heads_of_ranks(grouping, np.atleast_2d(heads_D), model.queries_per_kv_head).reshape(heads_D.shape)
    kv_rows = batch * length_K[..., grouping.group_of] * kv_D
    mlp_width = (3 if model.gated_mlp else 2) * (
        model.mlp_size * max(model.experts_per_token, 1) + model.shared_mlp_size
    )
    # Per layer: two norm inputs, both residual sums, attention's output, the MLP's intermediates; after the exchange q,
    # k, v, the output of attention and its log-sum-exp.
    # A tiled MLP keeps its input alone, which is one of the four; what a tile needs comes on top of the layer.
    mlp_kept, mlp_tokens = (0, np.minimum(tokens, MLP_TILE_TOKENS)) if workload.tiled_mlp else (mlp_width, tokens)
    kept = element * tokens * (4 * hidden + all_heads * head_dim + mlp_kept)
    kept = kept + element * head_dim * (2 * rows + 2 * kv_rows) + WIDE * rows
    scan_kept = tokens * (element * (4 * hidden + mlp_kept) + recurrent_bytes(model, element))
    kept, kept_by_all = joined_layers(model, kept, scan_kept)
    if workload.activation_checkpointing:
        on_device = 1 if workload.offload_activations else model.num_layers
        activations, layer = on_device * element * tokens * hidden, kept
    else:
        activations, layer = kept_by_all, np.zeros_like(kept)
    layer = layer + element * (mlp_tokens * (mlp_width + (mlp_width - mlp_kept)) + tokens * hidden)
    ring = np.zeros_like(kept)
    if grouping.num_groups > 1:
        visiting = batch * length_K.max(axis=-1, keepdims=True) * kv_D * head_dim
        ring = 2 * visiting * 2 * element + 2 * visiting * 2 * WIDE + rows * head_dim * WIDE
    tile = np.minimum(tokens, LOGIT_TILE_TOKENS) if workload.tiled_logits else tokens
    gathered = 0.0
    if workload.zero_stage == 3:
        whole_layer = model.layer_parameters * (2 * element + workload.gradient_bytes)
        gathered = whole_layer + model.vocab_size * hidden * element
    exchanged = element * (all_heads + 2 * model.num_kv_heads) * head_dim
    return {
        "model_states": np.zeros(tokens_D.shape) + static_bytes(model, workload, tokens_D.shape[-1]),
        "gathered": np.full(tokens_D.shape, float(gathered)),
        "activations": activations,
        "layer": layer,
        "ring_buffers": ring,
        "exchange_buffers": tokens * max(exchanged, scan_bytes(model, element)),
        "logits": tile * model.vocab_size * (element + 2 * WIDE),
    }


def scan_bytes(model: ModelSpec, element: int) -> int:
    """Inputs of a scan per token, all heads together; 0 for a model without one."""
    layers = model.recurrent
    if layers is None:
        return 0
    per_head, per_key_head = layers.input_bytes(element)
    return per_head * layers.num_heads + per_key_head * layers.num_key_heads


def recurrent_bytes(model: ModelSpec, element: int) -> int:
    """What a recurrence keeps per token beside norms and MLP: what goes in and out of convolution, scan and gated norm.

    A rank that holds a share of the tokens holds this share of the scan's heads, of all tokens. Kernels that keep more
    than their inputs and outputs, such as torch's own, take more.
    """
    layers = model.recurrent
    if layers is None:
        return 0
    return element * (2 * layers.conv_channels + 3 * layers.inner_size) + scan_bytes(model, element)


def joined_layers(model: ModelSpec, attention: Floats, recurrent: Floats) -> tuple[Floats, Floats]:
    """What the largest layer takes, and all layers, of what one of each kind does, ``[D]``."""
    layers = model.recurrent
    if layers is None:
        return attention, model.num_layers * attention
    whole = layers.num_attention_layers * attention + layers.num_layers * recurrent
    if layers.num_attention_layers + layers.num_layers > layers.num_model_layers:  # a layer may hold both
        return attention + recurrent, whole
    return np.maximum(attention * bool(layers.num_attention_layers), recurrent), whole
