"""Memory of one layer on a rank: one formula per kind of layer, for any way in which ranks share its work.

Two memory models add up these bytes: that of sequence parallelism (`ds_hetero.cost.terms.phases`) and that of pipeline
stages (`ds_hetero.cost.stages.stage_memory`).

Dimension key: D ranks, K groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.head_cuts import kv_heads_of_ranks
from ds_hetero.cost.terms.memory_parts import Bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

LOGIT_TILE_TOKENS = 1024  # tokens of a tile of the loss, if "tile_tokens" is not set; chosen, never measured
LOSS_CHUNK_TOKENS = 1024  # tokens whose softmax is in fp32 at the same time, in `ds_hetero.runtime.loss`
MLP_TILE_TOKENS = 4096  # tokens of a tile of the MLP, which `ds-hetero fit` advises, too; chosen, never measured
WIDE = 4  # bytes of fp32
# Copies of all tokens in the backward of a norm, its saved input included: fp32 copies of transformers' RMSNorm
# (python -m benchmarks.fake_gpu.families), and copies in the tokens' own type of torch's layer norm.
_NORM_COPIES, _NATIVE_NORM_COPIES = 6, 3


class LayerShare(NamedTuple):
    """Work of every rank in one layer, for all sequences of a micro-batch; numbers by rank, ``[D]``.

    A row is one token of one head.

    Args:
        visited: rows of the KV block that visits last in the forward, with which the backward therefore begins; only
            rows whose keys this rank's queries see count.
    """

    tokens: Floats  # tokens outside attention
    tokens_at_once: Floats  # tokens of a tile of the MLP; all tokens if it is not tiled
    rows: Floats  # query rows in attention
    kv_rows: Floats  # key rows, and as many value rows
    visited: Bytes = 0.0
    visiting: Bytes = 0.0  # rows of the longest KV block that visits
    in_ring: bool = False  # whether KV blocks of other groups visit
    copied: Bytes = 0.0  # 1 if an all-to-all copies attention's output on its way to the output projection, else 0
    cut: int = 1  # ranks that shard the layer's matmuls by heads and columns; norms and residuals are not sharded
    residual_cut: int = 1  # ranks that share the tokens of norms and residuals, see `ds_hetero.runtime.shared_tokens`
    experts: Bytes | None = None  # share of a layer's experts on this rank, if they are divided among ranks
    expert_tokens: Bytes = 0.0  # tokens of all ranks, whose rows travel to those experts

    @classmethod
    def of_sequence(
        cls, model: ModelSpec, workload: Workload, grouping: Grouping, tokens_D: Floats, heads_D: Ints
    ) -> LayerShare:
        """Return the work of ranks under sequence parallelism; leading dimensions of the arguments are kept."""
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
        """Return the work of each of ``size`` ranks under tensor parallelism; one rank computes the whole layer."""
        tokens = np.array([float(workload.micro_batch * workload.seq_len)])
        return cls(
            tokens=tokens,
            tokens_at_once=mlp_tokens(workload, np.array([float(workload.seq_len)])),
            rows=tokens * model.num_heads / size,
            kv_rows=tokens * max(model.num_kv_heads / size, 1),
            cut=size,
        )


class LayerMemory(NamedTuple):
    """Bytes that one layer needs on every rank, ``[D]``; if layers are of several kinds, those of the largest layer."""

    input_bytes: Bytes  # input of the layer
    kept_bytes: Bytes  # results of attention that stay for the layer's recomputation; 0 if none stay
    saved_bytes: Bytes  # activations that autograd saves for its backward
    mlp_saved_bytes: Bytes  # the part of `saved_bytes` that the MLP saves
    mlp_grad_bytes: Bytes  # allocated by the backward of the MLP, or by that of the norm before it if that is more
    weight_grad_bytes: Bytes  # gradient of one of the MLP's matrices
    ring_buffers: Bytes  # visiting keys and values, their gradients, partial results
    exchange_buffers: Bytes  # tensors packed for the all-to-all
    all_layers_saved_bytes: Bytes  # activations that autograd saves for the backward of all layers of the model

    @property
    def recomputed_bytes(self) -> Bytes:
        """Bytes that a recomputation allocates of `saved_bytes`: all but the results of attention that have stayed."""
        return self.saved_bytes - self.kept_bytes

    def mapped(self, function: Callable[[Bytes], float]) -> LayerMemory:
        """Reduce every field from its values on all ranks to one number, such as the largest."""
        return LayerMemory(*map(function, self))


def layer_memory(model: ModelSpec, workload: Workload, share: LayerShare) -> LayerMemory:
    """Return the bytes that autograd saves for a decoder layer of transformers, and those that its backward allocates.

    What the forward saves:

        each of two norms   its input in fp32, the normalized tokens, and its output; other norms: `SavedTensors`
        norms of heads      the same of queries and keys, without the output
        attention           q, k, v, its output and its log-sum-exp; in a ring also the KV block that visited last
        output projection   its input, if an all-to-all has copied it
        gated MLP           gate, activated gate, up, and the product of the latter two
        plain MLP           input and output of its activation
        experts             also their inputs and outputs, once for each expert that a token uses; some routers keep
                            their input in fp32
        divided experts     the same where the expert is, of its share of all ranks' tokens; where the token is, the
                            results that came back
        tiled MLP           its input alone, which is the output of its norm
        kept attention      (until a recomputation) attention's output and log-sum-exp, and the KV block that visited
                            last; if an all-to-all has copied them, also q, k, v and the output before and after it
        frozen weights      no normalized tokens, since no gradient needs them
        adapter             its narrow tokens and the input of its matmul, which frozen weights do not need
        tensor group        of norms and of the layer's input the rank's part of the tokens, but outputs of norms of all
                            tokens, which matmuls need

    The backward of an MLP allocates gradients of its inner activations and of one of its matrices; if tiled, gradients
    of all its matrices. The backward of the norm before the MLP has `_NORM_COPIES` copies of the tokens in fp32.

        ring_buffers       two visiting KV blocks, two fp32 dK/dV blocks, fp32 partial results; with bf16 messages one
                           fp32 block that is computed, a bf16 one that is sent and another that is received, as much
        exchange_buffers   packed q, k, v of the all-to-all, or the inputs of a scan
    """
    element, hidden, head_dim = workload.element_bytes, model.hidden_size, model.head_dim
    tokens = share.tokens
    with_experts = token = _token_bytes(model, workload, share.cut)
    if model.dense_layers:
        dense = _token_bytes(model.dense, workload, share.cut)
        token = max(with_experts, dense, key=lambda kind: kind.mlp_saved)  # the larger kind of layer
    projection_input = element * model.num_heads / share.cut * model.value_dim * share.copied
    qkv_and_output = element * head_dim * (2 * share.rows + 2 * share.kv_rows + 2 * share.visited)
    log_sum_exp = WIDE * share.rows
    projections = token.projections + token.fused_projection * (1 - share.copied)
    attention_tokens = tokens * (token.norm + token.mlp_saved + projection_input + projections + 4 * token.adapter)
    if model.latent is not None:  # norms of the narrow vectors
        narrow = model.latent.query_rank + model.latent.kv_rank
        attention_tokens = attention_tokens + tokens * narrow * token.norm / hidden
    attention_layer = attention_tokens + (qkv_and_output + log_sum_exp)
    moved: Bytes = 0.0  # bytes of a layer with experts that tokens of other ranks add, and own tokens do not need here
    if share.experts is not None:
        moved = _moved_expert_bytes(model, workload, share, with_experts)
        attention_layer = attention_layer + moved
    kept: Bytes = 0.0
    if workload.keeps_attention:
        exchanged = element * head_dim * (share.rows + 2 * share.kv_rows + tokens * model.num_heads / share.cut)
        received = element * head_dim * 2 * share.visited
        kept = element * head_dim * share.rows + received + log_sum_exp + exchanged * share.copied
    recurrent_layer = tokens * (token.norm + token.post_norm + token.mlp_saved + _recurrent_bytes(model, element))
    mlp_saved = tokens * token.mlp_saved + moved
    if share.residual_cut > 1:
        # Of the norms before and after a mixer or an MLP; outputs of the first, which matmuls read, are whole.
        of_norms = token.norm - element * hidden + token.post_norm
        on_other_ranks = tokens * (1 - 1 / share.residual_cut) * of_norms
        attention_layer, mlp_saved = attention_layer - 2 * on_other_ranks, mlp_saved - on_other_ranks
    saved, all_layers_saved = _largest_and_all(model, attention_layer, recurrent_layer, mlp_saved)
    if model.dense_layers:  # so far all layers count as the larger kind
        less_with_experts = (model.num_mlps - model.dense_layers) * (token.mlp_saved - with_experts.mlp_saved)
        less_dense = model.dense_layers * (token.mlp_saved - dense.mlp_saved)
        all_layers_saved = all_layers_saved - tokens * (less_with_experts + less_dense) - model.dense_layers * moved

    weight_grad: Bytes = 0.0
    if not token.adapter:
        weight_grad = element * hidden * model.mlp_size * max(model.num_experts, 1) / share.cut
    if share.experts is not None:
        weight_grad = weight_grad * share.experts
    if workload.tiled_mlp:
        mlp_grad = _tiled_mlp_grad_bytes(model, workload, share, token, weight_grad)
    else:
        width_tokens = tokens if share.experts is None else share.experts * share.expert_tokens
        inner_grads = element * (width_tokens * 2 * token.mlp_width + tokens * hidden)
        mlp_grad = inner_grads + np.maximum(width_tokens * token.routed, weight_grad)
    of_norm = tokens / share.residual_cut * (norm_backward_bytes(model, workload) + element * hidden) - mlp_saved
    mlp_grad = np.maximum(mlp_grad, of_norm)

    kv_blocks = 4 * (element + WIDE) * share.visiting
    partial_results = WIDE * share.rows
    packed = element * (model.num_heads + 2 * model.num_kv_heads) * head_dim * share.copied
    return LayerMemory(
        input_bytes=element * tokens * hidden / share.residual_cut,
        kept_bytes=kept,
        saved_bytes=saved,
        mlp_saved_bytes=mlp_saved,
        mlp_grad_bytes=mlp_grad,
        weight_grad_bytes=weight_grad,
        ring_buffers=head_dim * (kv_blocks + partial_results) * share.in_ring,
        exchange_buffers=tokens * np.maximum(packed, _scan_bytes(model, element)),
        all_layers_saved_bytes=all_layers_saved,
    )


class _TokenBytes(NamedTuple):
    """Bytes that parts of a layer save per token, on a rank that holds 1 / ``cut`` of the MLP's columns."""

    norm: float  # one norm before a matmul
    post_norm: float  # one norm of an output; 0 without such norms
    projections: float  # norms of queries, keys and attention's output
    fused_projection: float  # queries and keys that stay in one projection with the values, unless these are copied
    inner: float  # inside the MLP, inputs and outputs of experts included
    routed: float  # inputs and outputs of experts alone
    mlp_saved: float  # the MLP and its norms
    adapter: float  # narrow tokens of one adapter; 0 without adapters
    mlp_width: float  # inner width of the MLP on this rank in elements, all experts of a token together


