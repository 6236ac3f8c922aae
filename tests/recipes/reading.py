"""Reads the settings that matter out of the example configurations in a checkout of a framework.

    python -m tests.recipes read axolotl /path/to/a/checkout

A checkout is a work tree or a bare repository. What is written into facts.json are facts: names of models, methods and
numbers; no file and no text of a framework is copied.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import yaml

Facts = dict[str, Any]
"""Settings of one recipe; what is off or at nothing is left out. The keys are those of `KEYS`."""

KEYS = {
    "path": "of the file in its repository; ``#2`` is the second command in it",
    "other": "what the file is, if it trains nothing",
    "model": "as the recipe names it",
    "images": "images, sounds or videos go with the text",
    "method": "sft, pretrain, dpo, kto, orpo, ...",
    "loss": "where a method knows several",
    "adapter": "lora, oft, ...; none trains all weights",
    "settings": "of the adapter: dora, rslora, pissa, ...",
    "targets": "of the adapter: linear, attention, attention and mlp, experts, named",
    "saves": "whole modules beside the adapter",
    "base": "of an adapter: nf4, int8, gptq, ...",
    "precision": "bf16, fp16, fp32, fp8",
    "packing": "packed, or padding_free",
    "attention": "its implementation",
    "micro": "batch of a device",
    "accumulate": "batches of a step",
    "length": "tokens of a sequence",
    "optimizer": "its name",
    "schedule": "of the learning rate",
    "recompute": "activations: reentrant, not_reentrant, or default",
    "parallel": "what shares the work: zero0 to zero3, fsdp, megatron, tp, ep, cp",
    "extras": "whatever else changes the training: liger, cut_cross_entropy, neftune, galore, ...",
}


class Checkout:
    """Files of a repository at its newest commit.

    Args:
        folder: a work tree or a bare repository.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.commit = self._git("rev-parse", "HEAD").strip()
        self.paths = self._git("ls-tree", "-r", "--name-only", "HEAD").splitlines()

    def text(self, path: str) -> str:
        """Content of a file."""
        return self._git("show", f"HEAD:{path}")

    def matching(self, pattern: str) -> list[str]:
        """Paths, sorted."""
        return sorted(path for path in self.paths if re.search(pattern, path))

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(["git", "-C", self._folder, *arguments], capture_output=True, check=True)
        return done.stdout.decode(errors="replace")


def read(framework: str, folder: str) -> tuple[str, list[Facts]]:
    """Return the commit, and the facts of all recipes of a framework.

    Args:
        framework: of `READERS`.
        folder: its checkout.
    """
    checkout = Checkout(folder)
    pattern, reader = READERS[framework]
    found = [_compact(facts) for path in checkout.matching(pattern) for facts in reader(checkout, path)]
    return checkout.commit, found


def _compact(facts: Mapping[str, Any]) -> Facts:
    """In the order of `KEYS`, without what is off; lists sorted."""
    made: Facts = {}
    for key in KEYS:
        value = facts.get(key)
        if value in (None, "", [], False, (), set()):
            continue
        made[key] = sorted({str(entry) for entry in value}) if isinstance(value, list | set | tuple) else value
    assert not facts.keys() - KEYS.keys(), facts.keys() - KEYS.keys()
    return made


def _number(value: Any) -> int | None:
    try:
        return int(float(str(value)))
    except ValueError:
        return None


_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "Wqkv", "c_attn", "out_proj"}


def targets_of(named: Any) -> str:
    """Which layers an adapter is on, by what a recipe names: a list, a pattern, or a word."""
    if named in (None, "", "auto"):
        return ""
    if isinstance(named, str):
        words = [named] if re.search(r"[\\(]", named) else re.split(r"[\s,]+", named.strip())
    else:
        words = [str(word) for word in named]
    if any(word in ("all", "all-linear", "all-router") for word in words):
        return "linear"
    if any("experts" in word or "shared_expert" in word for word in words):
        return "experts"
    last = {word.rpartition(".")[2] for word in words}
    if len(words) == 1 and re.search(r"[\\(]", words[0]):
        return "attention and mlp" if re.search(r"mlp|up|down", words[0]) else "attention"
    if last <= _ATTENTION:
        return "attention"
    return "attention and mlp" if last & _ATTENTION else "named"


