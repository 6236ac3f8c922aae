"""Requirements of a transformers model that is split over the sequence, checked before training begins.

Every check reads public attributes of the model and its configuration, and refuses with the name of the attribute.
Without the checks, layers that mix neighbouring tokens, for example, would silently train on other inputs than in one
process.

Every adapter type of PEFT 0.21 and every setting of LoRA has a row in `ADAPTERS`, for refusals and docs:

    python -m tests.decision_pages          # writes the table into docs/adapters.md

Whether an adapter trains exactly on shards was tried for each row. The self-check of the first batch cannot show it,
because most adapters add nothing to outputs at first. So a type, or a setting of LoRA, that a newer release has brought
is refused until it has a row.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_hetero.common.name_rows import NameRow
from ds_hetero.common.reading import shortened
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.transformers.model.recurrent_layers import (
    LAYER_TYPES,
    has_recurrent_functions,
    has_unsupported_scan,
    is_depthwise_convolution,
)
from ds_hetero.frameworks.transformers.model.rotary_length import LENGTH_DEPENDENT, depends_on_length
from ds_hetero.frameworks.transformers.model.router_losses import has_router_loss
from ds_hetero.frameworks.transformers.model.towers import (
    has_towers,
    makes_decoder_masks,
    outer_model_of,
    text_decoder_of,
)
from ds_hetero.frameworks.transformers.protocols import PretrainedModel
from ds_hetero.runtime.data.shards import Batch, Entries

_EXPERTS = "Experts"  # suffix of transformers' classes that contain all experts of a layer
_ATTENTION_TYPES = ("full_attention", "sliding_attention")
_TOKENWISE_TYPES = ("mlp", "moe")  # layer types of hybrid models that neither attend nor recur
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
_POOLED = ("ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction")
POOLS = (
    "{} has a head that pools over the whole sequence, and each rank would give it only a part. Call it with whole "
    "batches, the same on all ranks of a replica, by handle.sharded_call(engine, **batch); TRL's RewardTrainer does so."
)
# By model_type: models that call transformers' registered attention functions, but do not declare it.
_UNDECLARED = ("stablelm",)
# By model_type: models that call registered attention functions, but whose attention depends on other tokens than the
# mask says.
_OWN_ATTENTION = {
    "doge": "its attention chooses keys by their content, in masks of its own",
    "jetmoe": "its attention has num_key_value_heads of keys per expert and repeats them for each expert of a token",
}


def pretrained_of(model: nn.Module) -> PretrainedModel:
    """Return the transformers model that ``model`` is or contains. Raises `ModelError`: it contains none or several."""
    from transformers import PreTrainedModel

    outermost: list[PretrainedModel] = []
    inner_ids: set[int] = set()  # of modules inside the outermost models
    for module in model.modules():  # a parent comes before its children
        if isinstance(module, PreTrainedModel) and id(module) not in inner_ids:
            outermost.append(module)
            inner_ids.update(map(id, module.modules()))
    if len(outermost) == 1:
        return outermost[0]
    names = [type(module).__name__ for module in outermost]
    contents = f"several: {names}" if names else "none"
    remedy = "Give deepspeed.initialize the one that trains, or train" if names else "Train"
    raise ModelError(
        f"ds_hetero splits one transformers model over the sequence, but {type(model).__name__} holds {contents}. "
        f'{remedy} this module with "sequence_parallel_size": 1.'
    )


def decoder_of(pretrained: PretrainedModel) -> nn.Module:
    """Return the module that turns tokens into hidden states. It makes the masks, and runs once per forward."""
    if has_towers(pretrained):
        return text_decoder_of(pretrained)
    from transformers import PreTrainedModel

    base: Any = pretrained.base_model
    model_under_head: Any = getattr(base, "model", None)
    if base is pretrained and isinstance(model_under_head, PreTrainedModel):
        base = model_under_head  # Mllama's text model has a head, but is its own base_model
    inner: Any = getattr(base, "decoder", None)  # heads such as OPT's call it directly, not the base model
    is_around_decoder = isinstance(inner, PreTrainedModel) and not hasattr(base, "encoder")
    decoder: nn.Module = inner if is_around_decoder else base
    return decoder


def embeddings_of(pretrained: PretrainedModel) -> nn.Module | None:
    """Return the module that embeds tokens; None if ``get_input_embeddings`` is not implemented."""
    try:
        return pretrained.get_input_embeddings()
    except NotImplementedError:
        return None


def containers_of_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules each of which contains all experts of a layer.

    Such a module calls submodules once for each expert that some token has chosen. So the number of these calls depends
    on the tokens, and differs between ranks and between runs.
    """
    return [module for module in model.modules() if type(module).__name__.endswith(_EXPERTS)]


