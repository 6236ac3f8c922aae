"""Models by their configuration: from a config.json to a `ModelSpec`.

A model is a Hugging Face ``config.json``, a folder that holds one, the same inline, or the name of a preset in
ds_configs/models, which are such files too; the Hub's names of the same models stand for presets as well.

Adapters beside frozen weights (LoRA, arXiv:2106.09685), and frozen weights in few bits (QLoRA, arXiv:2305.14314).

Adapters stand beside every product with a weight of a layer, as PEFT's ``target_modules="all-linear"`` puts them there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ds_hetero.common.reading import (
    MAX_HEADS,
    MAX_LAYERS,
    JsonObject,
    config_dir,
    expect_whole_number,
    is_file,
    is_folder,
    is_list,
    is_whole,
    read_file,
    shortened,
)
from ds_hetero.common.spelling import nearest
from ds_hetero.common.text import listed
from ds_hetero.errors import ModelError, PlanError
from ds_hetero.models.shapes import ModelSpec, RecurrentLayers

_TUNED = re.compile(r"(-(instruct|chat|hf|it|base|thinking|2507|bnb-4bit|unsloth))+$")
_SAME_SHAPES = {"llama-3-8b": "llama-3.1-8b", "llama-3-70b": "llama-3.1-70b", "llama-3.3-70b": "llama-3.1-70b"}


def load_model(source: str | Path | JsonObject) -> ModelSpec:
    """A model from a config.json, a folder with one, a preset's name, or inline. Raises `ModelError`: there is none."""
    if isinstance(source, Mapping):
        name = source.get("model_type")
        return model_from_config(source, name if isinstance(name, str) and name else "model")
    return model_from_config(read_model_config(source), _config_file(source)[1])


def read_model_config(source: str | Path) -> Any:
    """Content of a config.json, by its path, folder or a preset's name, ours or the Hub's. Raises `ModelError`."""
    path, _ = _config_file(source)
    try:
        return read_file(path, "model", ModelError)
    except ModelError as error:
        if path.name == "config.json" or _preset_named(str(source)) or is_file(path):
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
    preset = _preset_named(str(source))
    return (path, str(source)) if preset is None else (config_dir() / "models" / f"{preset}.json", preset)


def _preset_named(source: str) -> str | None:
    """The preset of a name, or of one of the Hub: ``meta-llama/Llama-3.1-8B-Instruct`` has the shapes of its base."""
    names = model_names()
    if source in names:
        return source
    bare = _TUNED.sub("", source.lower().rpartition("/")[2]).removeprefix("meta-")
    bare = _SAME_SHAPES.get(bare, bare)
    return bare if bare in names else None


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
    gpt2 = "n_embd" in config
    layers, hidden, heads = ("n_layer", "n_embd", "n_head") if gpt2 else _NAMES
    missing = [key for key in (layers, hidden, heads, "vocab_size") if key not in config]
    count = int(config[layers]) if is_whole(config.get(layers), 1, MAX_LAYERS) else 0
    _refuse_unlike_layers(config, name)
    recurrent = _recurrent_layers_of(config, count, name) if count else None
    _refuse_other_attention(config, name, recurrent)
    experts_key = next((key for key in ("num_local_experts", "num_experts") if config.get(key)), None)
    if recurrent is not None and _is_dense(config, count):
        experts_key = None
    mlp_key, shared_key = _mlp_keys(config, experts_key, recurrent)
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
        shared_mlp_size=_whole(config, shared_key, name) if shared_key else 0,
        gated_attention=recurrent is not None and _text(config, "model_type", name).startswith(_GATED_ATTENTION),
        head_norms=_text(config, "model_type", name).startswith(_HEAD_NORMS),
        recurrent=recurrent,
    )


