"""Operations and bytes of one transformer layer, per token: numbers in, numbers out.

Every count is for one sequence; multiply by the micro-batch. Backward is counted apart from forward.

Dimension key: D ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster, Efficiency
from ds_hetero.common.arrays import Bools, Floats
from ds_hetero.cost.workload import Workload
from ds_hetero.models.configs import adapter_widths
from ds_hetero.models.shapes import ModelSpec

# Per query token x key token x head x head_dim, no causal discount. QK^T and PV are two products forward; backward
# computes the scores again and dV, dP, dQ, dK: five products (FlashAttention-2, arXiv:2307.08691, section 3.1.2).
# HexiSeq's Eq. 7 counts 16 in all: 4 forward, 4 recomputed and 8 backward.
ATTENTION_FORWARD_FLOPS = 4
ATTENTION_BACKWARD_FLOPS = 10

ADAPTER_INPUT_ELEMENTS, ADAPTER_OUTPUT_ELEMENTS = 4, 5

COPY_SHARE = 0.9  # of a card's bandwidth that copies reach; a profile has measured them


class _Kernels(NamedTuple):
    """Elements that transformers' layers move in one pass where every operation is a kernel, in elements of 16 bits.

    Counted in the real code (python -m benchmarks.fake_gpu.played record) of Llama and Qwen3 of 1B to 8B.
    """

    norm: float  # RMSNorm, in fp32, of each of its elements
    activation: float  # gate, and product of both, of each of the MLP's width
    rotary: float  # of each element of q and k
    beside: float  # residual additions and sums of gradients, of each of the hidden size


EAGER = {False: _Kernels(18, 5, 12.4, 6), True: _Kernels(50.5, 9, 12, 20)}  # forward, backward

MATMUL_BACKWARD = 2  # gradients of the input and of the weight, as many operations each as the forward product


def matmul_flops(model: ModelSpec) -> float:
    """Forward operations of all products of an attention layer with weights, per token: two per weight it meets.

    With the 4H-wide MLP of GPT this is 24 H^2, a third of HexiSeq's Eq. 5 (72 H^2, forward and backward).
    """
    return 2 * (model.attention_parameters + _mlps_per_mixer(model) * model.active_mlp_parameters)


def recurrent_matmul_flops(model: ModelSpec) -> float:
    """The same of a layer that carries a state; its scan is counted apart, see `RecurrentLayers.scan_flops`."""
    assert model.recurrent is not None
    mlp = _mlps_per_mixer(model) * model.active_mlp_parameters
    return 2 * (model.recurrent.parameters(model.hidden_size) + mlp)


def adapter_flops(model: ModelSpec, rank: int) -> float:
    """Forward operations of a layer's adapters, per token; twice that backward."""
    into, out = adapter_widths(model, experts=max(model.experts_per_token, 1))
    return 2 * rank * (into + out)


def adapter_elements(model: ModelSpec, rank: int) -> float:
    """Elements that adapters read and write forward, per token; as many backward.

    Of every product's input a dropout and a cast (two reads, two writes), of its output a scaling and an addition to
    the frozen product's (three reads, two writes), as in PEFT's ``Linear.forward``.
    """
    into, out = adapter_widths(model, experts=max(model.experts_per_token, 1))
    return float(ADAPTER_INPUT_ELEMENTS * into + ADAPTER_OUTPUT_ELEMENTS * out) if rank else 0.0


def mlp_flops(model: ModelSpec) -> float:
    """The part of `matmul_flops` that is the MLP's, which tiles of it compute again in the backward."""
    return 2 * _mlps_per_mixer(model) * model.active_mlp_parameters


def last_product_flops(model: ModelSpec) -> float:
    """The part of it that is the last product of a dense layer's MLP; 0 of experts, which end otherwise."""
    return 0.0 if model.num_experts else 2 * _mlps_per_mixer(model) * model.mlp_size * model.hidden_size


def _mlps_per_mixer(model: ModelSpec) -> float:
    """MLPs that come to one attention or recurrence: half a one where a layer holds both."""
    if model.recurrent is None:
        return 1
    return model.num_layers / (model.recurrent.num_layers + model.recurrent.num_attention_layers)


def elementwise_elements(model: ModelSpec, cut: int = 1) -> float:
    """Elements that memory-bound kernels of an attention layer read and write forward, per token; twice that backward.

    Two norms (read, write), two residual additions (two reads, one write), rotary embedding of q and k (read, write)
    and the activation (read and write the MLP's width; read it twice if gated). HexiSeq's Eq. 4 counts 20 H with the
    operands of the products in it, which here belong to the products' own efficiency. Ranks that ``cut`` a layer by
    heads and columns cut rotary embedding and activation too, and each computes norms and residuals.
    """
    rotary = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim / cut
    return rotary + _mlps_per_mixer(model) * (10 * model.hidden_size + _activation_elements(model) / cut)


def eager_elements(model: ModelSpec, *, backward: bool, cut: int = 1) -> float:
    """The same of one pass of a model with a gated MLP and RMSNorm as transformers runs it, kernel by kernel."""
    kernels, qk = EAGER[backward], (model.num_heads + model.num_kv_heads) * model.head_dim / cut
    heads = (kernels.rotary + kernels.norm * model.head_norms) * qk
    beside = (2 * kernels.norm + kernels.beside) * model.hidden_size
    return heads + _mlps_per_mixer(model) * (beside + kernels.activation * _mlp_width(model) / cut)


