"""Shapes of decoder-only transformers, as far as time and memory depend on them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer.

    Args:
        num_heads: query heads; num_kv_heads: key/value heads, a divisor of it.
        mlp_size: width of the MLP (of one expert, where there are experts).
        gated_mlp: three MLP matrices (SwiGLU) instead of two.
        num_experts: experts per layer, 0 for a dense MLP; experts_per_token of them are used by each token.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    gated_mlp: bool = False
    tied_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def attention_parameters(self) -> int:
        """Weights of the four projections of one layer."""
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Weights of one MLP or of one expert."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.mlp_size

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: projections, all experts, their router and two norms."""
        router = self.hidden_size * self.num_experts
        return self.attention_parameters + max(self.num_experts, 1) * self.mlp_parameters + router + 2 * self.hidden_size

    @property
    def active_layer_parameters(self) -> int:
        """Weights of one layer that one token is multiplied with."""
        router = self.hidden_size * self.num_experts
        return self.attention_parameters + max(self.experts_per_token, 1) * self.mlp_parameters + router

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding and the head, once if they are tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        """All weights."""
        return self.num_layers * self.layer_parameters + self.embedding_parameters + self.hidden_size
