"""Express a row of measurements in this project's terms: a cluster, a model and a workload.

The columns are those of ``measurements.csv``; docs/real-cards.md explains them. An empty cell means "not stated".
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ds_hetero.cluster.attention_rates import Rates, with_attention
from ds_hetero.cluster.catalogue import CATALOGUE, LINK_EFFICIENCY, usual_reserve
from ds_hetero.cluster.topology import Cluster, DeviceSpec, Link, Node
from ds_hetero.common.reading import MAX_RANKS
from ds_hetero.common.units import GB, GIB
from ds_hetero.cost.workload import OPTIMIZER_BYTES, Buffers, Workload
from ds_hetero.models import ModelSpec
from ds_hetero.reporting.measured_row import OPTIMIZERS

Row = Mapping[str, str]
Constants = Mapping[str, Mapping[str, float]]  # by card: shares that stand in for the catalogue's, see `fit`

DEFAULT_NETWORK = 25.0  # GB/s, where a source does not state it
ALL_CARDS = "*"  # whose constants hold for all cards
OLD_SHARE = 0.5
"""Rate of kernels before FlashAttention-2, with which most long steps of llm-foundry's table were measured,
as a share of its: FlashAttention-2 (arXiv:2307.08691) is about twice as fast."""

_KERNELS = {
    "flash-attn 3": "flash_attn_3",
    "flash-attn 4": "flash_attn_4",
    "triton": "triton",
    "cudnn": "cudnn",
    "before flash-attn 2": "old",
    "flash-attn 1": "old",
    "flash-attn, version not stated": "old",
}
_VARIANTS = {"H100-SXM-96GB-500W": ("H100-SXM-80GB", 95, 2.4e12)}  # cards of one cloud: GiB, bytes per second
_OPTIMIZER_BYTES = {name: OPTIMIZER_BYTES[key] for key, name in OPTIMIZERS.items()}  # master weight and moments
_BF16_OPTIMIZER_BYTES = {"AdamW8bit": 2.0}  # without a master weight; AdamW is 4
_UNUSED = Buffers(reduce_bucket=0, prefetch_bucket=0, live_parameters=0)


class CannotExpressError(Exception):
    """A property of a point that this project cannot express."""


MEASUREMENTS = Path(__file__).parent / "measurements.csv"
COLUMNS = tuple(MEASUREMENTS.read_text(encoding="utf-8").partition("\n")[0].split(","))


def read_rows(lines: Iterable[str]) -> list[Row]:
    """Return the rows of a table of measurements; missing columns and empty cells are "not stated"."""
    empty = dict.fromkeys(COLUMNS, "") | {"peft": "full", "optimizer": "AdamW"}
    return [
        empty | {name: value.strip() for name, value in row.items() if isinstance(value, str) and value.strip()}
        for row in csv.DictReader(lines)
    ]


def number(row: Row, column: str, default: int = 1) -> int:
    """Return a whole number; ``default`` if it is not stated."""
    return int(float(row[column])) if row[column] else default


def kernel_of(row: Row) -> str:
    """Return the name of the attention kernel, as in `ds_hetero.cluster.catalogue`; FlashAttention-2 is usual."""
    return _KERNELS.get(row["attention"].lower(), "flash_attn_2")


def base_of(gpu: str) -> str:
    """Return the GPU of the catalogue whose rates a GPU has."""
    return _VARIANTS.get(gpu, (gpu,))[0]


def family_of(gpu: str) -> str:
    """Return the first GPU of the catalogue with the same fractions of its peaks.

    Fitted constants hold for all of these.
    """
    base = base_of(gpu)
    if base not in CATALOGUE:
        return base
    entry = CATALOGUE[base]
    shares = (entry.device.efficiency, entry.attention)
    return next(name for name, other in CATALOGUE.items() if (other.device.efficiency, other.attention) == shares)


def card_of(row: Row, constants: Constants | None = None, kernel: str | None = None) -> DeviceSpec:
    """Return the GPU of a row, with the rates of its kernel.

    Args:
        row: of the measurements.
        constants: replace the catalogue's fractions.
        kernel: of attention; left out, the row's.

    Raises:
        CannotExpressError: the catalogue does not have the GPU, or no rate of the kernel on it.
    """
    gpu, kernel = row["gpu"], kernel or kernel_of(row)
    base, gib, rate = _VARIANTS.get(gpu, (gpu, None, None))
    if match := re.fullmatch(r"(\d+) GB card", gpu):
        base, gib = "A100-SXM-80GB", int(match[1])
    entry = CATALOGUE.get(base)
    if entry is None:
        raise CannotExpressError(f"no {gpu} in the catalogue")
    card = entry.device
    if gib is not None:
        memory_bytes = int(gib * GIB)
        card = replace(card, memory_bytes=memory_bytes, reserved_bytes=usual_reserve(memory_bytes))
    card = card if rate is None else replace(card, memory_bytes_per_s=rate)
    own = (constants or {}).get(family_of(gpu), {}) if constants else {}
    card = _with_kernel(card, kernel, entry.attention, own)
    shares = {name: own[name] for name in ("matmul", "memory") if name in own}
    of_all = (constants or {}).get(ALL_CARDS, {})
    card = replace(card, fragmentation=of_all.get("fragmentation", card.fragmentation))
    return replace(card, efficiency=replace(card.efficiency, **shares)) if shares else card


def _with_kernel(card: DeviceSpec, kernel: str, rates: Rates, own: Mapping[str, float]) -> DeviceSpec:
    """Return the GPU with the rates of a kernel; of the catalogue's first GPU if it has none of this kernel."""
    if not rates:
        return card
    usual = "flash_attn_2" if "flash_attn_2" in rates else next(iter(rates))
    rate = rates.get(kernel, rates[usual])
    scale = own.get("old", OLD_SHARE) if kernel == "old" else own.get(f"{kernel} scale", 1.0)
    rate = rate._replace(forward=rate.forward * scale, backward=rate.backward * scale)
    return with_attention(card, kernel, {kernel: rate})