def _token_bytes(model: ModelSpec, workload: Workload, cut: int) -> _TokenBytes:
    """Compute the bytes per token; ``cut`` as in `LayerShare`."""
    element, hidden = workload.element_bytes, model.hidden_size
    mlp_width = (model.mlp_size * max(model.experts_per_token, 1) + model.shared_mlp_size) / cut
    adapter = element * workload.adapter_rank
    num_mlp_matmuls = (3 if model.gated_mlp else 2) * max(model.experts_per_token, 1)
    output = 0 if workload.selective_checkpointing else element  # computed again, and not saved
    norm = (norm_bytes(model, workload) + output) * hidden
    post_norm = norm_bytes(model, workload) * hidden * model.saved.post_norms
    queries_and_keys = (model.num_heads + model.num_kv_heads) * model.head_dim / cut
    head_norms = norm_bytes(model, workload) * queries_and_keys * model.head_norms
    recomputes_activation = workload.selective_checkpointing or workload.fused_kernels
    inner_widths: float
    if recomputes_activation:
        inner_widths = 2 if model.gated_mlp else 1
    else:
        inner_widths = model.saved.mlp_widths or (4 if model.gated_mlp else 2)
    inner = element * inner_widths * mlp_width
    routed = 2 * element * model.experts_per_token * hidden
    inner += routed
    mlp_saved: float = norm + post_norm + _router_bytes(model, workload)
    if not workload.tiled_mlp:
        mlp_saved += inner + num_mlp_matmuls * adapter
    return _TokenBytes(
        norm=norm,
        post_norm=post_norm,
        projections=head_norms + post_norm,
        fused_projection=element * queries_and_keys * model.saved.fused_projection,
        inner=inner,
        routed=routed,
        mlp_saved=mlp_saved,
        adapter=adapter,
        mlp_width=mlp_width,
    )


