"""Memory of one layer on a rank: one formula per kind of layer, however ranks share its work.

Every memory of this package is made of these: of jobs that share sequences (`ds_hetero.cost.terms.phases`), and of
stages of pipelines (`ds_hetero.cost.stages.stage_memory`).

Dimension key: D ranks, K groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.head_cuts import kv_heads_of_ranks
from ds_hetero.cost.terms.memory_parts import Bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

LOGIT_TILE_TOKENS = 1024  # of a tiled loss where nobody says its size; chosen, never measured
LOSS_CHUNK_TOKENS = 1024  # whose softmax exists in fp32 at once, of `ds_hetero.runtime.loss`
MLP_TILE_TOKENS = 4096  # of a tiled MLP; what `ds-hetero fit` advises for "tile_tokens"; chosen, never measured
WIDE = 4  # bytes of fp32
_NORM_COPIES = 5  # of the tokens in fp32, in the backward of transformers' RMSNorm: python -m benchmarks.fake_gpu peaks


class LayerShare(NamedTuple):
    """Shares of ranks in a layer, in a micro-batch of all its sequences; numbers by rank, ``[D]``.

    Args:
        visited: of the keys that visit a group last, with which the backward begins, as far as this rank sees them.
    """

    tokens: Floats  # outside attention
    tokens_at_once: Floats  # of an MLP in tiles, those of a tile; else all
    rows: Floats  # of queries in attention: tokens by heads
    kv_rows: Floats  # of keys, and as many of values
    visited: Bytes = 0.0
    visiting: Bytes = 0.0  # of the longest block of keys that visits
    in_ring: bool = False  # whether any do
    copied: Bytes = 0.0  # 1 where attention's output is copied on its way to its projection, as an exchange does
    cut: int = 1  # ranks that cut matmuls by heads and columns; norms and residuals are whole on every one

    @classmethod
    def of_sequence(
        cls, model: ModelSpec, workload: Workload, grouping: Grouping, tokens_D: Floats, heads_D: Ints
    ) -> LayerShare:
        """Return the shares of ranks that share sequences; leading dimensions of the arguments are kept."""
        batch = workload.micro_batch
        length_K = grouping.by_group(np.add, tokens_D)
        length_D = batch * length_K[..., grouping.group_of]
        kv_BD = kv_heads_of_ranks(grouping, np.atleast_2d(heads_D), model.queries_per_kv_head)
        kv_D = kv_BD.reshape(heads_D.shape)
        visited_K = _last_visible(grouping, length_K, workload.causal)
        return cls(
            tokens=batch * tokens_D,
            tokens_at_once=mlp_tokens(workload, tokens_D),
            rows=length_D * heads_D,
            kv_rows=length_D * kv_D,
            visited=batch * visited_K[..., grouping.group_of] * kv_D,
            visiting=batch * length_K.max(axis=-1, keepdims=True) * kv_D,
            in_ring=grouping.num_groups > 1,
            copied=(grouping.sizes[grouping.group_of] > 1).astype(float),
        )

    @classmethod
    def of_cut(cls, model: ModelSpec, workload: Workload, size: int) -> LayerShare:
        """Return the share of each of ``size`` ranks that cut layers by heads and columns, or of one rank alone."""
        tokens = np.array([float(workload.micro_batch * workload.seq_len)])
        return cls(
            tokens=tokens,
            tokens_at_once=mlp_tokens(workload, np.array([float(workload.seq_len)])),
            rows=tokens * model.num_heads / size,
            kv_rows=tokens * max(model.num_kv_heads / size, 1),
            cut=size,
        )


class LayerMemory(NamedTuple):
    """Bytes of a layer, by rank ``[D]``; of layers of several kinds, of the one that needs the most."""

    input_bytes: Bytes
    saved_bytes: Bytes  # that its backward needs
    mlp_saved_bytes: Bytes  # the MLP's part of that
    mlp_grad_bytes: Bytes  # what the backward of its MLP makes beyond what is saved, or of the norm before it
    weight_grad_bytes: Bytes  # of one of the MLP's matrices
    ring_buffers: Bytes  # visiting keys and values, their gradients, partial results
    exchange_buffers: Bytes  # packed for the all-to-all
    all_layers_saved_bytes: Bytes  # that the backwards of all layers of the model need

    def mapped(self, function: Callable[[Bytes], float]) -> LayerMemory:
        """Return numbers of one rank, each by a function of the numbers of all."""
        return LayerMemory(*map(function, self))


def layer_memory(model: ModelSpec, workload: Workload, share: LayerShare) -> LayerMemory:
    """Return what autograd saves of a decoder layer of transformers, and what its backward makes.

    Both norms save their input in fp32, the normalized tokens and their output; the projection of attention its
    input; a gated MLP gate, activated gate, up and their product, a plain one both sides of its activation; experts
    also their inputs and outputs, once for each expert that a token uses. Attention saves q, k, v, its output and its
    log-sum-exp; in a ring also the keys and values that visited last. A tiled MLP saves its input alone, which is its
    norm's output. With frozen weights no gradient needs normalized tokens, and they go; every adapter saves its narrow
    tokens and its matmul's input, which has no other use there.

    The backward of an MLP makes gradients of its inner activations and of one of its matrices, in tiles of all. The
    backward of the norm before a tiled one saves its input, and makes five copies of the tokens in fp32.

        ring_buffers       two visiting KV blocks, two fp32 dK/dV blocks, fp32 partial results
        exchange_buffers   packed q, k, v of the all-to-all, or the inputs of a scan
    """
    element, hidden, head_dim = workload.element_bytes, model.hidden_size, model.head_dim
    tokens = share.tokens
    token = _token_bytes(model, workload, share.cut)
    projection_input = element * model.num_heads / share.cut * head_dim * share.copied
    qkv_and_output = element * head_dim * (2 * share.rows + 2 * share.kv_rows + 2 * share.visited)
    log_sum_exp = WIDE * share.rows
    attention_tokens = tokens * (token.norm + token.mlp_saved + projection_input + 4 * token.adapter)
    attention_layer = attention_tokens + (qkv_and_output + log_sum_exp)
    recurrent_layer = tokens * (token.norm + token.mlp_saved + _recurrent_bytes(model, element))
    saved, all_layers_saved = _largest_and_all(model, attention_layer, recurrent_layer)

    weight_grad: float = 0
    if not token.adapter:
        weight_grad = element * hidden * model.mlp_size * max(model.num_experts, 1) / share.cut
    if workload.tiled_mlp:
        mlp_grad = _tiled_mlp_grad_bytes(model, workload, share, token, weight_grad)
    else:
        inner_grads = element * tokens * (2 * token.mlp_width + hidden)
        mlp_grad = inner_grads + np.maximum(tokens * token.routed, weight_grad)

    kv_blocks = 4 * (element + WIDE) * share.visiting
    partial_results = WIDE * share.rows
    packed = element * (model.num_heads + 2 * model.num_kv_heads) * head_dim * share.copied
    return LayerMemory(
        input_bytes=element * tokens * hidden,
        saved_bytes=saved,
        mlp_saved_bytes=tokens * token.mlp_saved,
        mlp_grad_bytes=mlp_grad,
        weight_grad_bytes=weight_grad,
        ring_buffers=head_dim * (kv_blocks + partial_results) * share.in_ring,
        exchange_buffers=tokens * np.maximum(packed, _scan_bytes(model, element)),
        all_layers_saved_bytes=all_layers_saved,
    )


class _TokenBytes(NamedTuple):
    """What a layer saves per token of a rank; the width of the MLP is that of the rank."""

    norm: float  # of one norm
    inner: float  # inside the MLP, and the inputs and outputs of its experts
    routed: float  # of the experts alone
    mlp_saved: float  # the MLP and its norm
    adapter: float  # narrow tokens of one adapter; 0 without adapters
    mlp_width: float  # elements, of all experts that a token uses


def _token_bytes(model: ModelSpec, workload: Workload, cut: int) -> _TokenBytes:
    element, hidden = workload.element_bytes, model.hidden_size
    mlp_width = (model.mlp_size * max(model.experts_per_token, 1) + model.shared_mlp_size) / cut
    adapter = element * workload.adapter_rank
    num_mlp_matmuls = (3 if model.gated_mlp else 2) * max(model.experts_per_token, 1)
    norm = (WIDE + (1 if adapter else 2) * element) * hidden
    if workload.selective_checkpointing:  # computed again, from its input
        norm = element * hidden
    recomputes_activation = workload.selective_checkpointing or workload.fused_kernels
    if recomputes_activation:
        inner_widths = 2 if model.gated_mlp else 1
    else:
        inner_widths = 4 if model.gated_mlp else 2
    inner = element * inner_widths * mlp_width
    routed = 2 * element * model.experts_per_token * hidden
    inner += routed
    mlp_saved: float = norm
    if not workload.tiled_mlp:
        mlp_saved = norm + (inner + num_mlp_matmuls * adapter)
    return _TokenBytes(norm, inner, routed, mlp_saved, adapter, mlp_width)


def _tiled_mlp_grad_bytes(
    model: ModelSpec, workload: Workload, share: LayerShare, token: _TokenBytes, weight_grad: float
) -> Bytes:
    """Bytes that the backward of a tiled MLP or of the norm before it allocates, whichever is more."""
    element, hidden = workload.element_bytes, model.hidden_size
    inner_of_tile = share.tokens_at_once * (token.inner + element * 2 * token.mlp_width)
    of_tiles = inner_of_tile + element * share.tokens * hidden
    # A gradient of each matrix, summed over tiles, and the one of the tile that is added.
    of_tiles = of_tiles + (4 if model.gated_mlp else 3) * weight_grad
    of_norm = share.tokens * (((_NORM_COPIES + 1) * WIDE + element) * hidden - token.mlp_saved)
    return np.maximum(of_tiles, of_norm)


def logit_bytes(model: ModelSpec, workload: Workload, tokens_D: Floats) -> Floats:
    """Bytes that the loss needs, ``[D]``.

    Logits of a tile, or of all tokens, and their gradient, with the softmax of a chunk in fp32; beside them the tokens
    of the final norm.
    """
    tokens = _logit_tokens(workload, tokens_D)
    chunk = WIDE * np.minimum(tokens, LOSS_CHUNK_TOKENS)
    of_logits = 2 * workload.element_bytes * tokens + chunk
    if workload.logit_bytes is not None:
        of_logits = workload.logit_bytes * tokens
    return np.asarray(model.vocab_size * of_logits + normed_bytes(model, workload, tokens_D))


def head_bytes(model: ModelSpec, workload: Workload, tokens_D: Floats) -> Floats:
    """Bytes that the head's gradient is made of, ``[D]``: gradients of logits and the tokens of the final norm."""
    tokens = _logit_tokens(workload, tokens_D)
    return model.vocab_size * workload.element_bytes * tokens + normed_bytes(model, workload, tokens_D)


