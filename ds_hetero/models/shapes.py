"""Shapes of decoders, as far as time and memory depend on them."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.models.recurrent_layers import RecurrentLayers


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer.

    Args:
        name: for people.
        num_layers: decoder layers, all alike.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides ``num_heads``.
        head_dim: width of one head.
        mlp_size: width of the MLP (of one expert, where there are experts).
        vocab_size: rows of the embedding.
        gated_mlp: three MLP matrices (SwiGLU) instead of two.
        tied_embeddings: embedding and head are one matrix.
        num_experts: experts per layer, 0 for a dense MLP.
        experts_per_token: how many of them each token uses.
        shared_mlp_size: width of an MLP that every token passes beside the experts, 0 for none.
        gated_attention: attention has a gate of its output's width.
        recurrent: layers that carry a state, in the place of attention or beside it; None where there are none.
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
    shared_mlp_size: int = 0
    gated_attention: bool = False
    recurrent: RecurrentLayers | None = None

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


@dataclass(frozen=True, slots=True)
class ModelSlice:
    """Consecutive layers of a model, and what of its ends comes with them.

    Args:
        model: the whole.
        layers: decoder layers.
        has_embedding: the slice begins with the first layer, so it holds the embedding.
        has_head: the slice ends with the last layer, so it holds the last norm and the head.
    """

    model: ModelSpec
    layers: int
    has_embedding: bool
    has_head: bool

    @classmethod
    def of(cls, model: ModelSpec, start: int, stop: int) -> ModelSlice:
        """Return the slice of decoder layers ``[start, stop)``."""
        return cls(model, stop - start, start == 0, stop == model.num_layers)

    @property
    def num_parameters(self) -> int:
        """Weights; a tied embedding counts where the slice holds either end, once if it holds both."""
        table = self.model.vocab_size * self.model.hidden_size
        tables = self.has_embedding + self.has_head
        if self.model.tied_embeddings:
            tables = min(tables, 1)
        return self.layers * self.model.layer_parameters + tables * table + self.has_head * self.model.hidden_size

    def matmul_flops(self, tokens: int) -> int:
        """Forward operations of all products with weights, the head included, for ``tokens`` tokens."""
        head = self.has_head * self.model.vocab_size * self.model.hidden_size
        return 2 * tokens * (self.layers * self.model.active_layer_parameters + head)