def cluster_of(row: Row, count: int, constants: Constants | None = None) -> Cluster:
    """Return ``count`` GPUs of a row, in nodes as large as the row's.

    Raises:
        CannotExpressError: there are more GPUs than a plan can have.
    """
    if count > MAX_RANKS:
        raise CannotExpressError(f"more than {MAX_RANKS:,} cards")
    card = card_of(row, constants)
    entry = CATALOGUE.get(base_of(row["gpu"]))
    inner = 16 * GB if entry is None else entry.link_bytes_per_s
    if "PCIe" in row["link"] and (entry is None or "PCIe" not in entry.link_name):
        inner = 32 * GB
    if "slow" in row["link"]:
        inner = 4 * GB  # x4 slots
    network = float(row["network_gb_per_s"] or DEFAULT_NETWORK) * GB
    size = max(1, min(number(row, "gpus_per_node", 8), count))
    sizes = [min(size, count - i * size) for i in range(math.ceil(count / size))]
    nodes = (
        Node(
            name=f"n{i}", devices=(card,) * cards, link=_link("inside", inner, 5e-6), host_memory_bytes=_host_bytes(row)
        )
        for i, cards in enumerate(sizes)
    )
    return Cluster(nodes=tuple(nodes), network=_link("network", network, 10e-6))


def _link(name: str, bytes_per_s: float, latency_s: float) -> Link:
    share = {"p2p_efficiency": LINK_EFFICIENCY, "all_to_all_efficiency": LINK_EFFICIENCY}
    return Link(name=name, latency_s=latency_s, bytes_per_s=bytes_per_s, **share)