def prequantized(model: str) -> str:
    """How the weights of a model are stored, by its name."""
    found = re.search(r"gptq|awq|aqlm|hqq|bnb-?nf4|nvfp4|fp8|bnb-4bit|prequantized", model.lower())
    words = {"bnb-nf4": "nf4", "bnbnf4": "nf4", "bnb-4bit": "nf4", "prequantized": "bitnet"}
    return words.get(found.group(), found.group()) if found else ""


_IMAGES = re.compile(
    r"-vl|vl-|omni|llava|pixtral|vision|voxtral|internvl|smolvlm|paddleocr|ocr|keye|minicpm-v|ovis|4\.[56]v|audio"
    r"|multimodal|gme|jina-reranker-m0|emu3|gemma-?3n|glm-4v",
    re.IGNORECASE,
)


def _has_images(model: str) -> bool:
    return bool(_IMAGES.search(model))


# --- Axolotl ------------------------------------------------------------------------------------------

_AXOLOTL_EXTRAS = {
    "neftune_noise_alpha": "neftune",
    "lisa_n_layers": "lisa",
    "relora_steps": "relora",
    "relora": "relora",
    "jagged_restart_steps": "relora",
    "unfrozen_parameters": "frozen_layers",
    "qat": "qat",
    "fp8": "fp8",
    "torch_compile": "torch_compile",
    "tiled_mlp": "tiled_mlp",
    "activation_offloading": "activation_offloading",
    "lora_mlp_kernel": "lora_kernels",
    "lora_qkv_kernel": "lora_kernels",
    "lora_o_kernel": "lora_kernels",
    "fused_attn_kernel": "fused_attention",
    "use_scattermoe": "scattermoe",
    "use_sonicmoe": "sonicmoe",
    "cut_cross_entropy": "cut_cross_entropy",
    "diffusion": "diffusion",
    "llmcompressor": "sparse",
    "flash_attn_fuse_mlp": "fused_mlp",
    "flash_attn_rms_norm": "fused_norm",
    "loraplus_lr_ratio": "loraplus",
    "quantize_moe_experts": "quantized_experts",
    "use_onebitllms": "onebit",
    "use_kernels": "hub_kernels",
    "streaming": "streaming",
    "use_eaft": "eaft",
    "peft_use_relora": "relora",
    "liger_rms_norm": "liger",
    "liger_glu_activation": "liger",
    "liger_rope": "liger",
    "liger_layer_norm": "liger",
    "liger_fused_linear_cross_entropy": "liger",
    "liger_use_token_scaling": "liger",
}


def _axolotl(checkout: Checkout, path: str) -> Iterator[Facts]:
    keys = {name: value for name, value in (yaml.safe_load(checkout.text(path)) or {}).items() if value}
    if "base_model" not in keys:
        yield {"path": path, "other": "settings of a cloud"}
        return
    model = str(keys["base_model"])
    yield {
        "path": path,
        "model": model,
        "images": "processor_type" in keys or (_has_images(model) and "skip_prepare_dataset" in keys),
        "method": _axolotl_method(keys),
        "precision": _axolotl_precision(keys),
        "packing": "packed" if keys.get("sample_packing") else "",
        "attention": _axolotl_attention(keys),
        "micro": _number(keys.get("micro_batch_size", 1)),
        "accumulate": _number(keys.get("gradient_accumulation_steps", 1)),
        "length": _number(keys.get("sequence_len", 2048)),
        "optimizer": keys.get("optimizer"),
        "schedule": _axolotl_schedule(keys),
        "recompute": _recompute(keys.get("gradient_checkpointing"), keys.get("gradient_checkpointing_kwargs")),
        "parallel": _axolotl_parallel(keys),
        "extras": _axolotl_extras(keys),
        **_axolotl_adapter(keys, model),
    }


def _axolotl_method(keys: Mapping[str, Any]) -> str:
    if keys.get("rl"):
        return str(keys["rl"])
    if keys.get("reward_model"):
        return "reward"
    if keys.get("process_reward_model"):
        return "prm"
    if keys.get("diffusion") or any("diffusion" in str(name) for name in keys.get("plugins", ())):
        return "diffusion"
    return "pretrain" if keys.get("pretraining_dataset") else "sft"


