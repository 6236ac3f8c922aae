"""Shapes of decoder-only transformers, as far as time and memory depend on them.

A model is a Hugging Face ``config.json``, a folder that holds one, the same inline, or the name of a preset in
ds_configs/models, which are such files too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hetero.common.limits import MAX_HEADS, MAX_LAYERS, is_whole, whole_rule
from ds_hetero.common.paths import config_dir, is_file, is_folder
from ds_hetero.common.reading import read_file, shortened
from ds_hetero.common.text import listed, nearest
from ds_hetero.errors import ModelError

__all__ = ["ModelSlice", "ModelSpec", "load_model", "model_from_config", "model_names", "read_model_config"]


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
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

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
        experts = max(self.num_experts, 1) * self.mlp_parameters
        router = self.hidden_size * self.num_experts
        return self.attention_parameters + experts + router + 2 * self.hidden_size

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


def load_model(source: str | Path | Mapping[str, Any]) -> ModelSpec:
    """A model from a config.json, a folder with one, the name of a preset, or the same inline.

    Raises:
        ModelError: no such file or preset, not JSON, or anything that `model_from_config` refuses.
    """
    if isinstance(source, Mapping):
        name = source.get("model_type")
        return model_from_config(source, name if isinstance(name, str) and name else "model")
    return model_from_config(read_model_config(source), _config_file(source)[1])


def read_model_config(source: str | Path) -> Any:
    """Return the content of the config.json that a source stands for.

    Args:
        source: a config.json, a folder with one, or the name of a preset.

    Raises:
        ModelError: no such file or preset, or not JSON.
    """
    path, _ = _config_file(source)
    try:
        return read_file(path, "model", ModelError)
    except ModelError as error:
        if path.name == "config.json" or str(source) in model_names() or is_file(path):
            raise
        close = nearest(str(source), model_names(), cutoff=0.4)
        raise ModelError(
            f"cannot read model {shortened(str(source))}: it is neither a Hugging Face config.json, a folder with one, "
            f"nor a preset{f'; did you mean {close!r}?' if close else '.'} Presets: {', '.join(model_names())}."
        ) from error


def _config_file(source: str | Path) -> tuple[Path, str]:
    """The file that a source stands for, and the model's name."""
    path = Path(source)
    if is_folder(path):
        return path / "config.json", path.resolve().name
    if is_file(path):
        return path, path.resolve().parent.name if path.name == "config.json" else path.stem
    if str(source) in model_names():
        return config_dir() / "models" / f"{source}.json", str(source)
    return path, str(source)


def model_names() -> tuple[str, ...]:
    """Names of the presets."""
    return tuple(sorted(path.stem for path in (config_dir() / "models").glob("*.json")))


def model_from_config(config: Any, name: str) -> ModelSpec:
    """A model from the content of a Hugging Face config.json, by its keys and not by its type.

    Raises:
        ModelError: keys are missing or wrong, or the layers are not alike, or attention is not plain softmax attention
            over the whole sequence; the message names the key.
    """
    if not isinstance(config, Mapping):
        raise ModelError(f"{name}: a model config is a JSON object, got {shortened(config)}.")
    if config.get("text_config") is not None:  # multimodal models keep the decoder's shape in here
        config = config["text_config"]
        if not isinstance(config, Mapping):
            raise ModelError(f"{name}: text_config must be an object, got {shortened(config)}.")
    _refuse_other_attention(config, name)
    gpt2 = "n_embd" in config
    layers, hidden, heads = ("n_layer", "n_embd", "n_head") if gpt2 else _NAMES
    missing = [key for key in (layers, hidden, heads, "vocab_size") if key not in config]
    experts_key = next((key for key in ("num_local_experts", "num_experts") if config.get(key)), None)
    mlp_key = "moe_intermediate_size" if experts_key and "moe_intermediate_size" in config else "intermediate_size"
    if not gpt2 and mlp_key not in config:
        missing.append(mlp_key)
    if experts_key and "num_experts_per_tok" not in config:
        missing.append("num_experts_per_tok")
    if missing:
        raise ModelError(
            f"{name}: the model config lacks {', '.join(missing)}; it has {listed(sorted(map(str, config)))}."
        )
    hidden_size = _whole(config, hidden, name)
    num_heads, num_kv_heads, head_dim = _head_sizes(config, heads, hidden, name)
    if gpt2:
        mlp_size = _whole(config, "n_inner", name) if config.get("n_inner") else 4 * hidden_size
    else:
        mlp_size = _whole(config, mlp_key, name)
    activation = _text(config, "activation_function" if "hidden_act" not in config else "hidden_act", name).lower()
    ungated = gpt2 or _text(config, "model_type", name) in _UNGATED
    return ModelSpec(
        name=name,
        num_layers=_whole(config, layers, name),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_size=mlp_size,
        vocab_size=_whole(config, "vocab_size", name),
        gated_mlp=not ungated and activation != "relu",
        tied_embeddings=_flag(config, "tie_word_embeddings", gpt2, name),
        num_experts=_whole(config, experts_key, name) if experts_key else 0,
        experts_per_token=_whole(config, "num_experts_per_tok", name) if experts_key else 0,
    )