def _moved_expert_bytes(model: ModelSpec, workload: Workload, share: LayerShare, whole: _TokenBytes) -> Bytes:
    """Return by how many bytes the saved tensors of divided experts differ from those of experts of own tokens alone.

    Args:
        whole: bytes per token of a layer whose experts are computed where the tokens are.
    """
    assert share.experts is not None
    rest = _token_bytes(replace(model, mlp_size=0, experts_per_token=0), workload, share.cut)
    of_experts = whole.mlp_saved - rest.mlp_saved
    results = workload.element_bytes * model.experts_per_token * model.hidden_size
    return share.experts * share.expert_tokens * of_experts - share.tokens * (of_experts - results)


def norm_bytes(model: ModelSpec, workload: Workload) -> int:
    """Return the bytes per element that autograd saves of a norm, without its output: see `SavedTensors`."""
    element = workload.element_bytes
    if workload.selective_checkpointing or model.saved.native_norms:  # its input alone
        return element
    if workload.adapter_rank:  # no gradient needs the normalized tokens of a frozen norm
        return WIDE
    return WIDE + (WIDE if model.saved.wide_norms else element)


def norm_backward_bytes(model: ModelSpec, workload: Workload) -> int:
    """Return the bytes per token that the backward of a norm of all tokens needs, with its input in fp32."""
    if model.saved.native_norms:
        return _NATIVE_NORM_COPIES * workload.element_bytes * model.hidden_size
    return _NORM_COPIES * WIDE * model.hidden_size