def _axolotl_adapter(keys: Mapping[str, Any], model: str) -> Facts:
    adapter = keys.get("adapter")
    stored = prequantized(model)
    base = "nf4" if keys.get("load_in_4bit") else "int8" if keys.get("load_in_8bit") else stored
    base = "gptq" if keys.get("gptq") else "mxfp4" if keys.get("model_quantization_config") else base
    if keys.get("model_quantization_config_kwargs", {}).get("dequantize"):
        base = ""
    named = keys.get("lora_target_parameters") and "experts"
    return {
        "adapter": "lora" if adapter == "qlora" else adapter,
        "base": base,
        "settings": [
            *(["dora"] if keys.get("peft_use_dora") else []),
            *(["rslora"] if keys.get("peft_use_rslora") else []),
            *(["loftq"] if keys.get("peft") and "loftq_config" in keys["peft"] else []),
            *(["dropout"] if float(keys.get("lora_dropout") or 0) else []),
        ],
        "targets": adapter
        and (named or ("linear" if keys.get("lora_target_linear") else targets_of(keys.get("lora_target_modules")))),
        "saves": bool(keys.get("lora_modules_to_save")),
    }


def _axolotl_attention(keys: Mapping[str, Any]) -> str:
    for name, word in (
        ("attn_implementation", ""),
        ("flash_attention", "flash_attention_2"),
        ("sdp_attention", "sdpa"),
        ("flex_attention", "flex_attention"),
        ("xformers_attention", "xformers"),
        ("eager_attention", "eager"),
    ):
        if keys.get(name):
            return word or str(keys[name])
    return ""


def _axolotl_precision(keys: Mapping[str, Any]) -> str:
    if keys.get("fp8"):
        return "fp8"
    if keys.get("bf16") or keys.get("bfloat16"):
        return "bf16"
    return "fp16" if keys.get("fp16") or keys.get("float16") else "fp32"


def _axolotl_schedule(keys: Mapping[str, Any]) -> str:
    name = str(keys.get("lr_scheduler", "cosine"))
    return f"{name} with a floor" if keys.get("cosine_min_lr_ratio") else name


def _axolotl_parallel(keys: Mapping[str, Any]) -> list[str]:
    stage = re.search(r"zero(\d)", str(keys.get("deepspeed", "")))
    found = [f"zero{stage.group(1)}"] if stage else []
    found += ["fsdp"] if keys.get("fsdp") or keys.get("fsdp_config") else []
    for name, word in (("tensor_parallel_size", "tp"), ("context_parallel_size", "cp"), ("expert_parallel_size", "ep")):
        found += [word] if (_number(keys.get(name)) or 1) > 1 else []
    return found


def _axolotl_extras(keys: Mapping[str, Any]) -> list[str]:
    plugins = " ".join(map(str, keys.get("plugins", ())))
    words = {
        "cut_cross_entropy": "cut_cross_entropy",
        "expert_parallel": "expert_parallel",
        "llm_compressor": "sparse",
        "kernels.K": "scattermoe",
    }
    found = [word for part, word in words.items() if part in plugins]
    found += [word for name, word in _AXOLOTL_EXTRAS.items() if keys.get(name)]
    if (keys.get("model_config") or {}).get("output_router_logits"):
        found.append("router_loss")
    return found


def _recompute(switched_on: Any, options: Any) -> str:
    if not switched_on or str(switched_on).lower() == "false":
        return ""
    reentrant = (options or {}).get("use_reentrant") if isinstance(options, dict) else None
    return "default" if reentrant is None else "reentrant" if reentrant else "not_reentrant"


# --- LLaMA-Factory ------------------------------------------------------------------------------------

_FACTORY_STAGES = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "kto", "rm": "reward", "ppo": "ppo"}
_FACTORY_LOSSES = ("use_dft_loss", "use_asft_loss", "use_eaft_loss")
_FACTORY_EXTRAS = {
    "use_galore": "galore",
    "use_apollo": "apollo",
    "use_badam": "badam",
    "use_adam_mini": "adam_mini",
    "use_muon": "muon",
    "use_llama_pro": "frozen_layers",
    "mixture_of_depths": "mixture_of_depths",
    "use_kt": "ktransformers",
    "fp8": "fp8",
    "neftune_noise_alpha": "neftune",
    "loraplus_lr_ratio": "loraplus",
    "enable_liger_kernel": "liger",
    "use_unsloth": "unsloth",
    "shift_attn": "longlora",
    "freeze_vision_tower": "frozen_tower",
}


