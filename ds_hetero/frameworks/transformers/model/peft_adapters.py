"""Every kind of adapter of PEFT 0.21 and every setting of LoRA, what becomes of them: one table, for refusals and docs.

    python -m tests.decision_pages          # writes the table into docs/adapters.md

What an adapter computes of a shard only a trial shows: most add nothing at first, so that the self-check of the first
batch cannot see them. So a kind, or a setting of LoRA, without a row is refused: a newer release has brought it.
Imports no framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from ds_hetero.common.reading import shortened
from ds_hetero.engine.arguments import NameRow
from ds_hetero.runtime.data.shards import Batch


def _refused(why: str, *off: object) -> NameRow:
    return NameRow(kind="refused", why=why, off=off)


_EXACT = NameRow(kind="exact")
_FIRST_VALUES = NameRow(kind="harmless", why="the adapter's first values, which are there before the start")
_RECORD = NameRow(kind="harmless", why="it says what the adapter is of")
_PROMPT = _refused("it puts virtual tokens before the sequence")

ADAPTERS: Mapping[str, NameRow] = {
    "ADALORA": NameRow(
        kind="exact",
        why="with a fixed budget; update_and_allocate reads whole gradients, which ZeRO does not keep",
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
        "it weighs its experts by their mean over all tokens of a batch, and a rank has a part of them; the self-check "
        "does not see it, since it adds nothing at first"
    ),
    "LN_TUNING": _EXACT,
    "LOHA": _EXACT,
    "LOKR": _EXACT,
    "LORA": _EXACT,
    "LORA.alora_invocation_tokens": _refused(
        "aLoRA looks for its invocation tokens in the whole sequence, and a rank has a part of it"
    ),
    "LORA.alpha_pattern": _EXACT,
    "LORA.arrow_config": _refused("nobody has tried it here"),
    "LORA.bias": _EXACT,
    "LORA.ensure_weight_tying": _EXACT,
    "LORA.init_lora_weights": NameRow(kind="exact", why="tried: gaussian, mica, olora, orthogonal, pissa"),
    "LORA.kasa_config": _EXACT,
    "LORA.layer_replication": _EXACT,
    "LORA.lora_bias": _EXACT,
    "LORA.lora_dropout": NameRow(kind="harmless", why="as any dropout, of other random numbers than in one process"),
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
        "VeLoRA takes the direction that it projects on from the first batch, and a rank has a part of it", "random"
    ),
    **dict.fromkeys((f"LORA.{name}_config" for name in ("corda", "eva", "loftq", "lora_ga")), _FIRST_VALUES),
    **dict.fromkeys(
        ("LORA.r", "LORA.lora_alpha", "LORA.fan_in_fan_out"), NameRow(kind="exact", why="the size of the adapter")
    ),
    **dict.fromkeys(
        (f"LORA.{name}" for name in ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")),
        NameRow(kind="exact", why="linear layers, and embeddings"),
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
        NameRow(kind="harmless", why="read only together with the setting that switches it on"),
    ),
    "LORA.runtime_config": NameRow(kind="harmless", why="where weights lie while the adapter is made"),
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
"""By PEFT's name of the kind; ``LORA.name`` is a setting of LoRA."""


def adapter_problems(adapters: Batch) -> Iterator[str]:
    """Say which adapters would not train as on one process.

    Args:
        adapters: PEFT's configurations by the name of the adapter.

    Yields:
        For each adapter that is refused, its name, what is refused of it, and why.
    """
    for name, config in adapters.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        for path, value in [(kind, None), *_settings(kind, config)]:
            if reason := _reason(path, value):
                what = path if value is None else f"{path}={shortened(value)}"
                yield f"PEFT adapter {name!r}, {what}: {reason}"


def _reason(path: str, value: object) -> str:
    adapter = ADAPTERS.get(path)
    if adapter is None:
        return "" if path.count(".") > 1 else "no release of PEFT that was tried here has it"
    return adapter.why if adapter.kind == "refused" and (value is None or value not in adapter.off) else ""


def _settings(kind: str, config: Any) -> Iterator[tuple[str, Any]]:
    """The settings of LoRA that are not at their defaults, and all settings inside of those."""
    if kind != "LORA":
        return
    for field in fields(config):
        value = getattr(config, field.name)
        if value is None or value == _default(field):
            continue
        path = f"{kind}.{field.name}"
        yield path, value
        inner = value if isinstance(value, Mapping) else vars(value) if is_dataclass(value) else {}
        yield from ((f"{path}.{name}", entry) for name, entry in inner.items())


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default