def _refuse_unlike_layers(config: JsonObject, name: str) -> None:
    """Sizes of some layers beside those of the model, as of Gemma 4; these are read nowhere else."""
    unlike = "layers of unlike sizes have no cost model yet."
    by_layer = config.get("per_layer_config") or {}
    for layer, sizes in by_layer.items() if isinstance(by_layer, Mapping) else ():
        for key, value in sizes.items() if isinstance(sizes, Mapping) else ():
            if value != config.get(key):
                raise ModelError(f"{name}: per_layer_config gives layer {layer} {key}={shortened(value)}; {unlike}")
    for key in ("num_attention_heads_per_layer", "num_key_value_heads_per_layer"):
        values = config.get(key)
        first, *others = values if is_list(values) and values else [None]
        if other := next((value for value in others if value != first), None):
            raise ModelError(f"{name}: {key} has {shortened(first)} and {shortened(other)}; {unlike}")
    for key, common in (("global_head_dim", "head_dim"), ("num_global_key_value_heads", "num_key_value_heads")):
        if config.get(key) is not None and config[key] != config.get(common):
            given = f"{key}={shortened(config[key])} beside {common}={shortened(config.get(common))}"
            raise ModelError(f"{name}: {given}: {unlike}")


_LARGEST = {
    "num_attention_heads": MAX_HEADS,
    "n_head": MAX_HEADS,
    "linear_num_value_heads": MAX_HEADS,
    "linear_num_key_heads": MAX_HEADS,
    "mamba_n_heads": MAX_HEADS,
    "mamba_n_groups": MAX_HEADS,
    "num_key_value_heads": MAX_HEADS,
    "num_hidden_layers": MAX_LAYERS,
    "n_layer": MAX_LAYERS,
    "num_local_experts": 100_000,
    "num_experts": 100_000,
    "num_experts_per_tok": 100_000,
    "vocab_size": 2**30,
}
_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads")
_GATED_ATTENTION = ("qwen3_next", "qwen3_5")
_HEAD_NORMS = ("qwen3", "olmo2", "olmo3", "gemma3", "exaone4", "apertus")
_UNGATED = {"gpt2", "gpt_neox", "gpt_bigcode", "phi", "starcoder2", "falcon", "opt", "persimmon", "nemotron"}


def _head_sizes(config: JsonObject, heads: str, hidden: str, name: str) -> tuple[int, int, int]:
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


def _mlp_keys(config: JsonObject, experts_key: str | None, recurrent: RecurrentLayers | None) -> tuple[str, str | None]:
    """The keys of the width of an MLP or an expert, and of an MLP beside the experts; None where there is none."""
    shared = next((key for key in _SHARED if config.get(key)), None) if recurrent else None
    if experts_key is None:  # what stands beside no experts is the only MLP
        return ("shared_intermediate_size" if shared == "shared_intermediate_size" else "intermediate_size"), None
    return ("moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"), shared


def _is_dense(config: JsonObject, num_layers: int) -> bool:
    """Whether every layer's MLP is a plain one although the configuration has experts."""
    plain = config.get("mlp_only_layers")
    return isinstance(plain, (list, tuple)) and all(layer in plain for layer in range(num_layers))


_SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")


def _refuse_other_attention(config: JsonObject, name: str, recurrent: RecurrentLayers | None) -> None:
    """Refuse layers that a split of heads and tokens cannot describe, beside known ``recurrent`` ones."""
    known: tuple[str, ...] = ()
    if recurrent is not None:
        known = ("linear_num_key_heads", "mamba_d_state", *_SHARED)
        known += ("mlp_only_layers",) if _is_dense(config, recurrent.num_model_layers) else ()
    for key in ("kv_lora_rank", "linear_num_key_heads", "ssm_state_size", "mamba_d_state", "attn_layer_period"):
        if config.get(key) and key not in known:
            raise ModelError(f"{name}: {key} names a kind of layer that this planner has no cost model for.")
    for key in ("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace", "mlp_only_layers"):
        if config.get(key) and key not in known:
            given = f"{key}={shortened(config[key])}"
            raise ModelError(f"{name}: {given}: shared experts and mixed layers have no cost model yet.")
    layer_types = config.get("layer_types")
    if layer_types is not None:
        _expect_names(layer_types, name)
    other = sorted(set(layer_types or []) - {"full_attention"})
    if other and recurrent is None:
        raise ModelError(f"{name}: layer_types has {listed(other, 8)}; only full_attention can be planned.")
    if config.get("sliding_window") and _flag(config, "use_sliding_window", True, name):
        raise ModelError(
            f"{name}: sliding_window={shortened(config['sliding_window'])}: attention over a window cannot be planned. "
            "Set it to null for full attention."
        )