def _factory(checkout: Checkout, path: str) -> Iterator[Facts]:
    keys = yaml.safe_load(checkout.text(path)) or {}
    keys = {name: value for name, value in keys.items() if value or name == "bf16"}
    if "train_dataset" in keys:
        yield _factory_second(path, keys)
        return
    if not keys.get("do_train"):
        yield {"path": path, "other": _factory_other(path, keys)}
        return
    model = str(keys["model_name_or_path"])
    adapter = str(keys.get("finetuning_type", "lora"))
    stored = f"{keys.get('quantization_method', 'bnb')}{keys['quantization_bit']}" if "quantization_bit" in keys else ""
    named = keys.get("lora_target") or keys.get("oft_target")
    frozen = ["frozen_layers"] if adapter == "freeze" else []
    megatron = ["megatron"] if any("model_parallel_size" in name for name in keys) else []
    yield {
        "path": path,
        "model": model,
        "images": _has_images(model) or "moss-vl" in model.lower(),
        "method": _FACTORY_STAGES[str(keys["stage"])],
        "loss": keys.get("pref_loss")
        or next((n[4:].removesuffix("_loss") for n in _FACTORY_LOSSES if keys.get(n)), ""),
        "adapter": "" if adapter in ("full", "freeze") else adapter,
        "settings": ["pissa"] if keys.get("pissa_init") else [],
        "targets": targets_of(named),
        "base": {"bnb4": "nf4", "bnb8": "int8"}.get(stored, stored) or prequantized(model),
        "precision": "bf16" if keys.get("bf16") or keys.get("pure_bf16") else "fp32",
        "packing": "packed" if keys.get("packing") or keys.get("neat_packing") else "",
        "attention": keys.get("flash_attn"),
        "micro": keys.get("per_device_train_batch_size", 1),
        "accumulate": keys.get("gradient_accumulation_steps", 1),
        "length": keys.get("cutoff_len"),
        "optimizer": keys.get("optim", "adamw_torch"),
        "schedule": keys.get("lr_scheduler_type", "linear"),
        "recompute": "" if keys.get("disable_gradient_checkpointing") else "default",
        "parallel": [
            *_stage_of(keys.get("deepspeed")),
            *(["fsdp"] if keys.get("fsdp") or "fsdp" in path else []),
            *megatron,
        ],
        "extras": [*(word for name, word in _FACTORY_EXTRAS.items() if keys.get(name)), *frozen],
    }


def _factory_other(path: str, keys: Mapping[str, Any]) -> str:
    for name, word in (
        ("distributed_type", "settings of a launcher"),
        ("export_dir", "export"),
        ("infer_backend", "inference"),
        ("do_predict", "inference"),
        ("tokenized_path", "preparation of data"),
    ):
        if name in keys:
            return word
    return "vocabulary" if "tokens_cfg" in path else "export" if "export" in path else "no training"


def _factory_second(path: str, keys: Mapping[str, Any]) -> Facts:
    """By its newer engine, whose files have other keys."""
    peft, quantized = keys.get("peft_config") or {}, keys.get("quant_config") or {}
    plan = keys.get("dist_config") or {}
    name = str(peft.get("name", ""))
    batching = str(keys.get("batching_strategy", ""))
    kernels = str((keys.get("kernel_config") or {}).get("name", ""))
    optimizer = (keys.get("optim_config") or {}).get("name", "adamw_torch")
    return {
        "path": path,
        "model": keys["model"],
        "images": "multimodal" in str(keys["train_dataset"]),
        "method": "dpo" if "dpo" in str(keys["train_dataset"]) else "sft",
        "adapter": "lora" if name == "lora" else "",
        "settings": ["dropout"] if peft.get("lora_dropout") else [],
        "targets": targets_of(peft.get("target_modules")),
        "base": {4: "nf4", 8: "int8"}.get(quantized.get("quantization_bit"), ""),
        "precision": "fp32" if keys.get("bf16") is False else "bf16",
        "packing": "padding_free" if "padding_free" in batching else "",
        "attention": keys.get("flash_attn"),
        "micro": keys.get("micro_batch_size", 1),
        "accumulate": 1,
        "length": keys.get("cutoff_len"),
        "optimizer": optimizer,
        "schedule": "constant",
        "recompute": "default",
        "parallel": [
            *(["fsdp"] if "fsdp" in str(plan.get("name")) else _stage_of(plan.get("config_file"))),
            *(["cp"] if (keys.get("cp_size") or 1) > 1 else []),
            *(["ep"] if (plan.get("ep_size") or 1) > 1 else []),
        ],
        "extras": [
            *(["frozen_layers"] if name == "freeze" else []),
            *(["liger"] if "liger" in kernels else []),
            *(["dynamic_batching"] if "dynamic" in batching else []),
        ],
    }