def pools(pretrained: PretrainedModel) -> bool:
    """Return True if the head pools over the sequence of hidden states, as for classification and rewards."""
    return type(pretrained).__name__.endswith("ForSequenceClassification")


def whole_evaluation_reason(pretrained: PretrainedModel) -> str:
    """Return why an evaluation cannot shard whole batches at the model, and what to do; empty if it can."""
    name = type(pretrained).__name__
    if has_towers(pretrained):
        return (
            f"{name} puts images or sounds before its text decoder, and is evaluated whole. Leave the key out; a loop "
            "of your own can take shards from handle.dataloader inside handle.sharded()."
        )
    if pools(pretrained):
        return f"{name} has a head that pools over the sequence, and is evaluated whole. Leave the key out."
    return ""


def head_counts(pretrained: PretrainedModel) -> tuple[int, int]:
    """Return the numbers of query heads and of key/value heads. Raises `ModelError`: layers have different numbers."""
    config = pretrained.config.get_text_config()
    num_heads = _single_or_all(values_by_layer(config, "num_attention_heads"))
    num_kv_heads = _single_or_all(values_by_layer(config, "num_key_value_heads")) or num_heads
    if not isinstance(num_heads, int) or not isinstance(num_kv_heads, int):
        raise ModelError(
            f"{type(pretrained).__name__} must have the same number of heads in every layer, but its config has "
            f"num_attention_heads={num_heads!r}, num_key_value_heads={num_kv_heads!r}. Train it with "
            '"sequence_parallel_size": 1.'
        )
    return num_heads, num_kv_heads


def _single_or_all(values: tuple[Any, ...]) -> Any:
    """Return the only value; if there are several, return the tuple of them."""
    return values[0] if len(values) == 1 else values


def check_attention(model: nn.Module) -> None:
    """Refuse a model whose attention function the script has registered. Raises `ModelError` with its name."""
    pretrained = pretrained_of(model)
    if problems := list(own_attention_problems(pretrained)):
        raise _make_error(pretrained, problems)


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be split exactly. Raises `ModelError` with all its problems, and what to change."""
    problems = list(adapter_problems(adapters_of(model)))
    if problems:  # before `pretrained_of`, because an adapter may contain a second transformers model
        problems.append('docs/adapters.md lists those that can be; any trains with "sequence_parallel_size": 1')
        raise _make_error(model, problems)
    pretrained = pretrained_of(model)
    for check in _CHECKS:
        problems.extend(check(pretrained))
    if problems:
        raise _make_error(pretrained, problems)


def adapters_of(model: nn.Module) -> Entries:
    """Return the configurations of a model's PEFT adapters, by name."""
    adapters: Entries = {}
    # From the inside out, so that of two adapters with one name that of the outermost PEFT model counts.
    for module in reversed(list(model.modules())):
        configs = getattr(module, "peft_config", None)
        adapters |= configs if isinstance(configs, dict) else {}
    return adapters


def _make_error(model: object, problems: list[str]) -> ModelError:
    """Return the error that lists all problems of a model."""
    listed = "".join(f"\n  - {problem}" for problem in problems)
    return ModelError(f"{type(model).__name__} cannot be split over the sequence:{listed}")


