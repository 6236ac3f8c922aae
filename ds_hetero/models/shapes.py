"""Shape of a decoder: the sizes that its time and memory depend on, and counts of weights that follow from them.

A mixer is the part of a layer that mixes tokens: attention or a recurrence. The other part is an MLP or experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_hetero.models.latent import LatentAttention
from ds_hetero.models.recurrent import RecurrentLayers
from ds_hetero.models.saved_tensors import USUAL_TENSORS, SavedTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Shape of a decoder-only transformer.

    All its layers are equal, with three exceptions: recurrent layers (``recurrent``), layers with a sliding window
    (``window_layers``), and layers without experts (``dense_layers``). Counts of weights of a layer are then means.
    """

    name: str  # for people
    num_layers: int  # decoder layers
    hidden_size: int  # width of the residual stream
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides ``num_heads``
    head_dim: int  # elements of a query and of a key of one head; see `value_dim` for values
    mlp_size: int  # width of the MLP (of one expert, where there are experts)
    vocab_size: int  # rows of the embedding
    gated_mlp: bool = False  # True: an MLP has three matrices (SwiGLU), False: two
    tied_embeddings: bool = False  # True: embedding and head are one matrix
    num_experts: int = 0  # experts per layer, 0 for a dense MLP
    experts_per_token: int = 0  # number of experts that each token uses
    shared_mlp_size: int = 0  # width of the shared experts together, which every token passes; 0 for none
    gated_attention: bool = False  # True: attention's output is multiplied by a gate of its width
    head_norms: bool = False  # True: RMSNorm of queries and keys, over each head or over all heads
    recurrent: RecurrentLayers | None = None  # recurrent layers; None if all layers have attention alone
    dense_layers: int = 0  # number of layers with one MLP instead of experts
    dense_mlp_size: int = 0  # width of the MLP of those layers
    window: int = 0  # keys that a query attends to in a sliding-window layer, its own included; 0: no window
    window_layers: int = 0  # number of layers with the window; other layers attend to all tokens
    latent: LatentAttention | None = None  # latent attention; None for one projection each to queries, keys and values
    other_layer_parameters: int = 0  # weights of a layer without its matmuls and two norms, such as biases
    saved: SavedTensors = USUAL_TENSORS  # what autograd saves of a layer, where it is not what it saves of Llama's
    other_parameters: int = 0  # weights outside of layers without embedding, head and final norm: positions

    @property
    def queries_per_kv_head(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.num_layers if self.recurrent is None else self.recurrent.num_attention_layers

    @property
    def value_dim(self) -> int:
        """Elements of a value of one head; latent attention has narrower values than queries."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def unlike_layers(self) -> str | None:
        """What some layers differ in from the others, in words for messages; None if all layers are equal."""
        if self.recurrent is not None:
            return "linear-attention or SSM layers"
        if 0 < self.window_layers < self.num_layers:
            return f"layers whose attention sees {self.window:,} tokens beside those that see all"
        if self.dense_layers:
            return "layers with one MLP beside those with experts"
        return None

    @property
    def dense(self) -> ModelSpec:
        """The same model with one MLP of ``dense_mlp_size`` instead of experts in all layers."""
        return replace(
            self,
            mlp_size=self.dense_mlp_size,
            num_experts=0,
            experts_per_token=0,
            shared_mlp_size=0,
            dense_layers=0,
            dense_mlp_size=0,
        )

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's projections to queries, keys, values, to the gate if there is one, and out."""
        if self.latent is not None:
            return self.latent.parameters(self.hidden_size, self.num_heads, self.head_dim)
        num_query_matrices = 3 if self.gated_attention else 2  # to queries and out, each num_heads x head_dim wide
        return self.hidden_size * self.head_dim * (num_query_matrices * self.num_heads + 2 * self.num_kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Weights of one MLP or of one expert."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.mlp_size

    @property
    def active_mlp_parameters(self) -> int:
        """Weights of one layer's MLP, or of its experts and router, that one token is multiplied with.

        The mean over layers if some have no experts.
        """
        router = self.hidden_size * self.num_experts
        active = max(self.experts_per_token, 1) * self.mlp_parameters + router + self._shared_parameters
        return self._mean_over_mlps(active, self.dense.mlp_parameters) if self.dense_layers else active

    @property
    def all_mlp_parameters(self) -> int:
        """Weights of one layer's MLP, or of all its experts and router; the mean if some layers have no experts."""
        router = self.hidden_size * self.num_experts
        experts = max(self.num_experts, 1) * self.mlp_parameters + router + self._shared_parameters
        return self._mean_over_mlps(experts, self.dense.mlp_parameters) if self.dense_layers else experts

    @property
    def num_mlps(self) -> int:
        """Number of layers with an MLP or experts: all, or in Nemotron-H those without a mixer."""
        alone = 0 if self.recurrent is None else self.recurrent.num_layers_alone
        return alone or self.num_layers

    @property
    def mixer_parameters(self) -> int:
        """Weights of one layer's mixer; the mean over all layers if some have attention and some a recurrence."""
        if self.recurrent is None:
            return self.attention_parameters
        recurrence = self.recurrent.num_layers * self.recurrent.parameters(self.hidden_size)
        return (self.attention_layers * self.attention_parameters + recurrence) // self.num_layers

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: mixer, MLP or all experts with router, two norms, biases; the mean if layers differ."""
        return (
            self.mixer_parameters
            + self._mean_over_layers(self.all_mlp_parameters)
            + 2 * self.hidden_size
            + self.other_layer_parameters
        )

    @property
    def active_layer_parameters(self) -> int:
        """Weights of one layer that one token is multiplied with: of experts, only those that it uses."""
        return self.mixer_parameters + self._mean_over_layers(self.active_mlp_parameters)

    @property
    def _shared_parameters(self) -> int:
        """Weights of the shared experts of one layer, and of the gate on their output."""
        num_matrices = 3 if self.gated_mlp else 2
        gate_width = 1 if self.shared_mlp_size else 0
        return self.hidden_size * (num_matrices * self.shared_mlp_size + gate_width)

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding and the head, once if they are tied."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model."""
        outside_layers = self.embedding_parameters + self.hidden_size + self.other_parameters
        return self.num_layers * self.layer_parameters + outside_layers

    def _mean_over_layers(self, mlp_weights: int) -> int:
        """Return the mean over all layers of a count of weights per MLP; some layers may have no MLP."""
        return mlp_weights if self.num_mlps == self.num_layers else mlp_weights * self.num_mlps // self.num_layers

    def _mean_over_mlps(self, expert_weights: int, dense_weights: int) -> int:
        """Return the mean over all layers with MLP or experts, given the weights of each of the two kinds."""
        num_expert_layers = self.num_mlps - self.dense_layers
        return (num_expert_layers * expert_weights + self.dense_layers * dense_weights) // self.num_mlps
