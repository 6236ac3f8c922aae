"""FLOPs and memory traffic of one transformer layer, per token.

Every count is for one sequence; multiply by the micro-batch. Backward is counted apart from forward. A mixer is an
attention or a recurrence. A model whose layers have both has more mixers than MLPs, so each mixer's count includes
only its fraction of an MLP (`_mlps_per_mixer`).
"""

from __future__ import annotations

from typing import NamedTuple

from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.models.trained_weights import adapter_widths

# Per query token x key token x head x head_dim, no causal discount. QK^T and PV are two matmuls forward; backward
# computes the scores again and dV, dP, dQ, dK: five matmuls (FlashAttention-2, arXiv:2307.08691, section 3.1.2).
# HexiSeq's Eq. 7 counts 16 in all: 4 forward, 4 recomputed and 8 backward.
ATTENTION_FORWARD_FLOPS = 4
ATTENTION_BACKWARD_FLOPS = 10

ADAPTER_INPUT_ELEMENTS, ADAPTER_OUTPUT_ELEMENTS = 4, 5  # see `adapter_elements`


class _Kernels(NamedTuple):
    """16-bit elements that one eager pass of transformers' layers reads and writes, per element of the tensor.

    Counted by running the real code of Llama and Qwen3 of 1B to 8B: python -m benchmarks.fake_gpu.played record.
    """

    norm: float  # RMSNorm, which computes in fp32, per element of its input
    activation: float  # activation of the gate and product with up, per element of the MLP's width
    rotary: float  # rotary embedding, per element of q and k
    residual: float  # residual additions and sums of gradients, per element of the hidden size


EAGER_FORWARD = _Kernels(norm=18, activation=5, rotary=12.4, residual=6)
EAGER_BACKWARD = _Kernels(norm=50.5, activation=9, rotary=12, residual=20)

MATMUL_BACKWARD = 2  # gradients of the input and of the weight, as many FLOPs each as the forward matmul


def visible_share(model: ModelSpec, seq_len: int) -> float:
    """Share of causal attention's query-key pairs that sliding windows leave; the mean over attention layers.

    A query sees ``window`` keys, and the first queries fewer: w L - w^2 / 2 pairs instead of L^2 / 2. Only FLOPs are
    multiplied by this share: keys and values that travel around a ring count in full.
    """
    if not model.window_layers:
        return 1.0
    seen = min(model.window / seq_len, 1.0)
    of_windows = model.window_layers / model.attention_layers
    return 1 - of_windows * (1 - seen) ** 2


def matmul_flops(model: ModelSpec) -> float:
    """Forward FLOPs per token of the matmuls with weights of one layer, attention and MLP: two per weight.

    With the 4H-wide MLP of GPT this is 24 H^2, a third of HexiSeq's Eq. 5 (72 H^2, forward and backward).
    """
    return 2 * (model.attention_parameters + _mlps_per_mixer(model) * model.active_mlp_parameters)


def recurrent_matmul_flops(model: ModelSpec) -> float:
    """`matmul_flops` of a linear-attention or SSM layer, without its scan: see `RecurrentLayers.scan_flops`."""
    assert model.recurrent is not None
    mlp = _mlps_per_mixer(model) * model.active_mlp_parameters
    return 2 * (model.recurrent.parameters(model.hidden_size) + mlp)


def adapter_flops(model: ModelSpec, rank: int) -> float:
    """Forward FLOPs of a layer's adapters, per token; twice that backward."""
    into, out = adapter_widths(model, experts=max(model.experts_per_token, 1))
    return 2 * rank * (into + out)


def adapter_elements(model: ModelSpec, rank: int) -> float:
    """Elements that a layer's adapters read and write forward, per token; as many backward. 0 for ``rank`` 0.

    PEFT's ``Linear.forward`` applies dropout and a cast to the input of every matmul (two reads, two writes), and a
    scaling and an addition to its output (three reads, two writes).
    """
    into, out = adapter_widths(model, experts=max(model.experts_per_token, 1))
    return float(ADAPTER_INPUT_ELEMENTS * into + ADAPTER_OUTPUT_ELEMENTS * out) if rank else 0.0


def mlp_flops(model: ModelSpec) -> float:
    """The MLP's part of `matmul_flops`, which a tiled MLP computes again in the backward."""
    return 2 * _mlps_per_mixer(model) * model.active_mlp_parameters


def down_projection_flops(model: ModelSpec) -> float:
    """FLOPs of the last matmul of a dense MLP, a part of `mlp_flops`; 0 for experts, which end with a weighted sum."""
    return 0.0 if model.num_experts else 2 * _mlps_per_mixer(model) * model.mlp_size * model.hidden_size