def normed_bytes(model: ModelSpec, workload: Workload, tokens_D: Floats) -> Floats:
    """Bytes that the final norm keeps, and the gradients of a tiled loss, ``[D]``."""
    kept = WIDE if workload.adapter_rank else WIDE + 2 * workload.element_bytes
    gradients = workload.element_bytes if workload.has_loss_tiles else 0
    return workload.micro_batch * tokens_D * model.hidden_size * (kept + gradients)


def _logit_tokens(workload: Workload, tokens_D: Floats) -> Floats:
    """Return the tokens of a micro-batch whose logits are in memory at the same time, ``[D]``; all if not tiled.

    Args:
        tokens_D: tokens of one sequence.
    """
    return _at_once(workload, tokens_D, LOGIT_TILE_TOKENS if workload.has_loss_tiles else None)


def mlp_tokens(workload: Workload, tokens_D: Floats) -> Floats:
    """Tokens of a micro-batch whose inner activations of an MLP exist at once, of tokens of a sequence, ``[D]``."""
    return _at_once(workload, tokens_D, MLP_TILE_TOKENS if workload.tiled_mlp else None)


def _at_once(workload: Workload, tokens_D: Floats, usual: int | None) -> Floats:
    """All tokens without tiles; else those of a tile, of which all ranks have as many as the one with most tokens.

    Ranks of 5,000 and 3,000 tokens with tiles of 2,048: three tiles on each, of 1,667 and 1,000 tokens.

    Args:
        usual: tokens of a tile where the workload says none; None without tiles.
    """
    tokens = workload.micro_batch * tokens_D
    if usual is None:
        return tokens
    if workload.tile_tokens is None:
        return np.minimum(tokens, usual)
    num_tiles = np.maximum(np.ceil(tokens_D.max(axis=-1, keepdims=True) / workload.tile_tokens), 1)
    return np.asarray(workload.micro_batch * np.ceil(tokens_D / num_tiles))