def model_of(row: Row) -> ModelSpec:
    """Return the shape of the model.

    Raises:
        CannotExpressError: the source does not state it.
    """
    if not all(row[column] for column in ("layers", "hidden", "heads", "mlp", "vocab")):
        raise CannotExpressError("the model's shape is not stated")
    return ModelSpec(
        name=row["model"],
        num_layers=number(row, "layers"),
        hidden_size=number(row, "hidden"),
        num_heads=number(row, "heads"),
        num_kv_heads=number(row, "kv_heads", number(row, "heads")),
        head_dim=number(row, "head_dim", number(row, "hidden") // number(row, "heads")),
        mlp_size=number(row, "mlp"),
        vocab_size=number(row, "vocab"),
        gated_mlp=row["gated"] == "1",
        tied_embeddings=row["tied"] == "1",
    )


_LOGIT_BYTES = 14.0
"""In bf16, their log-softmax and two gradients in fp32; the slopes of ALST's longest sequences say 14.6."""


def refuse_unclear(row: Row) -> None:
    """Refuse points that lack values that a prediction needs, or that have settings that cannot be described here.

    Raises:
        CannotExpressError: with the reason.
    """
    if row["quality"] in ("no length", "no batch", "unclear") or not row["seq_len"]:
        raise CannotExpressError("length, batch or plan not stated in the source")
    if row["precision"] == "fp8":
        raise CannotExpressError("fp8")
    if number(row, "tp") > 1 or number(row, "pp") > 1:
        raise CannotExpressError("tensor or pipeline parallelism of a given grid")
    if "in node" in row["zero"]:
        raise CannotExpressError("hybrid sharding (ZeRO inside a node, replicas between)")


def workload_of(row: Row, model: ModelSpec, constants: Constants | None = None) -> Workload:
    """Return the batch of one replica, in the bytes of the row's framework."""
    replicas, ranks = number(row, "dp"), number(row, "sp") * number(row, "cp")
    gradient, optimizer = _bytes_per_parameter(row)
    is_quantized, of_all = row["peft"] == "qlora", (constants or {}).get(ALL_CARDS, {})
    return Workload(
        seq_len=number(row, "seq_len"),
        micro_batch=number(row, "micro_batch"),
        micro_batches=number(row, "grad_accum"),
        causal=row["causal"] != "0",
        zero_stage=int(row["zero"][:1] or 0),
        activation_checkpointing=row["recompute"] == "full",
        selective_checkpointing=row["recompute"] == "selective",
        tiled_logits=row["loss"] not in ("whole", ""),
        tiled_mlp=row["tiled_mlp"] == "1",
        fused_kernels="Liger" in row["notes"] or row["loss"] == "fused",
        compiled=row["compile"] == "1",
        gradient_bytes=gradient,
        optimizer_bytes=optimizer,
        offload_activations="activations" in row["offload"],
        offload_optimizer="optimizer" in row["offload"],
        offload_parameters="parameters" in row["offload"],
        logit_bytes=None if _is_own(row) else _logit_bytes(row) or of_all.get("logit_bytes", _LOGIT_BYTES),
        adapter_rank=_rank(row) if row["peft"] != "full" else 0,
        trains_embedding=row["peft"] == "lora+emb",
        quantization=("gptq" if row["source"].startswith("QwenLM") else "nf4") if is_quantized else None,
        buffers=Buffers() if _is_deepspeed(row) else _UNUSED,
        data_parallel=replicas,
        zero_cluster=cluster_of(row, replicas * ranks, constants) if replicas > 1 else None,
    )


def _is_own(row: Row) -> bool:
    """Return whether the row is of this engine, which has its own loss."""
    return row["source"].startswith("ds_hetero") or row["where"].startswith("run.json of")


def _logit_bytes(row: Row) -> float | None:
    """Return the bytes of a logit of a whole loss in the row's framework.

    None for today's transformers, `_LOGIT_BYTES`.

    Until late in 2024 transformers copied shifted logits in fp32: 18.7, the slope of fsdp_qlora's table over the batch.
    Qwen's own model computes the loss in the type of the logits: slopes of its table over length.
    """
    if row["source"].startswith("QwenLM"):
        return 8.5 if row["peft"] == "qlora" else 12.0
    of_2024 = row["source"].startswith(("AnswerDotAI", "jzhang38/Easy", "Qihoo360")) or "Hugging Face" in row["where"]
    return 18.7 if of_2024 else None


def _rank(row: Row) -> int:
    stated = re.search(r"rank (\d+)", row["notes"])
    usual = {"QwenLM": 64, "AnswerD": 64, "Lightni": 8, "pytorch": 8, "unsloth": 32}
    return int(stated[1]) if stated else next((v for k, v in usual.items() if row["source"].startswith(k)), 16)


def _is_deepspeed(row: Row) -> bool:
    return (not _is_fsdp(row) and row["zero"] not in ("", "0") and row["peft"] == "full") or "DeepSpeed" in row["notes"]


def _is_fsdp(row: Row) -> bool:
    libraries = ("pytorch/", "Vector", "AnswerDotAI", "foundation", "jzhang38/Tiny")
    return "FSDP" in row["notes"] or row["source"].startswith(libraries)


def _bytes_per_parameter(row: Row) -> tuple[float, float]:
    """Return the bytes of a gradient and of the optimizer's state.

    FSDP keeps no bf16 shard beside its fp32 weights, which are counted as 2 of weights and 10 of state, and reduces
    gradients in fp32 unless the whole job is in bf16.
    """
    name = row["optimizer"]
    gradient, optimizer = 2.0, _OPTIMIZER_BYTES.get(name, 12.0)
    if _is_fsdp(row):
        gradient, optimizer = (2.0, 12.0) if "PURE" in row["notes"] else (4.0, 10.0)
    if row["source"].startswith("InternLM/InternEvo") and row["zero"] == "3":
        return 4.0, 22.0  # 28 bytes in all: the slope of its table of memory over the number of cards
    if row["peft"] != "full":  # in fp32 without a master weight; PEFT keeps the frozen embedding beside a trained one
        return (2.0, 10.0) if row["peft"] == "lora+emb" else (4.0, 8.0)
    if row["precision"] == "bf16 pure" or row["source"].startswith("VectorInstitute"):
        gradient, optimizer = 2.0, _BF16_OPTIMIZER_BYTES.get(name, 4.0)
    if name.startswith(("AdamW in backward", "AdamW8bit")) and "torchtune" in row["source"]:
        gradient = 0.01  # of one layer at a time
    return gradient, optimizer


def _host_bytes(row: Row) -> float | None:
    """Return the memory of a node's host if a source states it: ALST's nodes of 8 H100 have 1.9 TB."""
    return 1.9e12 if row["source"].startswith("snowflakedb") else None