def _mlps_per_mixer(model: ModelSpec) -> float:
    """MLPs per mixer: 0.5 if every layer has both an attention and a recurrence."""
    if model.recurrent is None:
        return 1
    return model.num_mlps / (model.recurrent.num_layers + model.recurrent.num_attention_layers)


def elementwise_elements(model: ModelSpec, cut: int = 1) -> float:
    """Elements that memory-bound kernels of an attention layer read and write forward, per token; twice that backward.

    Two norms (read, write), two residual additions (two reads, one write), rotary embedding of q and k (read, write)
    and the activation (read and write the MLP's width; read it twice if gated). HexiSeq's Eq. 4 counts 20 H, which
    includes the operands of matmuls; here the efficiency of a matmul covers these.

    Args:
        cut: ranks of tensor parallelism. They share rotary embedding and activation; each computes norms and residuals.
    """
    rotary = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim / cut
    return rotary + _mlps_per_mixer(model) * (10 * model.hidden_size + _activation_elements(model) / cut)


def eager_elements(model: ModelSpec, *, backward: bool, cut: int = 1) -> float:
    """`elementwise_elements` of one eager pass, in which transformers runs every operation as a kernel of its own."""
    kernels = EAGER_BACKWARD if backward else EAGER_FORWARD
    qk_width = (model.num_heads + model.num_kv_heads) * model.head_dim / cut
    qk = (kernels.rotary + kernels.norm * model.head_norms) * qk_width
    norms_and_residuals = (2 * kernels.norm + kernels.residual) * model.hidden_size
    activation = kernels.activation * _mlp_width(model) / cut
    return qk + _mlps_per_mixer(model) * (norms_and_residuals + activation)


def recomputed_elements(model: ModelSpec, workload: Workload) -> float:
    """Elements per token that memory-bound kernels read and write in the backward to recompute parts of a layer.

    Liger's MLP recomputes its activation, selective checkpointing the activation and both norms; else 0.
    """
    if workload.selective_checkpointing:
        return 4 * model.hidden_size + _activation_elements(model)
    return float(_activation_elements(model)) if workload.fused_kernels else 0.0


def recurrent_elements(model: ModelSpec) -> float:
    """`elementwise_elements` of a linear-attention or SSM layer: convolution and gated norm in place of rotary."""
    layers = model.recurrent
    assert layers is not None
    norms_residuals_and_activation = 10 * model.hidden_size + _activation_elements(model)
    convolution_and_gate = 2 * layers.conv_channels + 3 * layers.inner_size
    return convolution_and_gate + _mlps_per_mixer(model) * norms_residuals_and_activation


def _activation_elements(model: ModelSpec) -> float:
    """Elements that the activation of the MLP reads and writes, per token."""
    return (3 if model.gated_mlp else 2) * _mlp_width(model)


def _mlp_width(model: ModelSpec) -> float:
    """Inner width of the MLP in elements; with experts, of all experts that one token uses.

    The mean of all MLPs where some layers have no experts.
    """
    width = model.mlp_size * max(model.experts_per_token, 1) + model.shared_mlp_size
    if not model.dense_layers:
        return width
    with_experts = model.num_mlps - model.dense_layers
    return (with_experts * width + model.dense_layers * model.dense_mlp_size) / model.num_mlps


def logit_flops(model: ModelSpec, *, tiled: bool, frozen: bool = False) -> int:
    """FLOPs of the head per token: forward, again if tiled, and backward, which has no weight gradient if frozen."""
    passes = (4 if tiled else 3) - frozen
    return 2 * model.hidden_size * model.vocab_size * passes


def logit_elements(model: ModelSpec) -> int:
    """fp32 elements that the loss reads and writes per token: logits, their softmax and its gradient, twice each."""
    return 6 * model.vocab_size


def training_flops(model: ModelSpec, seq_len: int, *, causal: bool) -> float:
    """FLOPs of training per token, as MFU counts them (PaLM, arXiv:2204.02311, appendix B): without recomputation.

    This is three times the forward of all matmuls and of attention. A causal mask needs half of attention's scores, and
    a window its band. Scans of linear-attention and SSM layers are left out.
    """
    pairs = (0.5 * visible_share(model, seq_len) if causal else 1.0) * seq_len
    scores = pairs * model.num_heads * (model.head_dim + model.value_dim) / 2
    attention = model.attention_layers * (matmul_flops(model) + ATTENTION_FORWARD_FLOPS * scores)
    recurrent = 0.0 if model.recurrent is None else model.recurrent.num_layers * recurrent_matmul_flops(model)
    return 3 * (attention + recurrent + 2 * model.hidden_size * model.vocab_size)
