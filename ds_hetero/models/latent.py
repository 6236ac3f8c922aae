"""Shapes of multi-head latent attention: one narrow vector per token, projected up to keys and values of all heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Widths of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A query or key of one head has ``ModelSpec.head_dim`` elements, of which ``rope_dim`` are rotated. The rotated
    elements of a key are the same for all heads. DeepSeek-V3: 192 elements, 64 of them rotated, and values of 128.
    """

    query_rank: int  # width of the vector that is projected to queries; 0 if the hidden state is projected to them
    kv_rank: int  # width of the vector that is projected to keys and values
    rope_dim: int  # rotated elements of a query and of a key
    value_dim: int  # elements of a value; at most those of a query

    def parameters(self, hidden_size: int, num_heads: int, head_dim: int) -> int:
        """Return the weights of one layer: projections down and up, their norms, and the output projection."""
        queries = (self.query_rank or hidden_size) * num_heads * head_dim
        keys_and_values = self.kv_rank * num_heads * (head_dim - self.rope_dim + self.value_dim)
        down = hidden_size * (self.query_rank + self.kv_rank + self.rope_dim)
        norms = self.query_rank + self.kv_rank
        return queries + keys_and_values + down + norms + num_heads * self.value_dim * hidden_size
