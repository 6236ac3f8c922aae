"""Memory of one rank at its peak, moment by moment, with DeepSpeed's buffers: what `ds-hetero fit` shows.

`ds_hetero.cost.terms.memory` adds up everything that a schedule needs and knows no buffers; searches go by that. Here
four moments are told apart, and the largest counts:

    loss       the backward begins: all activations, the logits, and in ZeRO-3 parameters that arrive for the backward
    mlp        the backward of a layer begins: all that the layer has kept, and gradients of its widest part
    attention  it has come to attention: the MLP's part is gone, keys and values visit, exchanges are packed
    step       the optimizer's: gradients of the rank's own part in fp32, and what the optimizer makes beside them

Below ZeRO-2 gradients of a layer come as its activations go, so of the two sets the larger one counts. In ZeRO-2 a rank
makes the buffer of all its gradients when the first of them comes, which is that of the last element that it owns:
activations of the layers up to there are still held. With gradient accumulation gradients of earlier micro-batches are
there from the start, and ZeRO-3 has one buffer for all.

Dimension key: D ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.heads import kv_heads_of_ranks
from ds_hetero.cost.terms.memory import (
    LOGIT_TILE_TOKENS,
    MLP_TILE_TOKENS,
    WIDE,
    joined_layers,
    memory_parts,
    recurrent_bytes,
    state_bytes,
)
from ds_hetero.cost.workload import Workload
from ds_hetero.models import ModelSpec

__all__ = ["peak_parts"]


class _Layer(NamedTuple):
    """Bytes ``[D]``: what a layer's backward needs, the MLP's part of that, what its MLP's makes, all layers' needs."""

    kept: Floats
    of_mlp: Floats
    made: Floats
    kept_by_all: Floats


def peak_parts(
    model: ModelSpec, workload: Workload, grouping: Grouping, tokens_D: Floats, heads_D: Ints
) -> dict[str, Floats]:
    """Peak memory of every rank by part, each ``[D]``; leading dimensions of the arguments are kept.

    model_states     weights and optimizer state
    gradients        what they take beyond the activations that they replace; all with accumulation or ZeRO-3
    gathered         ZeRO-3: parameters that stay gathered, and at the loss those that arrive
    activations      per layer its input if checkpointed, else all that its backward needs
    layer            what one layer's backward needs, if checkpointed, and what its MLP's backward makes
    ring_buffers, exchange_buffers, logits    see `ds_hetero.cost.terms.memory`
    bucket           DeepSpeed's buffer for gradients under way; below ZeRO-3 only during the backward
    step             fp32 gradients of the rank's own part, and the optimizer's temporaries
    """
    buffers = workload.buffers
    assert buffers is not None, "peaks are those of DeepSpeed, with its buffers"
    plain = memory_parts(model, workload, grouping, tokens_D, heads_D)
    states = state_bytes(model, workload, tokens_D.shape[-1])
    element, count, stage = workload.element_bytes, model.num_parameters, workload.zero_stage
    of_layer = _layer(model, workload, grouping, tokens_D, heads_D)
    if workload.activation_checkpointing:
        activations = held = plain["activations"]
        recomputed, rest = of_layer.kept, of_layer.kept - of_layer.of_mlp
    else:
        activations = of_layer.kept_by_all
        held, recomputed, rest = activations - of_layer.of_mlp, np.zeros_like(activations), np.zeros_like(activations)
    live = arriving = 0.0
    if stage == 3:
        least = 2 * model.layer_parameters + model.vocab_size * model.hidden_size
        live = element * max(min(buffers.live_parameters, count), min(least, count))
        arriving = element * min(buffers.prefetch_bucket, count)
    tokens = workload.micro_batch * tokens_D
    tile = np.minimum(tokens, LOGIT_TILE_TOKENS) if workload.tiled_logits else tokens
    bucket = float(buffers.reduce_bucket * element if stage else 0)
    gone = 0.0 if workload.micro_batches > 1 else _gone_at_first_gradient(workload, tokens_D.shape[-1]) * activations
    working = {
        "gradients": np.maximum(states["gradients"] - gone, 0.0),
        "activations": activations,
        "bucket": np.full(tokens_D.shape, bucket),
    }
    moments: dict[str, dict[str, Any]] = {
        "loss": {**working, "logits": tile * model.vocab_size * (element + 2 * WIDE), "gathered": live + arriving},
        "mlp": {**working, "layer": recomputed + of_layer.made, "gathered": live},
        "attention": {
            **working,
            "activations": held,
            "layer": rest,
            "ring_buffers": plain["ring_buffers"],
            "exchange_buffers": plain["exchange_buffers"],
            "gathered": live,
        },
        "step": {
            "gradients": states["gradients"] if stage in (0, 3) else 0.0,
            "bucket": bucket if stage == 3 else 0.0,
            "step": _step_bytes(model, workload, tokens_D.shape[-1]),
        },
    }
    model_states = np.broadcast_to(states["weights"] + states["optimizer_state"], tokens_D.shape)
    return {"model_states": model_states, **_largest(moments, tokens_D.shape)}


def _gone_at_first_gradient(workload: Workload, num_ranks: int) -> Floats:
    """Share of the layers whose activations are gone when a rank holds all gradients that it will, ``[D]``.

    Elements are owned in the order of the ranks and of the layers; of several replicas the last one is meant.
    """
    if workload.zero_stage == 3:
        return np.zeros(num_ranks)
    if workload.zero_stage < 2:
        return np.ones(num_ranks)
    weights_D = np.ones(num_ranks) if workload.zero_weights is None else np.array(workload.zero_weights)
    return np.asarray((1 - np.cumsum(weights_D) / weights_D.sum()) / workload.data_parallel)


def _largest(moments: dict[str, dict[str, Any]], shape: tuple[int, ...]) -> dict[str, Floats]:
    """The parts of the moment that needs the most, rank by rank; parts of other moments are 0."""
    totals = np.stack([np.broadcast_to(sum(parts.values()), shape) for parts in moments.values()])
    chosen = totals.argmax(axis=0)
    names = {name: None for parts in moments.values() for name in parts}
    return {
        name: np.asarray(
            sum(np.where(chosen == i, parts.get(name, 0.0), 0.0) for i, parts in enumerate(moments.values()))
        )
        for name in names
    }


def _step_bytes(model: ModelSpec, workload: Workload, num_ranks: int) -> Floats:
    """What the optimizer's step makes on every rank, ``[D]``: ZeRO-3 by groups of parameters, ZeRO-0 by tensors."""
    buffers = workload.buffers
    assert buffers is not None
    weights_D = np.ones(num_ranks) if workload.zero_weights is None else np.array(workload.zero_weights)
    own_D = model.num_parameters * weights_D / weights_D.sum() / workload.data_parallel
    if workload.zero_stage == 3:
        own_D = np.minimum(own_D, buffers.sub_group)
    if workload.zero_stage == 0:
        largest = model.hidden_size * max(model.vocab_size, model.mlp_size)
        return np.full(num_ranks, float(largest * buffers.optimizer_bytes))
    on_device = 0 if workload.offload_optimizer else 1
    return np.asarray(on_device * own_D * (WIDE + buffers.optimizer_bytes))