def _interface_problems(pretrained: PretrainedModel) -> Iterator[str]:
    """Yield a problem for each property of the model's classes with which it cannot run on shards."""
    decoder: Any = decoder_of(pretrained)
    is_compatible = getattr(decoder, "is_backend_compatible", pretrained.is_backend_compatible)
    if not (is_compatible() or _uses_registry(pretrained)):
        yield "transformers does not declare that its attention may be replaced (`_supports_attention_backend`)"
    if getattr(pretrained.config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder; cross attention is not supported"
    if type(pretrained).__name__.endswith(_POOLED):
        yield "its head pools over the whole sequence, and each rank holds only a part"
    if pools(pretrained) and getattr(decoder_of(pretrained), "pooler", None) is not None:
        yield f"{type(decoder_of(pretrained)).__name__} itself pools over the sequence, and each rank holds only a part"
    if "position_ids" not in inspect.signature(type(decoder_of(pretrained)).forward).parameters:
        yield f"{type(decoder_of(pretrained)).__name__}.forward takes no position_ids"


def _uses_registry(pretrained: PretrainedModel) -> bool:
    """Return True if a model takes its attention from ALL_ATTENTION_FUNCTIONS without declaring it."""
    decoder = decoder_of(pretrained)
    is_known = has_recurrent_functions(decoder) or getattr(pretrained.config, "model_type", "") in _UNDECLARED
    return is_known and hasattr(sys.modules[type(decoder).__module__], "ALL_ATTENTION_FUNCTIONS")


def _config_problems(pretrained: PretrainedModel) -> Iterator[str]:
    """Yield a problem for each value of the text configuration with which shards would compute other results."""
    config = pretrained.config.get_text_config()
    supported_types = list(_ATTENTION_TYPES)
    if has_recurrent_functions(decoder_of(pretrained)):
        supported_types += [*LAYER_TYPES, *_TOKENWISE_TYPES]
    layer_types = {str(layer_type) for layer_type in common_value(config, "layer_types") or ()}
    unknown_types = sorted(layer_types - set(supported_types))
    if unknown_types:
        yield f"layers of type {', '.join(unknown_types)}; supported are {', '.join(supported_types)}"
    for name in DROPOUTS:
        if any(values := values_by_layer(config, name)):
            yield f"{name}={_single_or_all(values)}: dropout inside attention is not supported; set it to 0"
    for rope_type in _list_rope_types(common_value(config, "rope_parameters") or {}):
        if rope_type in LENGTH_DEPENDENT and not any(map(depends_on_length, pretrained.modules())):
            yield f"rope_type {rope_type!r} depends on the length of the sequence, and each rank sees only a part"
    if common_value(config, "output_router_logits") and (problem := router_loss_problem(pretrained)):
        yield problem


def router_loss_problem(pretrained: PretrainedModel) -> str:
    """Return why the auxiliary loss of routers would differ from that of one process; empty if it would not."""
    weight = common_value(pretrained.config.get_text_config(), "router_aux_loss_coef")
    is_adapted = bool(
        getattr(pretrained, "peft_config", None) or getattr(pretrained.config, "quantization_config", None)
    )
    if not weight or (has_router_loss(pretrained) and not has_towers(pretrained) and not is_adapted):
        return ""
    problem = "beside adapters is not known to be exact" if is_adapted else "is not a mean over tokens that is known"
    return (
        f"its router loss (router_aux_loss_coef={weight}) {problem}; set "
        "router_aux_loss_coef to 0 in the model's config (in TRL: SFTConfig(router_aux_loss_coef=0.0), since TRL "
        "sets output_router_logits by itself)"
    )


def _attention_problems(pretrained: PretrainedModel) -> Iterator[str]:
    """Yield a problem for attention that depends on more than the mask says, and for windows in both directions."""
    if reason := _OWN_ATTENTION.get(getattr(pretrained.config, "model_type", "")):
        yield reason
    for name, module in pretrained.named_modules():
        if type(module).__name__.endswith("Indexer"):
            yield f"{name} ({type(module).__name__}) chooses keys by the content of the whole sequence"
            break
    layer_types = common_value(pretrained.config.get_text_config(), "layer_types") or ()
    directions = {module.is_causal for module in decoder_of(pretrained).modules() if hasattr(module, "is_causal")}
    if "sliding_attention" in layer_types and directions == {False}:
        yield "its sliding windows look in both directions; without a window, or causal, they are supported"


def _list_rope_types(parameters: Entries) -> set[Any]:
    """Return the rope types of rotary parameters, which may be one set, or one set per layer type."""
    per_layer = [entry for entry in parameters.values() if isinstance(entry, dict)]
    return {entry.get("rope_type") for entry in [parameters, *per_layer]}


def _loss_problems(pretrained: PretrainedModel) -> Iterator[str]:
    """Yield a problem for Cut Cross Entropy's patched forward, in releases that do not take ``shift_labels``."""
    forward = getattr(pretrained.forward, "__func__", pretrained.forward)
    if "cut_cross_entropy" not in getattr(forward, "__module__", ""):
        return
    apply = getattr(forward, "__globals__", {}).get("apply_lce")
    if apply is None or "shift_labels" not in inspect.signature(apply).parameters:
        yield (
            "Cut Cross Entropy shifts the labels of its input by one token, but the labels of a shard are shifted "
            'already. Leave the patch out: "tile_tokens" in the section computes losses of '
            'shards without the logits of all tokens, too; or train with whole sequences, such as by "batch": [6, 2]'
        )


def _tower_problems(pretrained: PretrainedModel) -> Iterator[str]:
    """Yield a problem for a model with towers that cannot be sharded at the arguments of its text decoder."""
    if not has_towers(pretrained):
        return
    decoder = decoder_of(pretrained)
    if decoder in (pretrained, pretrained.base_model):
        yield "its towers and its text decoder are one module, so that there is no place to cut between them"
    elif common_value(pretrained.config.get_text_config(), "cross_attention_layers"):
        yield "its text attends to its images by cross attention, which is not supported"
    if makes_decoder_masks(outer_model_of(pretrained)):
        yield "it makes the masks of its text decoder before it, by blocks of images that see in both directions"


def _module_problems(pretrained: PretrainedModel) -> Iterator[str]:
    """Yield a problem for Mamba-1's scan, and for the first layer that mixes tokens outside attention."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    can_wrap = has_recurrent_functions(decoder_of(pretrained))
    if has_unsupported_scan(decoder_of(pretrained)):
        yield "its state-space layers are of the first Mamba, whose scan cannot be split by heads"
    for name, module in decoder_of(pretrained).named_modules():
        is_recurrent = isinstance(module, nn.RNNBase | nn.RNNCellBase)
        is_convolution = isinstance(module, convolutions) and any(size > 1 for size in module.kernel_size)
        is_wrapped = can_wrap and is_depthwise_convolution(module)
        if (is_recurrent or is_convolution) and not is_wrapped:
            yield f"layer {name} ({type(module).__name__}) mixes neighbouring tokens outside attention"
            return


def check_quantized(model: nn.Module, zero_stage: int) -> None:
    """Refuse weights quantized by bitsandbytes if training would differ from one process. Raises `ModelError`."""
    problem = next(_quantization_problems(model, zero_stage), None)
    if problem is not None:
        raise ModelError(f"{type(model).__name__} does not train exactly on several ranks: {problem}.")


def _quantization_problems(model: nn.Module, zero_stage: int) -> Iterator[str]:
    """Yield a problem for each layer with 8-bit weights, and with ZeRO-3 for each with DoRA on a 4-bit weight."""
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear8bitLt":
            yield (
                f"layer {name} is 8-bit. bitsandbytes rounds activations to 8 bits, so that a last bit becomes a step "
                "(4e-4 of a gradient norm was seen, with llm_int8_threshold=0); with a threshold it keeps columns in "
                "full precision by the tokens that a rank happens to have; load the model in 4 bits by "
                "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')"
            )
        uses_dora = getattr(module, "use_dora", None)  # in LoRA's layers: {adapter: bool}
        has_dora = isinstance(uses_dora, dict) and any(uses_dora.values())
        weight = getattr(getattr(module, "base_layer", None), "weight", None)
        if zero_stage == 3 and has_dora and type(weight).__name__ == "Params4bit":
            yield (
                f"layer {name} has DoRA on a 4-bit weight, which PEFT replaces by a new one when it reads it on a CPU: "
                "ZeRO-3 loses the weight. Use ZeRO stage 2, or LoRA with use_dora=False"
            )


def own_attention_problems(pretrained: PretrainedModel) -> Iterator[str]:
    """Yield a problem for each attention function that the script has registered: this engine would replace it."""
    configs: list[Any] = [module.config for module in pretrained.modules() if hasattr(module, "config")]
    for name in dict.fromkeys(getattr(config, "_attn_implementation", None) for config in configs):
        function = ALL_ATTENTION_FUNCTIONS.get(name) if isinstance(name, str) else None
        package = getattr(function, "__module__", "").partition(".")[0]
        if function is not None and package not in _ATTENTION_PACKAGES:
            full_name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
            yield (
                f'its attention "{name}" is {full_name}, registered with AttentionInterface; ds_hetero cannot '
                'know what it computes. model.set_attn_implementation("sdpa") takes an attention that is split; a '
                'function of your own trains without a "heterogeneity" section, or by "batch", which splits no sequence'
            )


# Packages whose attention functions compute softmax attention.
_ATTENTION_PACKAGES = ("transformers", "ds_hetero", "deepspeed", "kernels")

_CHECKS: tuple[Callable[[PretrainedModel], Iterator[str]], ...] = (
    _interface_problems,
    own_attention_problems,
    _config_problems,
    _attention_problems,
    _tower_problems,
    _module_problems,
    _loss_problems,
)


def values_by_layer(config: Any, name: str) -> tuple[Any, ...]:
    """Return the configuration's field ``name`` of every layer.

    Layers with equal values count once: (8, 4, 8) for three unlike layers, but (8,) if all have 8. (None,) if the
    configuration has no such field.
    """
    if getattr(config, "is_heterogeneous", False):
        values = tuple(getattr(layer, name, None) for layer in config.per_layer_config)
        return values[:1] if all(value == values[0] for value in values) else values
    return (getattr(config, name, None),)


def common_value(config: Any, name: str) -> Any:
    """Return the field that all layers share; None if there is no such field. Raises `ModelError`: layers differ."""
    value, *other_values = values_by_layer(config, name)
    if other_values:
        raise ModelError(
            f"{name} must be the same in every layer, but the config has {[value, *other_values]}, one for each. A "
            'model whose layers differ in it trains with "sequence_parallel_size": 1.'
        )
    return value


def _refused(why: str, *off: object) -> NameRow:
    """Return the row of a refused adapter type, or of a setting that is refused unless its value is one of ``off``."""
    return NameRow(kind="refused", why=why, off=off)


_EXACT = NameRow(kind="exact")
_FIRST_VALUES = NameRow(kind="harmless", why="it sets the adapter's first values, before the job starts")
_RECORD = NameRow(kind="harmless", why="it describes the adapter")
_PROMPT = _refused("it puts virtual tokens before the sequence")

ADAPTERS: Mapping[str, NameRow] = {
    "ADALORA": NameRow(
        kind="exact", why="with a fixed budget: update_and_allocate reads whole gradients, which ZeRO does not keep"
    ),
    "ADAMSS": _refused("nobody has tried it here: it needs scikit-learn"),
    "ADAPTION_PROMPT": _refused("its layers attend to a prompt of their own, past the attention of transformers"),
    "BEFT": _EXACT,
    "BOFT": _EXACT,
    "C3A": _EXACT,
    "CARTRIDGE": _PROMPT,
    "CPT": _PROMPT,
    "DEFT": _EXACT,
    "DELORA": _EXACT,
    "FOURIERFT": _EXACT,
    "FROD": _EXACT,
    "GLORA": _EXACT,
    "GRALORA": _EXACT,
    "HIRA": _EXACT,
    "HRA": _EXACT,
    "IA3": _EXACT,
    "LILY": _refused(
        "it weights its experts by their mean over all tokens of a batch, but a rank holds only a part of them; the "
        "self-check does not see this, because the adapter adds nothing at first"
    ),
    "LN_TUNING": _EXACT,
    "LOHA": _EXACT,
    "LOKR": _EXACT,
    "LORA": _EXACT,
    "LORA.alora_invocation_tokens": _refused(
        "aLoRA looks for its invocation tokens in the whole sequence, but a rank holds only a part"
    ),
    "LORA.alpha_pattern": _EXACT,
    "LORA.arrow_config": _refused("nobody has tried it here"),
    "LORA.bias": _EXACT,
    "LORA.ensure_weight_tying": _EXACT,
    "LORA.init_lora_weights": NameRow(kind="exact", why="tried: gaussian, mica, olora, orthogonal, pissa"),
    "LORA.kasa_config": _EXACT,
    "LORA.layer_replication": _EXACT,
    "LORA.lora_bias": _EXACT,
    "LORA.lora_dropout": NameRow(
        kind="harmless", why="like any dropout, it draws other random numbers than one process"
    ),
    "LORA.megatron_config": _refused("nobody has tried it here"),
    "LORA.modules_to_save": _EXACT,
    "LORA.monteclora_config": _refused("every rank adds noise of its own to the adapter's weights"),
    "LORA.rank_pattern": _EXACT,
    "LORA.target_parameters": _EXACT,
    "LORA.trainable_token_indices": _EXACT,
    "LORA.use_bdlora": _EXACT,
    "LORA.use_dora": _EXACT,
    "LORA.use_qalora": _refused("nobody has tried it here: it needs weights quantized by GPTQ"),
    "LORA.use_rslora": _EXACT,
    "LORA.velora_config": _EXACT,
    "LORA.velora_config.init_type": _refused(
        "VeLoRA takes the direction that it projects on from the first batch, but a rank holds only a part", "random"
    ),
    **dict.fromkeys((f"LORA.{name}_config" for name in ("corda", "eva", "loftq", "lora_ga")), _FIRST_VALUES),
    **dict.fromkeys(
        ("LORA.r", "LORA.lora_alpha", "LORA.fan_in_fan_out"),
        NameRow(kind="exact", why="it sets the size of the adapter"),
    ),
    **dict.fromkeys(
        (f"LORA.{name}" for name in ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")),
        NameRow(kind="exact", why="it selects linear layers and embeddings"),
    ),
    **dict.fromkeys(
        (
            f"LORA.{name}"
            for name in (
                *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"),
                *("revision", "task_type"),
            )
        ),
        _RECORD,
    ),
    **dict.fromkeys(
        ("LORA.megatron_core", "LORA.qalora_group_size"),
        NameRow(kind="harmless", why="it is read only if its feature is switched on"),
    ),
    "LORA.runtime_config": NameRow(kind="harmless", why="it sets where weights are kept while the adapter is made"),
    "MISS": _EXACT,
    "MULTITASK_PROMPT_TUNING": _PROMPT,
    "OFT": _EXACT,
    "OSF": _EXACT,
    "PEANUT": _EXACT,
    "POLY": _refused("every rank draws anew, in every forward, which of its modules it takes"),
    "PREFIX_TUNING": _PROMPT,
    "PROMPT_TUNING": _PROMPT,
    "PSOFT": _EXACT,
    "PVERA": _refused("every rank draws noise of its own for its tokens while it trains"),
    "P_TUNING": _PROMPT,
    "RANDLORA": _EXACT,
    "ROAD": _EXACT,
    "SHADOW": _refused("a second model of transformers runs beside the first, and only one can be split"),
    "SHIRA": _EXACT,
    "SUPERTUNING": _EXACT,
    "TINYLORA": _EXACT,
    "TRAINABLE_TOKENS": _EXACT,
    "UNILORA": _EXACT,
    "VBLORA": _EXACT,
    "VERA": _EXACT,
    "WAVEFT": _EXACT,
    "XLORA": _refused("nobody has tried it here: it runs the model a second time for the weights of its adapters"),
}
"""For each adapter type, by PEFT's name, whether it trains exactly on shards; ``LORA.name`` is a setting of LoRA."""


def adapter_problems(adapters: Batch) -> Iterator[str]:
    """Yield a problem for each PEFT adapter that would not train as on one process: its name, setting and reason."""
    for name, config in adapters.items():
        adapter_type = str(getattr(config.peft_type, "value", config.peft_type))
        for path, value in [(adapter_type, None), *_settings(adapter_type, config)]:
            if reason := _reason_of_refusal(path, value):
                setting = path if value is None else f"{path}={shortened(value)}"
                yield f"PEFT adapter {name!r}, {setting}: {reason}"


def _reason_of_refusal(path: str, value: object) -> str:
    """Return why an adapter type (``LORA``) or a setting (``LORA.use_qalora``) is refused; empty if it is not.

    Args:
        value: of the setting; None for an adapter type.
    """
    row = ADAPTERS.get(path)
    if row is None:
        is_inside_setting = path.count(".") > 1  # the setting itself has a row
        return "" if is_inside_setting else "no release of PEFT that was tried here has it"
    is_off = value is not None and value in row.off
    return row.why if row.kind == "refused" and not is_off else ""


def _settings(adapter_type: str, config: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each setting of LoRA that differs from its default, and of all settings inside it.

    For example, ("LORA.r", 16), and for a dataclass ("LORA.velora_config.init_type", "random"). Other adapter types
    yield none.
    """
    if adapter_type != "LORA":
        return
    for field in fields(config):
        value = getattr(config, field.name)
        if value is None or value == _default_of(field):
            continue
        path = f"{adapter_type}.{field.name}"
        yield path, value
        inner: Mapping[str, Any] = {}
        if isinstance(value, Mapping):
            inner = value
        elif is_dataclass(value):
            inner = vars(value)
        for name, entry in inner.items():
            yield f"{path}.{name}", entry


def _default_of(field: Field[Any]) -> Any:
    """Return the default value of a dataclass field."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default