def _router_bytes(model: ModelSpec, workload: Workload) -> int:
    """Return the bytes per token that a router in fp32 saves: its scores and, unless it is frozen, its input."""
    if not (model.saved.router_in_fp32 and model.num_experts):
        return 0
    return WIDE * (model.num_experts + (0 if workload.adapter_rank else model.hidden_size))


def _tiled_mlp_grad_bytes(
    model: ModelSpec, workload: Workload, share: LayerShare, token: _TokenBytes, weight_grad: Bytes
) -> Bytes:
    """Return the bytes that the backward of a tiled MLP allocates."""
    element, hidden = workload.element_bytes, model.hidden_size
    inner_of_tile = share.tokens_at_once * (token.inner + element * 2 * token.mlp_width)
    mlp_bytes = inner_of_tile + element * share.tokens * hidden
    # Each matrix has a gradient that is summed over tiles; the gradient of the current tile is one more.
    return mlp_bytes + (4 if model.gated_mlp else 3) * weight_grad


def logit_bytes(model: ModelSpec, workload: Workload, tokens_D: Floats) -> Floats:
    """Return the bytes that the loss needs on every rank, ``[D]``.

    These are the logits of a tile (of all tokens, if the loss is not tiled), their gradient, the fp32 softmax of one
    chunk, and the tensors that the final norm saves. Logits that a tanh limits are there twice.
    """
    tokens = _logit_tokens(workload, tokens_D)
    softmax_bytes = WIDE * np.minimum(tokens, LOSS_CHUNK_TOKENS)  # by element of the vocabulary
    copies = 3 if model.saved.capped_logits else 2
    bytes_per_word = copies * workload.element_bytes * tokens + softmax_bytes
    if workload.logit_bytes is not None:
        bytes_per_word = workload.logit_bytes * tokens
    return np.asarray(model.vocab_size * bytes_per_word + normed_bytes(model, workload, tokens_D))


def head_bytes(model: ModelSpec, workload: Workload, tokens_D: Floats) -> Floats:
    """Return the bytes of the inputs of the head's weight gradient, ``[D]``: gradients of logits, normalized tokens."""
    tokens = _logit_tokens(workload, tokens_D)
    return model.vocab_size * workload.element_bytes * tokens + normed_bytes(model, workload, tokens_D)


def normed_bytes(model: ModelSpec, workload: Workload, tokens_D: Floats) -> Floats:
    """Return the bytes that the final norm saves, and with a tiled loss those of its output's gradient, ``[D]``."""
    output_bytes = 0 if workload.adapter_rank else workload.element_bytes  # a frozen head does not need its input
    saved_bytes = norm_bytes(model, workload) + output_bytes
    gradient_bytes = workload.element_bytes if workload.has_loss_tiles else 0
    return workload.micro_batch * tokens_D * model.hidden_size * (saved_bytes + gradient_bytes)