def recomputed_elements(model: ModelSpec, workload: Workload) -> float:
    """Elements of norms and activations that selective recomputation, or Liger's MLP, computes again, per token."""
    if workload.selective_checkpointing:
        return 4 * model.hidden_size + _activation_elements(model)
    return float(_activation_elements(model)) if workload.fused_kernels else 0.0


def recurrent_elements(model: ModelSpec) -> float:
    """The same of a layer that carries a state: its convolution and the gated norm of its output in place of rotary."""
    layers = model.recurrent
    assert layers is not None
    beside = 10 * model.hidden_size + _activation_elements(model)
    return 2 * layers.conv_channels + 3 * layers.inner_size + _mlps_per_mixer(model) * beside


def _activation_elements(model: ModelSpec) -> int:
    """Elements that the activation of the MLP reads and writes."""
    return (3 if model.gated_mlp else 2) * _mlp_width(model)


def _mlp_width(model: ModelSpec) -> int:
    """Inner width of all MLPs that a token passes in a layer."""
    return model.mlp_size * max(model.experts_per_token, 1) + model.shared_mlp_size


def logit_flops(model: ModelSpec, *, tiled: bool, frozen: bool = False) -> int:
    """Operations of the head, forward (twice in tiles) and backward, per token; a frozen one has no weight gradient."""
    return 2 * model.hidden_size * model.vocab_size * ((4 if tiled else 3) - frozen)


def logit_elements(model: ModelSpec) -> int:
    """fp32 elements that the loss reads and writes per token: logits, their softmax and its gradient, twice each."""
    return 6 * model.vocab_size


def training_flops(model: ModelSpec, seq_len: int, *, causal: bool) -> float:
    """Operations that a training needs per token, for MFU (PaLM, arXiv:2204.02311, appendix B): nothing computed twice.

    Three times the forward of all products and of attention, of whose scores a causal mask needs half. Scans of
    recurrent layers are left out.
    """
    scores = (0.5 if causal else 1.0) * seq_len * model.num_heads * model.head_dim
    attention = model.attention_layers * (matmul_flops(model) + ATTENTION_FORWARD_FLOPS * scores)
    recurrent = 0.0 if model.recurrent is None else model.recurrent.num_layers * recurrent_matmul_flops(model)
    return 3 * (attention + recurrent + 2 * model.hidden_size * model.vocab_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class AchievedRates:
    """Achieved rates of every rank, ``[D]``; see `Efficiency` for the meaning of the half-sizes."""

    s_per_flop: Floats  # seconds per operation of a large matrix product
    half_tokens: Floats  # tokens at which a matrix product runs at half of that rate
    memory_s_per_byte: Floats  # seconds per byte that a memory-bound kernel reads or writes
    copy_s_per_byte: Floats  # of kernels that are counted one by one; the same where a profile measured them together
    is_profiled: Bools  # whether the kernels of a layer were measured together, `elementwise_elements` their measure
    layer_host_s: Floats  # least time of one layer's forward, that of the host to launch it
    kernel_overhead_s: Floats  # host and launch time of one layer's forward outside attention
    attention_flops_per_s: dict[str, Floats]  # operations per second of attention, by the name of the pass
    half_rows: Floats  # query rows at which attention runs at half of that rate
    half_kv: Floats  # key tokens at which attention runs at half of that rate
    edge_keys: Floats  # keys per query that a causal square costs beyond its half; zero for full attention
    attention_overhead_s: Floats  # host and launch time of one attention block

    @classmethod
    def of(cls, cluster: Cluster, *, causal: bool, head_dim: int) -> AchievedRates:
        """The rates of a cluster's devices for causal or full attention and heads of a width."""
        share = {
            field.name: np.array([getattr(device.efficiency, field.name) for device in cluster.devices])
            for field in fields(Efficiency)
        }
        is_profiled = np.array([device.efficiency.is_profiled for device in cluster.devices])
        memory_s_per_byte = 1 / (cluster.memory_bytes_per_s * share["memory"])
        copy_s_per_byte = 1 / (COPY_SHARE * cluster.memory_bytes_per_s)
        return cls(
            s_per_flop=1 / (cluster.peak_flops_per_s * share["matmul"]),
            half_tokens=share["matmul_half_tokens"],
            memory_s_per_byte=memory_s_per_byte,
            copy_s_per_byte=np.where(is_profiled, memory_s_per_byte, copy_s_per_byte),
            is_profiled=is_profiled,
            layer_host_s=share["layer_host_s"],
            kernel_overhead_s=share["kernel_overhead_s"],
            attention_flops_per_s={
                name: cluster.peak_flops_per_s * [each.attention_share(name, head_dim) for each in cluster.devices]
                for name in ("forward", "backward")
            },
            half_rows=share["attention_half_rows"],
            half_kv=share["attention_half_kv"],
            edge_keys=share["attention_edge_keys"] if causal else np.zeros(cluster.num_ranks),
            attention_overhead_s=share["attention_overhead_s"],
        )