def _whole(config: JsonObject, key: str, name: str, default: int | None = None) -> int:
    value: Any = config.get(key)
    most = _LARGEST.get(key, 2**24)
    if value is None and default is not None:
        return default
    return expect_whole_number(f"{name}: {key}", value, 1, most, ModelError)


def _text(config: JsonObject, key: str, name: str) -> str:
    value = config.get(key)
    if not (value is None or isinstance(value, str)):
        raise ModelError(f"{name}: {key} must be text, got {shortened(value)}.")
    return value or ""


def _flag(config: JsonObject, key: str, default: bool, name: str) -> bool:
    value = config.get(key)
    if not (value is None or isinstance(value, bool)):
        raise ModelError(f"{name}: {key} must be true or false, got {shortened(value)}.")
    return default if value is None else value


_RECURRENT, _ATTENTION, _BOTH = ("linear_attention", "mamba"), ("full_attention", "attention"), ("hybrid",)
_DELTA_CHUNK = 64  # tokens that kernels of the delta rule compute at once
_ATTENTION_EVERY = 4  # of Qwen3-Next and Qwen3.5, where the configuration does not say


def _recurrent_layers_of(config: JsonObject, num_layers: int, name: str) -> RecurrentLayers | None:
    """The recurrent layers of a configuration, if any. Raises `ModelError`: a wrong key, or unknown kinds."""
    if config.get("linear_num_value_heads"):
        heads, key_heads = _whole(config, "linear_num_value_heads", name), _whole(config, "linear_num_key_heads", name)
        key_dim, head_dim = _whole(config, "linear_key_head_dim", name), _whole(config, "linear_value_head_dim", name)
        conv_size, chunk, delta_rule = _whole(config, "linear_conv_kernel_dim", name, 4), _DELTA_CHUNK, True
    elif config.get("mamba_n_heads") and config.get("mamba_d_state"):
        heads, key_heads = _whole(config, "mamba_n_heads", name), _whole(config, "mamba_n_groups", name, 1)
        key_dim, head_dim = _whole(config, "mamba_d_state", name), _mamba_head_dim(config, heads, name)
        conv_size, chunk = _whole(config, "mamba_d_conv", name, 4), _whole(config, "mamba_chunk_size", name, 256)
        delta_rule = False
    else:
        return None
    if heads % key_heads:
        raise ModelError(f"{name}: {heads} heads of the scan are not a multiple of its {key_heads} key heads.")
    kinds = _kinds(config, num_layers, name)
    if not any(kind in _ATTENTION + _BOTH for kind in kinds):
        raise ModelError(
            f"{name}: no layer has attention, whose heads a schedule cuts; such a model cannot be planned."
        )
    return RecurrentLayers(
        num_layers=sum(kind in _RECURRENT + _BOTH for kind in kinds),
        num_attention_layers=sum(kind in _ATTENTION + _BOTH for kind in kinds),
        num_model_layers=num_layers,
        delta_rule=delta_rule,
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=key_dim,
        head_dim=head_dim,
        conv_size=conv_size,
        chunk=chunk,
    )


def _expect_names(layer_types: Any, name: str) -> None:
    if not (is_list(layer_types) and all(isinstance(kind, str) for kind in layer_types)):
        raise ModelError(f"{name}: layer_types must be a list of names, got {shortened(layer_types)}.")