def _last_visible(grouping: Grouping, length_K: Floats, causal: bool) -> Floats:
    """Keys that every group sees of the last block that visits it, the next group's, ``[K]``.

    In a zigzag layout a group lies around those after it in the ring: it sees all of their keys, and half of the keys
    of those before it. Of contiguous groups, only the last one sees the one after it, which is the first.
    """
    num_groups = grouping.num_groups
    if num_groups == 1:
        return np.zeros_like(length_K)
    is_last_K = np.arange(num_groups) == num_groups - 1
    if not causal:
        seen_K = np.ones(num_groups)
    elif grouping.zigzag:
        seen_K = np.where(is_last_K, 0.5, 1.0)
    else:
        seen_K = np.where(is_last_K, 1.0, 0.0)
    next_K = np.arange(1, num_groups + 1) % num_groups
    return np.asarray(length_K.take(next_K, axis=-1) * seen_K)


def _scan_bytes(model: ModelSpec, element: int) -> int:
    """Inputs of a scan per token, all heads together; 0 for a model without one."""
    layers = model.recurrent
    if layers is None:
        return 0
    per_head, per_key_head = layers.input_bytes(element)
    return per_head * layers.num_heads + per_key_head * layers.num_key_heads


def _recurrent_bytes(model: ModelSpec, element: int) -> int:
    """Bytes of a recurrence per token beside norms and MLP: inputs and outputs of convolution, scan and gated norm.

    A rank that holds a share of the tokens holds this share of the scan's heads, of all tokens. Kernels that keep more
    than their inputs and outputs, such as torch's own, take more.
    """
    layers = model.recurrent
    if layers is None:
        return 0
    return element * (2 * layers.conv_channels + 3 * layers.inner_size) + _scan_bytes(model, element)


def _largest_and_all(model: ModelSpec, attention: Floats, recurrent: Floats) -> tuple[Floats, Floats]:
    """Bytes of the largest layer, and of all layers, from those of one of each kind, ``[D]``."""
    layers = model.recurrent
    if layers is None:
        return attention, model.num_layers * attention
    of_all = layers.num_attention_layers * attention + layers.num_layers * recurrent
    some_layer_has_both = layers.num_attention_layers + layers.num_layers > layers.num_model_layers
    if some_layer_has_both:
        return attention + recurrent, of_all
    return np.maximum(attention * bool(layers.num_attention_layers), recurrent), of_all