def _stage_of(file: Any) -> list[str]:
    found = re.search(r"(?:zero|z|stage)_?(\d)", str(file or ""))
    return [f"zero{found.group(1)}"] if found else []


# --- ms-swift -----------------------------------------------------------------------------------------

_SWIFT_COMMAND = re.compile(r"\b(swift|megatron)\s+(sft|pt|rlhf)\b|swift/cli/(?:_megatron/)?(sft|pt|rlhf)\.py")
_SWIFT_EXTRAS = {
    "use_liger_kernel": "liger",
    "neftune_noise_alpha": "neftune",
    "use_galore": "galore",
    "galore_quantization": "galore",
    "lisa_activated_layers": "lisa",
    "router_aux_loss_coef": "router_loss",
    "moe_aux_loss_coeff": "router_loss",
    "streaming": "streaming",
    "enable_channel_loss": "channel_loss",
    "loss_scale": "loss_scale",
    "freeze_llm": "frozen_layers",
    "freeze_parameters": "frozen_layers",
    "freeze_parameters_ratio": "frozen_layers",
    "use_mtp": "mtp",
    "mtp_num_layers": "mtp",
    "fp8_format": "fp8",
    "fp8_recipe": "fp8",
    "offload_optimizer": "offload",
    "rpo_alpha": "rpo",
    "use_dft_loss": "dft",
    "enable_dft_loss": "dft",
    "new_special_tokens": "new_tokens",
    "predict_with_generate": "predict_with_generate",
    "use_unsloth": "unsloth",
    "early_stop_interval": "early_stop",
    "activation_cpu_offload": "activation_offloading",
    "experts_impl": "experts_implementation",
    "quant_bits": "",
}
_SWIFT_TUNERS = {"lora": "lora", "lora_llm": "lora", "full": "", "dummy": ""}


def _swift(checkout: Checkout, path: str) -> Iterator[Facts]:
    found = 0
    for words in _commands(checkout.text(path)):
        match = _SWIFT_COMMAND.search(" ".join(words[:12]))
        if match is None:
            continue
        found += 1
        keys = _options(words)
        for word in words:
            if word.endswith((".yaml", ".json")) and word in checkout.paths and "model" not in keys:
                keys = {**(yaml.safe_load(checkout.text(word)) or {}), **keys}
        name = path if found == 1 else f"{path}#{found}"
        engine = "megatron" if match.group(1) == "megatron" or "megatron" in match.group() else "swift"
        yield _swift_facts(name, engine, match.group(2) or match.group(3), keys, " ".join(words))
    if not found:
        yield {"path": path, "other": _swift_other(checkout.text(path))}


def _swift_other(text: str) -> str:
    for pattern, word in (
        (r"swift (rollout|infer|deploy|app|eval|sample)|vllm serve|sglang|webui", "inference"),
        (r"(swift|megatron) export|merge", "export"),
        (r"--config|ray", "reinforcement learning by Ray"),
    ):
        if re.search(pattern, text):
            return word
    return "no training"


def _commands(text: str) -> Iterator[list[str]]:
    """Words of each command of a shell script; lines that end in a backslash go on."""
    lines = re.sub(r"\\[ \t]*\n\s*(#.*\n)*", " ", re.sub(r"(?m)^\s*#.*\n", "", text)).splitlines()
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = line.split()
        if words:
            yield words


def _options(words: Iterable[str]) -> Facts:
    """``--name value ...`` of a command; a name without a value is on."""
    keys: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if re.match(r"--[a-zA-Z]", word):
            name, _, value = word[2:].partition("=")
            keys[name] = [value] if value else []
        elif name:
            keys[name].append(word)
    return {name: " ".join(values) if values else "true" for name, values in keys.items()}


