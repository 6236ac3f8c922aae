"""Shapes of recurrent layers: the gated delta rule (linear attention), Mamba-2, and gated short convolutions.

The first two have a state of D x P elements per head, which is scanned along the sequence. A gated short convolution
(LFM2) has neither a scan nor heads: a token depends on the few tokens before it.

Dimension key: N heads of the scan, K heads of its keys, D width of a key, P width of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.common.reading import JsonDict


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayers:
    """Shape of one recurrent layer, and the number of layers of each kind; all recurrent layers are alike.

    Qwen3-Next has 48 layers: 36 with the delta rule, 12 with attention.
    """

    num_layers: int  # layers with a recurrence
    num_attention_layers: int  # layers with full attention
    num_model_layers: int  # all layers; a layer may have recurrence and attention (Falcon-H1), or neither
    delta_rule: bool  # True for the gated delta rule, False for Mamba-2
    num_heads: int  # N, heads of the scan
    num_key_heads: int  # K, which divides N: heads of keys and queries; the groups of Mamba-2
    key_dim: int  # D
    head_dim: int  # P
    conv_size: int  # tokens that the short convolution sees
    chunk: int  # tokens that the scan computes at once
    channel_decay: bool = False  # True: one decay per element of a key (Kimi); False: one per head
    gate_rank: int = 0  # rank of the low-rank projections to decay and output gate (Kimi); 0: full projections
    conv_width: int = 0  # channels of a layer that is a gated convolution alone (LFM2); 0 for layers with a scan

    @property
    def num_layers_alone(self) -> int:
        """Number of layers that are an MLP alone. If there are any, the other layers have no MLP (Nemotron-H)."""
        return max(self.num_model_layers - self.num_layers - self.num_attention_layers, 0)

    @property
    def inner_size(self) -> int:
        """Width of the values, and of the output, of all heads: N x P; the channels of a gated convolution."""
        return self.conv_width or self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution before the scan: values, keys and queries of one token, N P + 2 K D."""
        return self.inner_size + 2 * self.num_key_heads * self.key_dim

    @property
    def gates(self) -> int:
        """Number of gates per token and head: two of the delta rule (decay, strength), one of Mamba-2 (dt)."""
        return 2 if self.delta_rule else 1

    def parameters(self, hidden_size: int) -> int:
        """Return the weights of one layer: the projections in, to the output gate and out, and the convolution."""
        if self.conv_width:  # projections to the convolution's input, to a gate before it, to one behind it, and out
            return 4 * hidden_size * self.conv_width + self.conv_width * self.conv_size
        convolution = self.conv_channels * self.conv_size
        output_projection = hidden_size * self.inner_size
        if self.channel_decay:
            input_projection = hidden_size * (self.conv_channels + self.num_heads)
            return input_projection + self._decay_and_gate_parameters(hidden_size) + convolution + output_projection
        input_projection = hidden_size * (self.conv_channels + self.inner_size + self.gates * self.num_heads)
        return input_projection + convolution + output_projection

    def _decay_and_gate_parameters(self, hidden_size: int) -> int:
        """Return the weights of the projections to the decay and to the output gate, each N x P wide."""
        if not self.gate_rank:
            return 2 * hidden_size * self.inner_size
        return 2 * self.gate_rank * (hidden_size + self.inner_size)

    def input_bytes(self, element_bytes: int) -> tuple[int, int]:
        """Return the bytes of a scan's inputs per token: for one head, and for one key head.

        A head has a value, a gate (strength or dt) and a decay; a key head has a query and a key.
        """
        num_decays = self.key_dim if self.channel_decay else int(self.delta_rule)
        decay_bytes = 4 * num_decays  # in fp32
        per_head = (self.head_dim + 1) * element_bytes + decay_bytes  # value, strength (or dt), decay
        per_key_head = 2 * self.key_dim * element_bytes  # query and key
        return per_head, per_key_head

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all heads, each D x P and one decay, in fp32."""
        return 4 * self.num_heads * (self.head_dim * self.key_dim + 1)

    @property
    def scan_flops(self) -> float:
        """Forward FLOPs of the scan per token and head, computed in chunks of C tokens.

        The delta rule: scores of keys and of queries with the chunk's keys, two triangular systems, the weighted sum of
        the chunk's values, three matmuls with the state (arXiv:2406.06484, section 3.2; with decay arXiv:2412.06464,
        section 3.3). Decays by channel are multiplied into keys and queries and add no matmul (arXiv:2510.26692).
        Mamba-2: scores, the weighted sum, a write and a read of the state (arXiv:2405.21060, section 6).
        """
        chunk, key_dim, value_dim = float(self.chunk), self.key_dim, self.head_dim
        state_matmul = 2 * key_dim * value_dim
        scores = 2 * chunk * key_dim
        value_sum = 2 * chunk * value_dim
        if self.delta_rule:
            triangular_systems = chunk * (key_dim + value_dim)  # half of C x C multiply-adds per column
            return 2 * scores + triangular_systems + value_sum + 3 * state_matmul
        return scores + value_sum + 2 * state_matmul

    def to_config(self) -> JsonDict:
        """Return keys of a config.json from which `read_recurrent_layers` reads equal layers, grouped by kind."""
        # 32 recurrent and 32 attention layers in 32 layers: each of the 32 has both.
        num_with_both = max(self.num_layers + self.num_attention_layers - self.num_model_layers, 0)
        layer_types = [
            *["hybrid"] * num_with_both,
            *["conv" if self.conv_width else "linear_attention"] * (self.num_layers - num_with_both),
            *["full_attention"] * (self.num_attention_layers - num_with_both),
            *["mlp"] * self.num_layers_alone,
        ]
        if self.conv_width:
            return {"layer_types": layer_types, "conv_L_cache": self.conv_size}
        if self.channel_decay:
            return {
                "layer_types": layer_types,
                "linear_num_heads": self.num_heads,
                "linear_head_dim": self.head_dim,
                "linear_conv_kernel_dim": self.conv_size,
                "linear_gate_rank": self.gate_rank,
            }
        if self.delta_rule:
            return {
                "layer_types": layer_types,
                "linear_num_value_heads": self.num_heads,
                "linear_num_key_heads": self.num_key_heads,
                "linear_key_head_dim": self.key_dim,
                "linear_value_head_dim": self.head_dim,
                "linear_conv_kernel_dim": self.conv_size,
            }
        return {
            "layer_types": layer_types,
            "mamba_n_heads": self.num_heads,
            "mamba_n_groups": self.num_key_heads,
            "mamba_d_state": self.key_dim,
            "mamba_d_head": self.head_dim,
            "mamba_d_conv": self.conv_size,
            "mamba_chunk_size": self.chunk,
        }
