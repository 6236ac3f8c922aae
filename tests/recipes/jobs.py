"""What a recipe becomes when it is shrunk: one of far fewer jobs, or a reason why it is not run here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tests.recipes.reading import Facts

# Patterns of names, the type of the text model, and that of the model with images; the first match counts.
_FAMILIES: tuple[tuple[str, str, str], ...] = (
    (r"llama-4", "llama4_text", "llama4"),
    (r"llama-3\.2-11b-vision", "mllama_text_model", "mllama"),
    (r"llava-v1\.6", "mistral", "llava_next"),
    (r"llava", "llama", "llava"),
    (r"qwen3\.[58].*a\d+b", "qwen3_5_moe_text", "qwen3_5_moe"),
    (r"qwen3\.[58]", "qwen3_5_text", "qwen3_5"),
    (r"qwen3-next", "qwen3_next", ""),
    (r"qwen3-omni", "qwen3_moe", "qwen3_omni_moe_thinker"),
    (r"qwen3-vl.*a\d+b", "qwen3_moe", "qwen3_vl_moe"),
    (r"qwen3-vl", "qwen3", "qwen3_vl"),
    (r"qwen2\.5-omni", "qwen2", "qwen2_5_omni_thinker"),
    (r"qwen2\.5-vl", "qwen2", "qwen2_5_vl"),
    (r"qwen2-vl|jina-reranker-m0", "qwen2", "qwen2_vl"),
    (r"qwen2-audio", "qwen2", "qwen2_audio"),
    (r"qwen3-tts|qwen-7b|internlm2|keye-vl|moss-vl|replit|btlm|deepseek-vl2|ovis2\.5|xxx|^sft$", "", ""),
    (r"qwen3.*a\d+b", "qwen3_moe", ""),
    (r"qwen3|plano", "qwen3", ""),
    (r"qwen1\.5-moe|qwen2-57b", "qwen2_moe", ""),
    (r"qwen|qwq|deepcoder|mimo", "qwen2", ""),
    (r"gemma-3n", "gemma3n_text", "gemma3n"),
    (r"gemma-4-12b", "gemma4_unified_text", "gemma4_unified"),
    (r"gemma-4", "gemma4_text", "gemma4"),
    (r"diffusiongemma", "", "diffusion_gemma"),
    (r"gemma-?3", "gemma3_text", "gemma3"),
    (r"gemma-2", "gemma2", ""),
    (r"gemma", "gemma", ""),
    (r"glm-4\.7-flash", "glm4_moe_lite", ""),
    (r"glm-4\.6v-flash", "glm4", "glm4v"),
    (r"glm-4\.6v", "glm4_moe", "glm4v_moe"),
    (r"glm-4\.5", "glm4_moe", ""),
    (r"glm-5", "glm_moe_dsa", ""),
    (r"glm-4", "glm4", ""),
    (r"internvl3_5.*gpt-oss", "gpt_oss", "internvl"),
    (r"gpt-oss", "gpt_oss", ""),
    (r"granite-4", "granitemoehybrid", ""),
    (r"hunyuanocr", "hunyuan_v1_dense", "hunyuan_vl"),
    (r"hunyuan", "hunyuan_v1_dense", ""),
    (r"internvl", "qwen2", "internvl"),
    (r"jamba", "jamba", ""),
    (r"kimi-linear", "kimi_linear", ""),
    (r"moonlight|deepseek-v3", "deepseek_v3", ""),
    (r"deepseek-v4", "deepseek_v4", ""),
    (r"deepseek-v2", "deepseek_v2", ""),
    (r"deepseek-ocr", "", "deepseek_ocr2"),
    (r"lfm2-vl", "lfm2", "lfm2_vl"),
    (r"lfm2.*a\d+b", "lfm2_moe", ""),
    (r"lfm2", "lfm2", ""),
    (r"magistral|mistral-small-3|devstral|mistral-medium", "mistral", "mistral3"),
    (r"ministral-?3", "ministral3", "mistral3"),
    (r"ministral", "ministral", ""),
    (r"mistral-small-4", "mistral4", "mistral4"),
    (r"mixtral", "mixtral", ""),
    (r"pixtral", "mistral", "llava"),
    (r"mistral|btlm", "mistral", ""),
    (r"minimax-m2", "minimax_m2", ""),
    (r"minicpm-v", "minicpm", "minicpmv4_6"),
    (r"nemotron-3", "nemotron_h", ""),
    (r"nemotron", "nemotron", ""),
    (r"olmo-3", "olmo3", ""),
    (r"paddleocr", "ernie4_5", "paddleocr_vl"),
    (r"phi-4-multimodal", "phi3", "phi4_multimodal"),
    (r"phi-3", "phi3", ""),
    (r"phi-", "phi", ""),
    (r"seed-oss", "seed_oss", ""),
    (r"smolvlm2", "llama", "smolvlm"),
    (r"smolvlm", "llama", "idefics3"),
    (r"stablelm", "stablelm", ""),
    (r"starcoder2", "starcoder2", ""),
    (r"trinity", "afmoe", ""),
    (r"afm-4", "arcee", ""),
    (r"apertus", "apertus", ""),
    (r"voxtral", "llama", "voxtral"),
    (r"falcon-h1", "falcon_h1", ""),
    (r"falcon-e", "llama", ""),
    (r"falcon", "falcon", ""),
    (r"gpt2|cerebras-gpt", "gpt2", ""),
    (r"gpt-j", "gptj", ""),
    (r"mamba", "mamba", ""),
    (r"mpt", "mpt", ""),
    (r"pythia|redpajama", "gpt_neox", ""),
    (r"dbrx", "dbrx", ""),
    (r"tiny-aya|command-r7b", "cohere2", ""),
    (r"emu3", "", "emu3"),
    (r"bert-base", "bert", ""),
    (r"bge-reranker", "xlm-roberta", ""),
    (r"modernbert", "modernbert", ""),
    (r"llama|yi-34b|orpheus|smollm|xgen|cogito", "llama", ""),
)

KERNELS = frozenset(
    [
        "liger",
        "cut_cross_entropy",
        "hub_kernels",
        "lora_kernels",
        "fused_attention",
        "fused_mlp",
        "fused_norm",
        "scattermoe",
        "sonicmoe",
        "unsloth",
        "experts_implementation",
        "quantized_experts",
    ]
)
"""Extras that compute the same formula by another kernel, which a CPU does not run: the formula is."""

_NOTHING = frozenset(
    [
        "activation_offloading",
        "tiled_mlp",
        "offload",
        "torch_compile",
        "expert_parallel",
        "loss_scale",
        "channel_loss",
        "early_stop",
        "predict_with_generate",
        "dynamic_batching",
        "loraplus",
        "frozen_tower",
        "vllm",
    ]
)
"""Extras that change memory, speed, labels or rates, and not how a batch becomes gradients."""

_NOT_RUN = {
    "lisa": "switches layers on and off by its own callback",
    "relora": "merges and restarts its adapter by its own callback",
    "qat": "rounds weights in training by torchao, to formats of GPUs",
    "fp8": "computes in 8 bits, on GPUs",
    "sparse": "needs llm-compressor",
    "onebit": "needs onebitllms",
    "mtp": "trains more heads than transformers' models have",
    "galore": "needs galore-torch, which projects whole gradients and knows no DeepSpeed",
    "apollo": "needs apollo-torch, which projects whole gradients and knows no DeepSpeed",
    "badam": "switches blocks of layers by its own optimizer",
    "adam_mini": "needs adam-mini",
    "muon": "the framework's own optimizer",
    "dist_muon": "the framework's own optimizer",
    "muonclip": "the framework's own optimizer",
    "mixture_of_depths": "changes the model by a package of its own",
    "ktransformers": "runs experts by KTransformers, an engine for the host's processors",
    "eaft": "the framework's own loss",
}
_TRAINED_WITH = ("frozen_layers", "router_loss", "streaming")
_OWN_LOSSES = {"asft", "eaft"}
_OWN_TUNERS = {
    "adalora": "TRL 1.16 leaves out the term that PEFT adds to its loss, but not where ranks share tokens",
    "adapter": "the framework's own tuner",
    "reft": "the framework's own tuner",
    "longlora": "the framework's own tuner",
    "llamapro": "the framework's own tuner",
}
_STORED = {
    "gptq": "stored weights of a format whose kernels need a GPU",
    "gptq4": "stored weights of a format whose kernels need a GPU",
    "awq": "stored weights of a format whose kernels need a GPU",
    "aqlm": "stored weights of a format whose kernels need a GPU",
    "hqq4": "needs hqq",
    "nvfp4": "stored weights of a format whose kernels need a GPU",
    "fp8": "stored weights of a format whose kernels need a GPU",
    "bitnet": "needs onebitllms",
}
GENERATING = frozenset(
    [
        "grpo",
        "ebft",
        "gdpo",
        "rloo",
        "ppo",
        "online_dpo",
        "nash_md",
        "xpo",
        "gold",
        "sdft",
        "sdpo",
        "ssd",
        "distillation",
        "tpo",
        "diffusion",
    ]
)
"""Methods that are not among those counted here: most learn from what they generate."""
_OWN_HEADS = {
    "embedding": "the framework's own loss over pairs of a batch",
    "reranker": "the framework's own loss",
    "generative_reranker": "the framework's own loss",
    "prm": "TRL 1.16 has no trainer of it any more; those of older releases are refused by name",
    "bco": "TRL 1.16 has no trainer of it any more; those of older releases are refused by name",
}
TRAINED = ("sft", "pretrain", "dpo", "orpo", "cpo", "simpo", "kto", "reward", "gkd", "classification")


@dataclass(frozen=True)
class Job:
    """A recipe, shrunk; recipes with equal jobs are trained once.

    Four rows a batch, two batches a step, some tens of tokens a sequence, a model of two layers, rank 4, three steps of
    AdamW in 32 bits, a cosine after a step of warm-up.

    Args:
        family: type of the model, as in config.json.
        images: a model that takes them, and batches with them.
        method: of `TRAINED`.
        loss: where the method knows several.
        adapter: of PEFT, or ``""``.
        base: ``"nf4"``, ``"int8"`` or ``""``.
        settings: of the adapter.
        targets: of the adapter.
        saves: whole modules beside it.
        packing: ``"packed"``, ``"padding_free"`` or ``""``.
        stage: of ZeRO.
        recompute: ``"reentrant"``, ``"not_reentrant"`` or ``""``.
        extras: that change what is computed.
    """

    family: str
    images: bool
    method: str
    loss: str
    adapter: str
    base: str
    settings: tuple[str, ...]
    targets: str
    saves: bool
    packing: str
    stage: int
    recompute: str
    extras: tuple[str, ...]

    def __str__(self) -> str:
        """One line, the key of outcomes."""
        words = [self.family, "images" if self.images else "", self.method, self.loss, self.base, self.adapter]
        words += [*self.settings, self.targets and f"on {self.targets}", "saves" if self.saves else "", self.packing]
        words += [f"zero{self.stage}", self.recompute, *self.extras]
        return ", ".join(word for word in words if word)


def family_of(model: str, *, images: bool) -> str:
    """The type of a model, by its name; ``""`` where transformers has none, or the name says nothing."""
    name = model.rpartition("/")[2].lower()
    for pattern, text, with_images in _FAMILIES:
        if re.search(pattern, name):
            return with_images if images else text
    return ""


def job_of(facts: Facts) -> Job | str:
    """The job that a recipe becomes, or the reason why it is not run."""
    if "other" in facts:
        return f"trains nothing: {facts['other']}"
    if reason := _left_out(facts):
        return reason
    images = bool(facts.get("images"))
    family = family_of(facts.get("model", ""), images=images)
    if not family:
        return f"a model that transformers does not have: {facts.get('model') or 'not named'}"
    if images and facts["method"] not in ("sft", "pretrain"):
        return f"{facts['method']} with images needs the processor of a model"
    adapter, named = facts.get("adapter", ""), facts.get("targets")
    settings = tuple(word for word in facts.get("settings", ()) if word not in ("dropout", "loraplus", "loftq"))
    return Job(
        family=family,
        images=images,
        method="sft" if images else facts["method"],
        loss=_loss(facts),
        adapter=adapter,
        base=facts.get("base", "") if facts.get("base") in ("nf4", "int8") else "",
        settings=settings,
        targets=(named if named in ("attention", "experts") else "linear") if adapter else "",
        saves=bool(facts.get("saves")) or "new_tokens" in facts.get("extras", ()),
        packing="" if images or facts["method"] not in ("sft", "pretrain") else facts.get("packing", ""),
        stage=_stage(facts.get("parallel", ())),
        recompute={"default": "not_reentrant"}.get(facts.get("recompute", ""), facts.get("recompute", "")),
        extras=tuple(word for word in facts.get("extras", ()) if word in _TRAINED_WITH),
    )


def replaced(facts: Facts) -> list[str]:
    """What a job has in another form than its recipe, beside sizes: kernels, states of optimizers, dropout, noise."""
    found = [word for word in facts.get("extras", ()) if word in KERNELS]
    found += [facts["optimizer"]] if re.search(r"[48]bit", str(facts.get("optimizer", ""))) else []
    found += ["dropout"] if "dropout" in facts.get("settings", ()) else []
    return found + (["neftune"] if "neftune" in facts.get("extras", ()) else [])


def _left_out(facts: Facts) -> str:
    method = facts["method"]
    if method in GENERATING:
        return f"another method: {method}"
    if method in _OWN_HEADS:
        return f"{method}: {_OWN_HEADS[method]}"
    for word in [*facts.get("extras", ()), facts.get("precision", "")]:
        if word in _NOT_RUN:
            return f"{word}: {_NOT_RUN[word]}"
    if "muon" in str(facts.get("optimizer", "")):
        return f"muon: {_NOT_RUN['muon']}"
    if facts.get("loss") in _OWN_LOSSES:
        return f"{facts['loss']}: the framework's own loss"
    if facts.get("adapter") in _OWN_TUNERS:
        return f"{facts['adapter']}: {_OWN_TUNERS[facts['adapter']]}"
    base = facts.get("base", "")
    return f"{base}: {_STORED[base]}" if base in _STORED else ""


def _loss(facts: Facts) -> str:
    loss = str(facts.get("loss", ""))
    if facts["method"] == "dpo":
        loss = loss or "sigmoid"
        return f"{loss} sft" if "rpo" in facts.get("extras", ()) and "sft" not in loss else loss
    return "dft" if loss == "dft" or "dft" in facts.get("extras", ()) else ""


def _stage(parallel: Any) -> int:
    stages = [int(word[4:]) for word in parallel if re.fullmatch(r"zero\d", word)]
    if stages:
        return stages[0]
    return 3 if {"fsdp", "megatron", "tp", "ep"} & {*parallel} else 2