def _kinds(config: JsonObject, num_layers: int, name: str) -> list[str]:
    """The kind of every layer."""
    given = config.get("layer_types") or config.get("layers_block_type")
    if given is not None:
        _expect_names(given, name)
        known = _RECURRENT + _ATTENTION + _BOTH
        other = sorted(set(given) - set(known))
        if other or len(given) != num_layers:
            wrong = f"has {listed(other, 8)}" if other else f"names {len(given)} layers of {num_layers}"
            raise ModelError(f"{name}: layer_types {wrong}; what can be planned are {', '.join(known)}.")
        return list(given)
    if config.get("model_type") == "falcon_h1":
        return ["hybrid"] * num_layers
    if config.get("linear_num_value_heads"):
        every = _whole(config, "full_attention_interval", name, _ATTENTION_EVERY)
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    places = config.get("attn_layer_indices") or ()
    if not isinstance(places, (list, tuple)) or not all(is_whole(place, 0, num_layers - 1) for place in places):
        last = num_layers - 1
        raise ModelError(f"{name}: attn_layer_indices must be layers from 0 to {last}, got {shortened(places)}.")
    return ["full_attention" if i in places else "mamba" for i in range(num_layers)]


def _mamba_head_dim(config: JsonObject, heads: int, name: str) -> int:
    if is_whole(config.get("mamba_d_head"), 1, 2**16):  # else "auto", or left out
        return _whole(config, "mamba_d_head", name)
    if config.get("mamba_d_ssm"):
        inner = _whole(config, "mamba_d_ssm", name)
    else:
        inner = _whole(config, "mamba_expand", name, 2) * _whole(config, "hidden_size", name)
    if inner % heads:
        raise ModelError(f"{name}: mamba_n_heads={heads} does not divide the inner width {inner}.")
    return inner // heads


USUAL_RANK = 16
MAX_RANK = 65_536


class Quantization(NamedTuple):
    """Frozen weights in few bits.

    Args:
        moved_bytes: bytes of memory traffic that its restoration costs in every pass, at the rate of elementwise work;
            fitted to measured steps (`benchmarks.real_cards`), since kernels that unpack bits do not reach that rate.
    """

    weight_bytes: float  # of a parameter, with its share of the constants of its block
    moved_bytes: float


QUANTIZATIONS = {
    "nf4": Quantization(0.516, 6.0),  # 4 bits and 0.127 for two levels of constants (arXiv:2305.14314, section 3)
    "gptq": Quantization(0.53, 11.0),  # 4 bits, a scale and a zero per 128
}


class Training(NamedTuple):
    """Weights that are trained."""

    adapter_rank: int = 0  # of adapters beside frozen weights; 0 where all weights are trained
    quantization: str | None = None  # of the frozen weights, one of `QUANTIZATIONS`; None for the data type of training


_TEXT = re.compile(r"(full|lora|qlora)(?::(\d{1,6}))?")


def read_training(text: str) -> Training:
    """Read ``full``, ``lora``, ``lora:RANK``, ``qlora`` or ``qlora:RANK``. Raises `PlanError`: it is none of these."""
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None or (match[1] == "full" and match[2]):
        raise PlanError(f"--train must be full, lora[:rank] or qlora[:rank], such as lora:16, got {shortened(text)}.")
    if match[1] == "full":
        return Training()
    rank = int(match[2] or USUAL_RANK)
    if not is_whole(rank, 1, MAX_RANK):
        raise PlanError(f"--train {shortened(text)}: the rank must be a whole number from 1 to {MAX_RANK:,}.")
    return Training(rank, "nf4" if match[1] == "qlora" else None)


def adapter_parameters(model: ModelSpec, rank: int) -> int:
    """Weights of the adapters of a layer: two narrow matrices beside every product, of all experts."""
    into, out = adapter_widths(model, experts=max(model.num_experts, 1))
    return rank * (into + out)


def adapter_widths(model: ModelSpec, experts: int = 1) -> tuple[int, int]:
    """Inputs and outputs of a layer's products with weights, summed: of attention and of some experts."""
    hidden, query, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    upwards = 2 if model.gated_mlp else 1
    into = 3 * hidden + query + experts * (upwards * hidden + model.mlp_size)
    out = query + 2 * kv + hidden + experts * (upwards * model.mlp_size + hidden)
    return into, out