def _swift_facts(path: str, engine: str, command: str, keys: Facts, line: str) -> Facts:
    def on(name: str) -> bool:
        return str(keys.get(name, "false")).lower() not in ("false", "0", "none", "")

    megatron = engine == "megatron"
    model = str(keys.get("model") or keys.get("mcore_model") or "").strip()
    tuner = str(keys.get("tuner_type") or keys.get("train_type") or ("full" if megatron else "lora")).strip()
    task = str(keys.get("task_type", "")).strip()
    loss = str(keys.get("loss_type", "")).strip()
    micro = _number(keys.get("micro_batch_size" if megatron else "per_device_train_batch_size", 1)) or 1
    accumulate = _number(keys.get("gradient_accumulation_steps", 1)) or 1
    if megatron:
        accumulate = 2 if (_number(keys.get("global_batch_size", 16)) or 16) > micro else 1
    fsdp = on("fsdp") or re.search(r"fsdp\w*\.json", line)
    return {
        "path": path,
        "model": model,
        "images": _has_images(model) or on("freeze_vit") or "multimodal" in path,
        "method": _swift_method(command, task, keys),
        "loss": loss,
        "adapter": _SWIFT_TUNERS.get(tuner, tuner),
        "settings": _swift_settings(keys, on),
        "targets": targets_of(str(keys.get("target_modules", "all-linear")).strip())
        if tuner.startswith("lora")
        else "",
        "saves": on("modules_to_save"),
        "base": {"bnb4": "nf4", "bnb8": "int8"}.get(
            quantized := f"{keys['quant_method']}{keys.get('quant_bits', 4)}" if "quant_method" in keys else "",
            quantized,
        )
        or prequantized(model),
        "precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(
            str(keys.get("torch_dtype")), "bf16"
        ),
        "packing": "packed" if on("packing") else "padding_free" if on("padding_free") or megatron else "",
        "attention": keys.get("attn_impl") or keys.get("attention_backend"),
        "micro": micro,
        "accumulate": accumulate,
        "length": _number(keys.get("max_length")),
        "optimizer": _swift_optimizer(keys, megatron),
        "schedule": keys.get("lr_scheduler_type") or keys.get("lr_decay_style") or "cosine",
        "recompute": "default"
        if megatron or str(keys.get("gradient_checkpointing", "true")).lower() != "false"
        else "",
        "parallel": [
            *(["megatron"] if megatron else []),
            *_stage_of(keys.get("deepspeed")),
            *(["fsdp"] if fsdp else []),
            *(
                ["cp"]
                if (_number(keys.get("sequence_parallel_size")) or _number(keys.get("context_parallel_size")) or 1) > 1
                else []
            ),
        ],
        "extras": [
            *{word for name, word in _SWIFT_EXTRAS.items() if word and on(name)},
            *([str(keys["optimizer"]).strip()] if "optimizer" in keys and "muon" in str(keys["optimizer"]) else []),
        ],
    }


def _swift_method(command: str, task: str, keys: Mapping[str, Any]) -> str:
    if command == "rlhf":
        return {"rm": "reward"}.get(kind := str(keys.get("rlhf_type", "dpo")).strip(), kind)
    if task and task != "causal_lm":
        return {"seq_cls": "classification"}.get(task, task)
    if keys.get("num_labels"):
        return "classification"
    return "pretrain" if command == "pt" else "sft"


def _swift_settings(keys: Mapping[str, Any], on: Callable[[str], bool]) -> list[str]:
    found = [word for name, word in (("use_dora", "dora"), ("use_rslora", "rslora")) if on(name)]
    start = str(keys.get("init_weights") or keys.get("init_lora_weights") or "true").strip().lower()
    found += [start.replace("-", "_")] if start not in ("true", "false", "gaussian") else []
    return found + (["loraplus"] if on("lorap_lr_ratio") else []) + (["dropout"] if on("lora_dropout") else [])


def _swift_optimizer(keys: Mapping[str, Any], megatron: bool) -> str:
    return str(keys.get("optimizer") or keys.get("optim") or ("adam" if megatron else "adamw_torch_fused")).strip()


# --- TRL ----------------------------------------------------------------------------------------------

_TRAINERS = {
    "SFT": "sft",
    "DPO": "dpo",
    "KTO": "kto",
    "Reward": "reward",
    "ORPO": "orpo",
    "CPO": "cpo",
    "GKD": "gkd",
    "BCO": "bco",
    "PRM": "prm",
    "GRPO": "grpo",
    "RLOO": "rloo",
    "PPO": "ppo",
    "OnlineDPO": "online_dpo",
    "NashMD": "nash_md",
    "XPO": "xpo",
    "GOLD": "gold",
    "AsyncGRPO": "grpo",
    "Distillation": "distillation",
    "SDFT": "sdft",
    "SDPO": "sdpo",
    "TPO": "tpo",
    "SSD": "ssd",
}


