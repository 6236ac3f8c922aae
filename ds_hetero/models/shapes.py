"""Shape of a decoder, as far as time and memory depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.models.recurrent import RecurrentLayers


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
    recurrent: RecurrentLayers | None = None  # recurrent layers, beside attention or in its place

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