_LARGEST = {
    "num_attention_heads": MAX_HEADS,
    "n_head": MAX_HEADS,
    "num_key_value_heads": MAX_HEADS,
    "num_hidden_layers": MAX_LAYERS,
    "n_layer": MAX_LAYERS,
    "num_local_experts": 100_000,
    "num_experts": 100_000,
    "num_experts_per_tok": 100_000,
    "vocab_size": 2**30,
}
_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads")
_UNGATED = {"gpt2", "gpt_neox", "gpt_bigcode", "phi", "starcoder2", "falcon", "opt", "persimmon", "nemotron"}


def _head_sizes(config: Mapping[str, Any], heads: str, hidden: str, name: str) -> tuple[int, int, int]:
    """Query heads, key/value heads and the width of a head; ``heads`` and ``hidden`` are the config's keys."""
    num_heads, hidden_size, kv_key = _whole(config, heads, name), _whole(config, hidden, name), "num_key_value_heads"
    num_kv_heads = _whole(config, kv_key, name) if config.get(kv_key) is not None else num_heads
    if config.get("head_dim") is not None:
        head_dim = _whole(config, "head_dim", name)
    elif hidden_size % num_heads:
        raise ModelError(f"{name}: {hidden}={hidden_size} is not a multiple of {heads}={num_heads}; give head_dim.")
    else:
        head_dim = hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ModelError(f"{name}: {heads}={num_heads} is not a multiple of {kv_key}={num_kv_heads}.")
    return num_heads, num_kv_heads, head_dim


def _refuse_other_attention(config: Mapping[str, Any], name: str) -> None:
    """Layers that a split of heads and tokens cannot describe."""
    for key in ("kv_lora_rank", "linear_num_key_heads", "ssm_state_size", "mamba_d_state", "attn_layer_period"):
        if config.get(key):
            raise ModelError(f"{name}: {key} names a kind of layer that this planner has no cost model for.")
    for key in ("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace", "mlp_only_layers"):
        if config.get(key):
            given = f"{key}={shortened(config[key])}"
            raise ModelError(f"{name}: {given}: shared experts and mixed layers have no cost model yet.")
    layer_types = config.get("layer_types")
    if layer_types is not None and not (_is_list(layer_types) and all(isinstance(kind, str) for kind in layer_types)):
        raise ModelError(f"{name}: layer_types must be a list of names, got {shortened(layer_types)}.")
    other = sorted(set(layer_types or []) - {"full_attention"})
    if other:
        raise ModelError(f"{name}: layer_types has {listed(other, 8)}; only full_attention can be planned.")
    if config.get("sliding_window") and _flag(config, "use_sliding_window", True, name):
        raise ModelError(
            f"{name}: sliding_window={shortened(config['sliding_window'])}: attention over a window cannot be planned. "
            "Set it to null for full attention."
        )


def _whole(config: Mapping[str, Any], key: str, name: str) -> int:
    value, most = config[key], _LARGEST.get(key, 2**24)
    if not is_whole(value, 1, most):
        raise ModelError(f"{name}: {key} must be {whole_rule(value, 1, most)}, got {shortened(value)}.")
    return int(value)


def _text(config: Mapping[str, Any], key: str, name: str) -> str:
    value = config.get(key)
    if not (value is None or isinstance(value, str)):
        raise ModelError(f"{name}: {key} must be text, got {shortened(value)}.")
    return value or ""


def _flag(config: Mapping[str, Any], key: str, default: bool, name: str) -> bool:
    value = config.get(key)
    if not (value is None or isinstance(value, bool)):
        raise ModelError(f"{name}: {key} must be true or false, got {shortened(value)}.")
    return default if value is None else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