def _logit_tokens(workload: Workload, tokens_D: Floats) -> Floats:
    """Return the tokens of a micro-batch whose logits are in memory at the same time, ``[D]``.

    Args:
        tokens_D: tokens of one sequence.
    """
    return _tile_tokens(workload, tokens_D, LOGIT_TILE_TOKENS if workload.has_loss_tiles else None)


def mlp_tokens(workload: Workload, tokens_D: Floats) -> Floats:
    """Return the tokens of a micro-batch whose inner MLP activations are in memory at the same time, ``[D]``.

    Args:
        tokens_D: tokens of one sequence.
    """
    return _tile_tokens(workload, tokens_D, MLP_TILE_TOKENS if workload.tiled_mlp else None)


def _tile_tokens(workload: Workload, tokens_D: Floats, default_tile: int | None) -> Floats:
    """Return the tokens of a micro-batch that a rank computes at once, ``[D]``: one tile, or all tokens without tiles.

    All ranks run the same number of tiles, which the rank with most tokens decides. Ranks of 5,000 and 3,000 tokens
    with tiles of 2,048: three tiles on each, of 1,667 and 1,000 tokens.

    Args:
        tokens_D: tokens of one sequence.
        default_tile: tokens of a tile if the workload sets none; None without tiles.
    """
    tokens = workload.micro_batch * tokens_D
    if default_tile is None:
        return tokens
    if workload.tile_tokens is None:
        return np.minimum(tokens, default_tile)
    num_tiles = np.maximum(np.ceil(tokens_D.max(axis=-1, keepdims=True) / workload.tile_tokens), 1)
    return np.asarray(workload.micro_batch * np.ceil(tokens_D / num_tiles))


def _last_visible(grouping: Grouping, length_K: Floats, causal: bool) -> Floats:
    """Return the number of keys that a group's queries see in the last block that visits, the next group's, ``[K]``.

    Under a causal mask in a zigzag layout, a group's positions enclose those of all later groups: it sees all keys of a
    later group and half the keys of an earlier one. In a contiguous layout a group sees earlier groups alone. Only for
    the last group is the next one, group 0, an earlier one.
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
    """Return the bytes of a scan's inputs per token, all heads together; 0 if the model has no scan."""
    layers = model.recurrent
    if layers is None:
        return 0
    per_head, per_key_head = layers.input_bytes(element)
    return per_head * layers.num_heads + per_key_head * layers.num_key_heads


def _recurrent_bytes(model: ModelSpec, element: int) -> int:
    """Return the bytes per token that a linear-attention or SSM layer saves outside norms and MLP; 0 without any.

    These are inputs and outputs of convolution, scan and gated norm. The scan's part is the same before and after the
    Ulysses all-to-all: a rank with a quarter of the tokens scans a quarter of the heads over all tokens. Kernels that
    save more than their inputs and outputs, such as torch's own, take more.
    """
    layers = model.recurrent
    if layers is None:
        return 0
    if layers.conv_width:  # its input and both gates, their product, the convolution's output, and what the gate makes
        return element * 6 * layers.conv_width
    return element * (2 * layers.conv_channels + 3 * layers.inner_size) + _scan_bytes(model, element)


def _largest_and_all(model: ModelSpec, attention: Floats, recurrent: Floats, mlp: Floats) -> tuple[Floats, Floats]:
    """Return the bytes of the largest layer, and of all layers together, ``[D]`` each.

    Args:
        attention: bytes of one attention layer and its MLP.
        recurrent: bytes of one linear-attention or SSM layer and its MLP.
        mlp: the MLP's part, a layer of its own if layers are either a mixer or an MLP.
    """
    layers = model.recurrent
    if layers is None:
        return attention, model.num_layers * attention
    if layers.num_layers_alone:
        attention, recurrent = attention - mlp, recurrent - mlp
        of_mixers = layers.num_attention_layers * attention + layers.num_layers * recurrent
        return np.maximum(np.maximum(attention, recurrent), mlp), of_mixers + layers.num_layers_alone * mlp
    of_all = layers.num_attention_layers * attention + layers.num_layers * recurrent
    some_layer_has_both = layers.num_attention_layers + layers.num_layers > layers.num_model_layers
    if some_layer_has_both:
        return attention + recurrent, of_all
    return np.maximum(attention * bool(layers.num_attention_layers), recurrent), of_all