def _trl(checkout: Checkout, path: str) -> Iterator[Facts]:
    text = checkout.text(path)
    if path.endswith(".yaml"):
        keys = yaml.safe_load(text)
        yield _trl_facts(path, "sft", dict(keys), "")
        return
    tree = ast.parse(text)
    named = re.findall(r"\b(\w+?)Trainer\(", text) + re.findall(r"\b(\w+?)Config\(", text)
    method = next((_TRAINERS[name] for name in named if name in _TRAINERS), "")
    if not method:
        yield {"path": path, "other": "moved, or no training"}
        return
    written = _written_settings(tree)
    document = ast.get_docstring(tree) or ""
    commands = [words for words in _commands(document) if path.rpartition("/")[2] in " ".join(words)]
    for number, words in enumerate(commands or [[]], 1):
        name = path if number == 1 else f"{path}#{number}"
        yield _trl_facts(name, method, {**written, **_options(words)}, " ".join(words))


def _written_settings(tree: ast.AST) -> Facts:
    """Constants given by name to configurations and loaders in a script."""
    found: Facts = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found |= {"model_name_or_path": node.value.value} if {"model_id", "model_name"} & {*names} else {}
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if called.endswith("Config") or called == "from_pretrained":
            found |= {"use_peft": True} if called == "LoraConfig" else {}
            for keyword in node.keywords:
                if keyword.arg and isinstance(keyword.value, ast.Constant):
                    found[keyword.arg] = keyword.value.value
                elif keyword.arg == "target_modules" and isinstance(keyword.value, ast.List):
                    found["target_modules"] = [getattr(entry, "value", "") for entry in keyword.value.elts]
            if called == "from_pretrained" and node.args and isinstance(node.args[0], ast.Constant):
                found.setdefault("model_name_or_path", node.args[0].value)
    return found


def _trl_facts(path: str, method: str, keys: Facts, line: str) -> Facts:
    def on(name: str) -> bool:
        return str(keys.get(name, "false")).lower() not in ("false", "0", "none", "", "no")

    model = str(keys.get("model_name_or_path") or "Qwen/Qwen2-0.5B")
    launcher = re.search(r"(deepspeed_zero\d|fsdp\d|context_parallel|alst)", line)
    shared = launcher.group(1).removeprefix("deepspeed_") if launcher else ""
    adapted = on("use_peft")
    return {
        "path": path,
        "model": model,
        "images": _has_images(model) or "_vlm" in path or "Image" in str(keys.get("remove_unused_columns", "")),
        "method": method,
        "loss": str(keys.get("loss_type", "")).strip(),
        "adapter": "lora" if adapted else "",
        "targets": targets_of(keys.get("lora_target_modules") or keys.get("target_modules") or "linear")
        if adapted
        else "",
        "saves": on("lora_modules_to_save"),
        "base": "nf4" if on("load_in_4bit") else "int8" if on("load_in_8bit") else prequantized(model),
        "precision": "bf16",
        "packing": "packed" if on("packing") else "padding_free" if on("padding_free") else "",
        "attention": keys.get("attn_implementation"),
        "micro": _number(keys.get("per_device_train_batch_size", 8)),
        "accumulate": _number(keys.get("gradient_accumulation_steps", 1)),
        "length": _number(keys.get("max_length", 1024)),
        "optimizer": keys.get("optim", "adamw_torch_fused"),
        "schedule": keys.get("lr_scheduler_type", "linear"),
        "recompute": "default" if str(keys.get("gradient_checkpointing", True)).lower() != "false" else "",
        "parallel": [
            ["cp" if shared in ("context_parallel", "alst") else shared.rstrip("12") if "fsdp" in shared else shared]
            if shared
            else []
        ][0],
        "extras": [
            *(["liger"] if on("use_liger_kernel") else []),
            *(["streaming"] if on("dataset_streaming") else []),
            *(["vllm"] if on("use_vllm") else []),
        ],
    }


READERS: dict[str, tuple[str, Callable[[Checkout, str], Iterator[Facts]]]] = {
    "axolotl": (r"^examples/.*\.ya?ml$", _axolotl),
    "ms-swift": (r"^examples/.*\.sh$", _swift),
    "llama-factory": (r"^examples/.*\.ya?ml$", _factory),
    "trl": (r"^(examples/scripts|trl/scripts)/(?!__)(?!harbor)[^_].*\.py$|^examples/cli_configs/.*\.yaml$", _trl),
}
"""By framework: which of its files are recipes, and what reads one."""
