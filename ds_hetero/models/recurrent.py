"""Shapes of recurrent layers: the gated delta rule (linear attention) and Mamba-2.

Dimension key: N heads of the scan, K heads of its keys, D width of a key, P width of a value; a state is D x P.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.common.reading import JsonDict


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayers:
    """Recurrent layers of a model, all alike."""

    num_layers: int  # layers with a recurrence
    num_attention_layers: int  # layers with full attention
    num_model_layers: int  # all layers; a layer may have both
    delta_rule: bool  # True for the gated delta rule, False for Mamba-2
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
        """Gates per token and head: decay and strength for the delta rule, dt for Mamba-2."""
        return 2 if self.delta_rule else 1

    def parameters(self, hidden_size: int) -> int:
        """Weights of one layer: projections in (with the output's gate) and out, and the convolution."""
        wide = self.conv_channels + self.inner_size + self.gates * self.num_heads
        return hidden_size * (wide + self.inner_size) + self.conv_channels * self.conv_size

    def input_bytes(self, element_bytes: int) -> tuple[int, int]:
        """Input bytes of a scan per token: for one head, and for one key head."""
        decay_bytes = 4 if self.delta_rule else 0  # in fp32
        per_head = (self.head_dim + 1) * element_bytes + decay_bytes
        per_key_head = 2 * self.key_dim * element_bytes
        return per_head, per_key_head

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all heads and of their decay, both in fp32."""
        return 4 * self.num_heads * (self.head_dim * self.key_dim + 1)

    @property
    def scan_flops(self) -> float:
        """Forward FLOPs of the scan per token and head.

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
        """Return keys of a config.json from which `recurrent_layers_of` reads equal layers; their order is lost."""
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