def _last_visible(grouping: Grouping, length_K: Floats, causal: bool) -> Floats:
    """Keys that every group sees of the last block that visits it, the next group's, ``[K]``.

    In a zigzag layout a group lies around those after it in the ring: it sees all of their keys, and half of the keys
    of those before it.
    """
    num_groups = grouping.num_groups
    if num_groups == 1:
        return np.zeros_like(length_K)
    seen_K = np.ones(num_groups)
    if causal:
        seen_K = (
            np.where(np.arange(num_groups) < num_groups - 1, 1.0, 0.5) if grouping.zigzag else _only_last(num_groups)
        )
    return np.asarray(np.roll(length_K, -1, axis=-1) * seen_K)


def _only_last(num_groups: int) -> Floats:
    """Of contiguous groups, only the last one sees the one after it, which is the first."""
    return np.asarray(np.arange(num_groups) == num_groups - 1, dtype=np.float64)


def _layer(model: ModelSpec, workload: Workload, grouping: Grouping, tokens_D: Floats, heads_D: Ints) -> _Layer:
    """What autograd keeps of a decoder layer of transformers, and the gradients of its MLP.

    Both norms keep their input in fp32, the normalized tokens and their output; the projection of attention its
    input; a gated MLP gate, activated gate, up and their product, a plain one both sides of its activation. After the
    exchange q, k, v, attention's output and its log-sum-exp; in a ring also the keys and values that visited last, with
    which the backward begins, as far as this rank sees them.
    """
    batch, element = workload.micro_batch, workload.element_bytes
    hidden, tokens = model.hidden_size, batch * tokens_D
    length_K = grouping.by_group(np.add, tokens_D)
    rows = batch * length_K[..., grouping.group_of] * heads_D
    kv_D = kv_heads_of_ranks(grouping, np.atleast_2d(heads_D), model.queries_per_kv_head).reshape(heads_D.shape)
    kv_rows = batch * length_K[..., grouping.group_of] * kv_D
    mlp = model.mlp_size * max(model.experts_per_token, 1) + model.shared_mlp_size
    norm, inner = (WIDE + 2 * element) * hidden, element * (4 if model.gated_mlp else 2) * mlp
    of_mlp = norm + (0 if workload.tiled_mlp else inner)
    visited = batch * _last_visible(grouping, length_K, workload.causal)[..., grouping.group_of] * kv_D
    exchanged = element * model.head_dim * (2 * rows + 2 * kv_rows + 2 * visited) + WIDE * rows
    attention = tokens * (norm + of_mlp + element * model.num_heads * model.head_dim) + exchanged
    kept, by_all = joined_layers(model, attention, tokens * (norm + of_mlp + recurrent_bytes(model, element)))
    made = element * tokens * (2 * mlp + hidden)
    if workload.tiled_mlp:  # the inner activations of a tile, their gradients, and the gradient of the layer
        made = np.minimum(tokens, MLP_TILE_TOKENS) * (inner + element * 2 * mlp) + element * tokens * hidden
    return _Layer(kept=kept, of_mlp=tokens * of_mlp, made=made, kept_by_all=by_all)
