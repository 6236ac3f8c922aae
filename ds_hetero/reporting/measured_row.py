"""Make rows of ``measurements.csv``, the table of public measurements, from a run or from a self-test's report.

`python -m benchmarks.real_cards` reads this table, and compares predictions with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from statistics import median

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.names import catalogue_name
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import JsonObject, read_file, shortened
from ds_hetero.common.units import GB, GIB, TERA
from ds_hetero.cost.workload import OPTIMIZER_BYTES, Workload
from ds_hetero.errors import PlanError
from ds_hetero.reporting.run_file import RunFile
from ds_hetero.reporting.scenario import PlanScenario
from ds_hetero.values.baselines import ring, ulysses, usp
from ds_hetero.values.schedule import Schedule

COLUMNS = (
    *("id", "source", "where", "kind", "gpu", "gpus", "nodes", "gpus_per_node", "link", "network_gb_per_s", "model"),
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp", "gated", "vocab", "tied", "seq_len", "micro_batch"),
    *("grad_accum", "global_batch", "zero", "dp", "tp", "pp", "sp", "cp", "causal", "precision", "recompute"),
    *("optimizer", "peft", "offload", "attention", "loss", "tiled_mlp", "compile", "tokens_per_s_per_gpu", "step_s"),
    *("tflops", "mfu_percent", "memory_gib", "memory_of", "max_seq_len", "value", "unit", "quality", "notes"),
)
ATTENTION = {  # names of attention kernels in this project, and in the table
    "flash_attn_2": "flash-attn 2",
    "flash_attn_3": "flash-attn 3",
    "flash_attn_4": "flash-attn 4",
    "triton": "Triton",
    "torch": "torch",
}
OPTIMIZERS = {  # names of optimizers in `OPTIMIZER_BYTES`, and in the table
    "adamw": "AdamW",
    "adamw-8bit": "AdamW8bit",
    "adamw-bf16": "AdamW in bf16",
    "lion": "Lion",
    "muon": "Muon",
    "sgd": "SGD",
    "adafactor": "Adafactor",
}


def measured_row(
    run: RunFile, *, attention: str | None, optimizer: str | None = None, source: str
) -> dict[str, object]:
    """Return the row of a run, by column; empty text means "not stated".

    Args:
        run: run on cards of one kind, with one uniform schedule for all replicas.
        attention: attention kernel of the run, a key of `ATTENTION`; None if unknown.
        optimizer: optimizer of the run, a key of `OPTIMIZERS`; None: the only one with as many bytes of state.
        source: who measured it.

    Raises:
        PlanError: the table has no columns for such a run; the message says why, and which run would do.
    """
    scenario, schedule = _uniform(run)
    work, model = scenario.workload, scenario.model
    cluster, replicas = scenario.clusters[0], len(run.plan.pipelines)
    degrees = _degrees(schedule)
    pipeline = run.plan.pipelines[0]
    micro_batch = pipeline.micro_batch_size or work.micro_batch
    micro_batches = pipeline.micro_batches or work.micro_batches
    shape = {
        "model": model.name, "layers": model.num_layers, "hidden": model.hidden_size, "heads": model.num_heads,
        "kv_heads": model.num_kv_heads, "head_dim": model.head_dim, "mlp": model.mlp_size,
        "gated": int(model.gated_mlp), "vocab": model.vocab_size, "tied": int(model.tied_embeddings),
    }  # fmt: skip
    measured = {
        "tokens_per_s_per_gpu": round(
            work.seq_len * micro_batch * micro_batches * replicas / run.step_s / len(run.plan.ranks), 2
        ),
        "step_s": round(run.step_s, 5),
        "memory_gib": round(max(rank.memory_bytes for rank in run.ranks) / GIB, 3),
        "memory_of": "torch",
    }
    return {
        **dict.fromkeys(COLUMNS, ""),
        "source": source, "where": f"run.json of {run.written}", "kind": "time+memory", "quality": "table",
        **_cards(cluster), **shape, **_trained(work), "optimizer": _optimizer(work, optimizer),
        "seq_len": work.seq_len, "micro_batch": micro_batch, "grad_accum": micro_batches,
        "global_batch": micro_batch * micro_batches * replicas,
        "dp": replicas, "tp": 1, "pp": 1, "sp": degrees[0], "cp": degrees[1],
        "attention": "" if attention is None else ATTENTION[attention],
        **measured,
        "notes": _notes(run, work),
    }  # fmt: skip


def _uniform(run: RunFile) -> tuple[PlanScenario, Schedule]:
    """Return the scenario of the run and the schedule of its replicas. Raises `PlanError`: no row can describe them."""
    if run.scenario is None:
        raise PlanError(
            "this run.json does not have the cards and the model of the job, since the cost model did not know them. "
            'Name them with "cluster" in the section, and run the job again.'
        )
    devices = chain.from_iterable(cluster.devices for cluster in run.scenario.clusters)
    names = {device.name for device in devices}
    if len(names) > 1:
        raise PlanError(
            f"a row describes one kind of card, and the run had {', '.join(sorted(names))}. Measure each kind alone."
        )
    if not run.plan.is_replicas:
        raise PlanError(
            "a row describes sequence-parallel replicas, and the run had pipelines of stages. Measure without "
            "pipelines."
        )
    if run.changes:
        raise PlanError(
            'a row describes one schedule, and the schedule changed during the run. Measure with "replan" off.'
        )
    first = run.plan.schedules[0].shifted(0)
    batches = {(pipeline.micro_batch_size, pipeline.micro_batches) for pipeline in run.plan.pipelines}
    if len(batches) > 1 or any(schedule.shifted(0) != first for schedule in run.plan.schedules):
        raise PlanError(
            "a row describes equal replicas, and the replicas of the run differ. Measure one of them alone."
        )
    return run.scenario, first


def _degrees(schedule: Schedule) -> tuple[int, int]:
    """Return the ranks per group and the number of groups. Raises `PlanError`: the schedule is not uniform."""
    ranks, groups = len(schedule.ranks), len(schedule.groups)
    try:
        uniform = _uniform_schedule(ranks, groups, schedule.num_heads, schedule.num_kv_heads)
    except PlanError:
        uniform = None
    if uniform is None or _shares(uniform) != _shares(schedule):
        raise PlanError(
            'a row describes a uniform schedule, and the run had another one. Run it with "ulysses", "ring" or "usp".'
        )
    return ranks // groups, groups


def _uniform_schedule(ranks: int, groups: int, num_heads: int, num_kv_heads: int) -> Schedule:
    """Return the uniform schedule of ``groups`` equal groups. Raises `PlanError`: the heads do not divide by them."""
    if groups == 1:
        return ulysses(ranks, num_heads, num_kv_heads)
    if groups == ranks:
        return ring(ranks, num_heads, num_kv_heads)
    return usp(ranks, num_heads, num_kv_heads, ranks // groups)


def _shares(schedule: Schedule) -> list[tuple[object, ...]]:
    """Return ranks, tokens and heads of every group, so that equal schedules compare equal.

    Tokens are relative to the mean over all ranks: weights (1, 1) and (2, 2) both give (1, 1).
    """
    total = sum(sum(group.tokens) for group in schedule.groups)
    shares: list[tuple[object, ...]] = []
    for group in schedule.groups:
        tokens = tuple(weight * len(schedule.ranks) / total for weight in group.tokens)
        shares.append((group.ranks, tokens, group.heads))
    return shares


def _cards(cluster: Cluster) -> dict[str, object]:
    """Return the columns on devices and links."""
    name, sizes = cluster.devices[0].name, [len(node.devices) for node in cluster.nodes]
    return {
        "gpu": name,
        "gpus": cluster.num_ranks,
        "nodes": len(sizes),
        "gpus_per_node": max(sizes),
        "link": CATALOGUE[name].link_name if name in CATALOGUE else "",
        "network_gb_per_s": cluster.network.bytes_per_s / GB if len(sizes) > 1 else "",
    }


def _trained(work: Workload) -> dict[str, object]:
    """Return the columns on the settings of the training: ZeRO stage, precision, recomputation, offloads, loss."""
    offloads = {
        "activations": work.offload_activations,
        "optimizer": work.offload_optimizer,
        "parameters": work.offload_parameters,
    }
    return {
        "zero": work.zero_stage,
        "causal": int(work.causal),
        "precision": "bf16" if work.element_bytes == 2 else "fp32",
        "recompute": _recomputation(work),
        "peft": _adapters(work),
        "offload": "+".join(name for name, is_offloaded in offloads.items() if is_offloaded),
        "compile": "1" if work.compiled else "",
        "loss": _loss(work),
        "tiled_mlp": int(work.tiled_mlp),
    }


def _recomputation(work: Workload) -> str:
    """Return the value of the column ``recompute``."""
    if work.activation_checkpointing:
        return "full"
    return "selective" if work.selective_checkpointing else "none"


def _adapters(work: Workload) -> str:
    """Return the value of the column ``peft``."""
    if not work.adapter_rank:
        return "full"
    if work.trains_embedding:
        return "lora+emb"
    return "qlora" if work.quantization else "lora"


def _loss(work: Workload) -> str:
    """Return the value of the column ``loss``."""
    if work.fused_kernels:
        return "fused"
    return "chunked" if work.tiled_logits else "whole"


def _optimizer(work: Workload, name: str | None) -> str:
    """Return the table's name of the optimizer: of ``name``, or of the only one with as many bytes of state.

    Raises:
        PlanError: several optimizers have as many bytes of state, or none has, so that only a part was trained.
    """
    master_bytes = (
        4 if work.element_bytes == 4 and work.zero_stage == 0 else 0
    )  # fp32 weights are their own master copy
    candidates = [
        optimizer for optimizer, size in OPTIMIZER_BYTES.items() if size == work.optimizer_bytes + master_bytes
    ]
    if not candidates:
        raise PlanError(
            "a row describes training of all weights, or of adapters whose rank is known. The run had "
            f"{work.optimizer_bytes:.3g} bytes of optimizer state per parameter, so it trained only some weights. "
            "Measure a job that trains all weights, or adapters of one rank."
        )
    if name is None and len(candidates) > 1:
        raise PlanError(
            f"the run had {work.optimizer_bytes:g} bytes of optimizer state per parameter, as {', '.join(candidates)} "
            "have. Say with --optimizer which one it was."
        )
    return OPTIMIZERS[name or candidates[0]]


def _notes(run: RunFile, work: Workload) -> str:
    """Return the value of the column ``notes``."""
    versions = ", ".join(f"{name} {text}" for name, text in run.versions.items())
    rank = f"; rank {work.adapter_rank}" if work.adapter_rank else ""
    return f"DeepSpeed; {run.steps} steps{rank}; {versions}"


def read_report(path: Path) -> JsonObject | None:
    """Read a report of ``ds-hetero selftest --json``; None if the file is not one. Raises `PlanError`: not readable."""
    data = read_file(path, "run", PlanError)
    is_report = isinstance(data, Mapping) and {"healthy", "ranks", "lines"} <= data.keys()
    return data if is_report else None


def selftest_rows(report: JsonObject, *, source: str) -> list[dict[str, object]]:
    """Return rows with the matmul rates of a self-test's report, one for each kind of card.

    Args:
        source: who measured it.

    Raises:
        PlanError: the report is damaged, or has no matmul rates.
    """
    try:
        rates = _rates(report)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise PlanError(f"the report of the self-test is damaged: {type(error).__name__}: {error}.") from None
    if not rates:
        raise PlanError(
            "this self-test measured no matmuls: it ended before them, or an earlier release wrote it. Run ds-hetero "
            "selftest --json FILE again."
        )
    return [
        {
            **dict.fromkeys(COLUMNS, ""),
            "source": source, "where": "ds-hetero selftest", "kind": "matmul", "quality": "table",
            "gpu": card, "gpus": 1, "nodes": 1, "gpus_per_node": 1, "precision": precision,
            "value": round(median(card_rates), 2), "unit": "TFLOPS",
            "notes": f"median of {len(card_rates)} of {len(report['ranks'])} ranks at once; torch {torch}",
        }
        for (card, precision, torch), card_rates in rates.items()
    ]  # fmt: skip


def _rates(report: JsonObject) -> dict[tuple[str, str, str], list[float]]:
    """Return the matmul rates in TFLOPS by card, precision and release of torch."""
    rates = dict[tuple[str, str, str], list[float]]()
    for line in report["lines"]:
        if line["name"] != "products" or line.get("per_s") is None:
            continue
        for number in line["ranks"] or range(len(report["ranks"])):
            rank = report["ranks"][number]
            precision = "bf16" if "bfloat16" in rank["native_types"] else "fp16"
            rates.setdefault((_card_of(rank), precision, rank["torch"]), []).append(float(line["per_s"]) / TERA)
    return rates


def _card_of(rank: JsonObject) -> str:
    """Return the catalogue name of a rank's device. Raises `PlanError`: the catalogue lacks it."""
    name = catalogue_name(rank["device"], int(rank["memory_gib"] * GIB))
    if name is None:
        raise PlanError(
            "a row describes a card of the catalogue, "
            f"and the self-test ran on {shortened(rank['device'])}. Run it on a card that ds-hetero cards lists."
        )
    return name
