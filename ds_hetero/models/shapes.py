"""Shapes of decoders, as far as time and memory depend on them.

Shapes of layers that carry a state along the sequence: gated linear attention (gated delta rule) and Mamba-2.

Dimension key: N heads of the scan, K heads of its keys, D width of a key, P width of a value; a state is D x P.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.common.reading import JsonDict


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayers:
    """The layers of a model that carry a state, all alike."""

    num_layers: int  # how many layers of the model hold such a one
    num_attention_layers: int  # how many hold full attention
    num_model_layers: int  # all layers; one may hold both
    delta_rule: bool  # they compute the gated delta rule; else they are Mamba-2
    num_heads: int  # N, heads of the scan
    num_key_heads: int  # K, which divides N: heads of keys and queries, groups of Mamba-2
    key_dim: int  # D
    head_dim: int  # P
    conv_size: int  # tokens that the short convolution sees
    chunk: int  # tokens that the scan computes at once

    @property
    def inner_size(self) -> int:
        """N x P, the width of the values and of the output."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Values, keys and queries of one token, which pass through the convolution."""
        return self.inner_size + 2 * self.num_key_heads * self.key_dim

    @property
    def gates(self) -> int:
        """Numbers per token and head that steer the state: decay and strength of the delta rule, dt of Mamba-2."""
        return 2 if self.delta_rule else 1

    def parameters(self, hidden_size: int) -> int:
        """Weights of one layer: projections in (with the output's gate) and out, and the convolution."""
        wide = self.conv_channels + self.inner_size + self.gates * self.num_heads
        return hidden_size * (wide + self.inner_size) + self.conv_channels * self.conv_size

    def input_bytes(self, element_bytes: int) -> tuple[int, int]:
        """Bytes per token that a scan is given for one head and one key head; the delta rule's decay is in fp32."""
        per_head = (self.head_dim + 1) * element_bytes + (4 if self.delta_rule else 0)
        return per_head, 2 * self.key_dim * element_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of all heads and of how much of the state before it is left, both in fp32."""
        return 4 * self.num_heads * (self.head_dim * self.key_dim + 1)

    @property
    def scan_flops(self) -> float:
        """Forward operations of the scan per token and head.

        Chunks of C tokens. The delta rule: scores of keys and of queries, two triangular systems, the sum over the
        chunk, reads and writes of the state (arXiv:2406.06484, section 3.2; with decay arXiv:2412.06464, section 3.3).
        Mamba-2: scores, the sum over the chunk, the state's write and read (arXiv:2405.21060, section 6).
        """
        inside, state = float(self.chunk), 2 * self.key_dim * self.head_dim
        if self.delta_rule:
            systems = inside * (self.key_dim + self.head_dim)  # a triangle each: half of C x C per column
            return 4 * inside * self.key_dim + systems + 2 * inside * self.head_dim + 3 * state
        return 2 * inside * (self.key_dim + self.head_dim) + 2 * state

    def to_config(self) -> JsonDict:
        """Keys of a config.json from which `ds_hetero.models.configs` makes the same; the order of layers is lost."""
        both = self.num_layers + self.num_attention_layers - self.num_model_layers
        kinds = ["hybrid"] * both + ["linear_attention"] * (self.num_layers - both)
        kinds += ["full_attention"] * (self.num_attention_layers - both)
        if self.delta_rule:
            return {
                "layer_types": kinds,
                "linear_num_value_heads": self.num_heads,
                "linear_num_key_heads": self.num_key_heads,
                "linear_key_head_dim": self.key_dim,
                "linear_value_head_dim": self.head_dim,
                "linear_conv_kernel_dim": self.conv_size,
            }
        return {
            "layer_types": kinds,
            "mamba_n_heads": self.num_heads,
            "mamba_n_groups": self.num_key_heads,
            "mamba_d_state": self.key_dim,
            "mamba_d_head": self.head_dim,
            "mamba_d_conv": self.conv_size,
            "mamba_chunk_size": self.chunk,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer."""

    name: str  # for people
    num_layers: int  # decoder layers, all alike
    hidden_size: int  # width of the residual stream
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides ``num_heads``
    head_dim: int  # width of one head
    mlp_size: int  # width of the MLP (of one expert, where there are experts)
    vocab_size: int  # rows of the embedding
    gated_mlp: bool = False  # three MLP matrices (SwiGLU) instead of two
    tied_embeddings: bool = False  # embedding and head are one matrix
    num_experts: int = 0  # experts per layer, 0 for a dense MLP
    experts_per_token: int = 0  # how many of them each token uses
    shared_mlp_size: int = 0  # width of an MLP that every token passes beside the experts, 0 for none
    gated_attention: bool = False  # attention has a gate of its output's width
    head_norms: bool = False  # queries and keys are normalized, RMSNorm over each head or all of them
    recurrent: RecurrentLayers | None = None  # layers that carry a state, beside attention or in its place

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_layers(self) -> int:
        """Layers that hold attention."""
        return self.num_layers if self.recurrent is None else self.recurrent.num_attention_layers

    @property
    def attention_parameters(self) -> int:
        """Weights of the four projections of one layer, and of its gate."""
        query_widths = 3 if self.gated_attention else 2
        return self.hidden_size * self.head_dim * (query_widths * self.num_heads + 2 * self.num_kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Weights of one MLP or of one expert."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.mlp_size

    @property
    def active_mlp_parameters(self) -> int:
        """Weights of one layer's MLP or experts that one token is multiplied with, their router included."""
        router = self.hidden_size * self.num_experts
        return max(self.experts_per_token, 1) * self.mlp_parameters + router + self._shared_parameters

    @property
    def mixer_parameters(self) -> int:
        """Weights of one layer's attention or recurrence; the mean of all layers where there are both."""
        if self.recurrent is None:
            return self.attention_parameters
        recurrence = self.recurrent.num_layers * self.recurrent.parameters(self.hidden_size)
        return (self.attention_layers * self.attention_parameters + recurrence) // self.num_layers

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: its mixer, all experts, their router and two norms."""
        experts = max(self.num_experts, 1) * self.mlp_parameters
        router = self.hidden_size * self.num_experts
        return self.mixer_parameters + experts + router + self._shared_parameters + 2 * self.hidden_size

    @property
    def active_layer_parameters(self) -> int:
        """Weights of one layer that one token is multiplied with."""
        return self.mixer_parameters + self.active_mlp_parameters

    @property
    def _shared_parameters(self) -> int:
        """Weights of the MLP beside the experts, and of the gate before it."""
        widths = 3 if self.gated_mlp else 2
        return self.hidden_size * (widths * self.shared_mlp_size + bool(self.shared_mlp_size))

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding and the head, once if they are tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        """All weights."""
        return self.num_layers * self.layer_parameters + self.embedding_parameters + self.hidden_size
