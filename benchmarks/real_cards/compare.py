"""Compare predicted with measured values, by kind of point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.real_cards.points import (
    CannotExpressError,
    Constants,
    Row,
    card_of,
    cluster_of,
    kernel_of,
    model_of,
    number,
    refuse_unclear,
    workload_of,
)
from ds_hetero.cluster.attention_rates import with_attention
from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.files import load_cluster
from ds_hetero.common.units import GIB, TERA
from ds_hetero.cost import CostModel, Prediction, make_cost_model
from ds_hetero.cost.passes import BlockPasses
from ds_hetero.cost.terms.flops import ATTENTION_BACKWARD_FLOPS, ATTENTION_FORWARD_FLOPS
from ds_hetero.cost.terms.ring import ring_finish_s
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import HeteroError, PlanError
from ds_hetero.models import ModelSpec, load_model
from ds_hetero.planner.strategies import strategy
from ds_hetero.values.baselines import COMPARED, ring, ulysses, usp
from ds_hetero.values.schedule import Schedule

LONGEST = 2**25  # tokens
BEST_SHAPE = 1.18  # rate of the best shape over that of a training's products: A100 0.87 and 0.77, H100 0.80 and 0.65

Compare = Callable[[Row, Constants | None], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A point that was compared.

    Args:
        row: of the measurements.
        kind: of the quantity.
        predicted: in the unit of ``measured``; for rates their inverse, so that above 1 is too slow.
        measured: by the source.
        range_error: half of the prediction's range, see `ds_hetero.cost.model.Prediction`.
    """

    row: Row
    kind: str
    predicted: float
    measured: float
    range_error: float = 0.0

    @property
    def is_inside(self) -> bool:
        """Whether the measured step is inside the prediction's range."""
        return -self.range_error / (1 + self.range_error) <= 1 / (1 + self.error) - 1 <= self.range_error

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """A point that cannot be compared, and the reason."""

    row: Row
    kind: str
    reason: str


def compare(
    rows: Iterable[Row], constants: Constants | None = None, kinds: Iterable[str] | None = None
) -> tuple[list[Comparison], list[Refusal]]:
    """Compare all points that this project can express.

    Args:
        rows: of the measurements.
        constants: replace the catalogue's, see `benchmarks.real_cards.fit`.
        kinds: of comparisons; left out, all.
    """
    done: list[Comparison] = []
    refused: list[Refusal] = []
    wanted_kinds = None if kinds is None else set(kinds)
    for row in rows:
        kinds_of_row = list(_kinds(row))
        if not kinds_of_row and wanted_kinds is None:
            refused.append(Refusal(row, row["kind"] or "kind not stated", "nothing of this project to compare with"))
        for kind, how in kinds_of_row:
            if wanted_kinds is None or kind in wanted_kinds:
                outcome = _compared(row, kind, how, constants)
                (done if isinstance(outcome, Comparison) else refused).append(outcome)  # type: ignore[arg-type]
    return done, refused


def _compared(row: Row, kind: str, how: Compare, constants: Constants | None) -> Comparison | Refusal:
    """Compare one point; return a refusal with its reason if it cannot be read or expressed."""
    try:
        predicted, measured = how(row, constants)
        ranged = card_of(row, constants).error if kind.startswith("time") else 0.0
    except (CannotExpressError, HeteroError) as reason:
        return Refusal(row, kind, str(reason).partition(". ")[0])
    except (ValueError, ArithmeticError, LookupError) as error:
        return Refusal(row, kind, f"a cell cannot be read: {error}")
    if not (np.isfinite(predicted) and np.isfinite(measured) and predicted > 0 and measured > 0):
        return Refusal(row, kind, "nothing above zero is predicted or measured")
    return Comparison(row, kind, predicted, measured, ranged)


def _kinds(row: Row) -> Iterator[tuple[str, Compare]]:
    """Yield the kinds of quantities that a row has, each with the function that returns (predicted, measured)."""
    kind = row["kind"]
    if kind in ("time", "time+memory") and (row["tokens_per_s_per_gpu"] or row["step_s"]):
        yield {"full": "time", "qlora": "time_qlora"}.get(row["peft"], "time_lora"), _time
    if row["memory_gib"]:
        yield "memory", _memory
    if row["max_seq_len"]:
        yield "max_length", _max_length
    others: dict[str, tuple[str, Compare]] = {
        "attention": ("attention", _attention),
        "matmul": ("matmul", _matmul),
        "attention over GPUs": ("attention_over_gpus", _attention_over_gpus),
        "time, unlike GPUs": ("unlike_time", _unlike),
        "gain, unlike GPUs": ("unlike_gain", _unlike),
    }
    if kind in others:
        yield others[kind]


# --- training


def _predicted(
    row: Row, constants: Constants | None, seq_len: int | None = None
) -> tuple[CostModel, Schedule, Prediction]:
    """Return cost model, schedule and prediction of a row."""
    model = model_of(row)
    work = workload_of(row, model, constants)
    work = replace(work, seq_len=seq_len) if seq_len else work
    ranks = number(row, "sp") * number(row, "cp")
    cost = make_cost_model("calibrated", cluster_of(row, ranks, constants), model, work)
    schedule = _schedule(row, model)
    return cost, schedule, cost.predict(schedule)


def _schedule(row: Row, model: ModelSpec) -> Schedule:
    inner, outer = number(row, "sp"), number(row, "cp")
    heads = (model.num_heads, model.num_kv_heads)
    if outer == 1:
        return ulysses(inner, *heads)
    return ring(outer, *heads) if inner == 1 else usp(inner * outer, *heads, inner)


def _time(row: Row, constants: Constants | None) -> tuple[float, float]:
    """Return the predicted and the measured seconds of a step."""
    refuse_unclear(row)
    tokens = number(row, "seq_len") * number(row, "micro_batch") * number(row, "grad_accum")
    ranks = number(row, "sp") * number(row, "cp")
    _, _, prediction = _predicted(row, constants)
    if not row["tokens_per_s_per_gpu"]:
        return prediction.iteration_s, float(row["step_s"])
    return prediction.iteration_s, tokens / ranks / float(row["tokens_per_s_per_gpu"])


def _memory(row: Row, constants: Constants | None) -> tuple[float, float]:
    """Return the predicted and the measured peak memory."""
    refuse_unclear(row)
    cost, _, prediction = _predicted(row, constants)
    need, card = max(prediction.memory_bytes), cost.cluster.devices[0]
    if row["memory_of"] != "active":
        need *= 1 + card.fragmentation
    if row["memory_of"] in ("card", "nvidia-smi"):
        need += card.reserved_bytes
    return need / GIB, float(row["memory_gib"])


def _max_length(row: Row, constants: Constants | None) -> tuple[float, float]:
    """Return the predicted and the measured longest sequence that fits."""
    refuse_unclear(row)

    def fits(tokens: int) -> bool:
        return _predicted(row, constants, tokens)[2].feasible

    step = 64 * number(row, "sp") * number(row, "cp")
    low, high = 0, step
    while high < LONGEST and fits(high):
        low, high = high, 2 * high
    while high - low > max(step, low // 200):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return float(max(low, 1)), float(row["max_seq_len"])


# --- kernels


def _attention(row: Row, constants: Constants | None) -> tuple[float, float]:
    """Return the predicted and the measured time of an attention, or its gradient.

    FLOPs as FlashAttention-2 counts them.
    """
    passes = BlockPasses(*_attention_job(row, constants))
    computed_s, operations = 0.0, 0.0
    tokens, heads = number(row, "seq_len"), number(row, "heads")
    pairs = number(row, "micro_batch") * heads * tokens**2 * (0.5 if row["causal"] != "0" else 1.0)
    seconds_P = passes.attention_alone_s()
    for name, count, seconds in zip(
        ("forward", "backward"), (ATTENTION_FORWARD_FLOPS, ATTENTION_BACKWARD_FLOPS), seconds_P, strict=True
    ):
        if name in row["unit"]:
            computed_s += float(seconds)
            operations += count * number(row, "head_dim") * pairs
    return computed_s, operations / (float(row["value"]) * TERA)


def _attention_job(row: Row, constants: Constants | None, ranks: int = 1):  # type: ignore[no-untyped-def]
    """Return cluster, model and workload of an attention alone."""
    if not row["head_dim"]:
        raise CannotExpressError("the model's shape is not stated")
    heads, width = number(row, "heads"), number(row, "head_dim")
    shape = {"num_heads": heads, "num_kv_heads": number(row, "kv_heads", heads), "head_dim": width}
    model = ModelSpec(name="attention", num_layers=1, hidden_size=heads * width, mlp_size=4, vocab_size=4, **shape)
    work = Workload(
        seq_len=number(row, "seq_len"),
        micro_batch=number(row, "micro_batch"),
        causal=row["causal"] != "0",
        zero_stage=0,
        activation_checkpointing=False,
    )
    return cluster_of(row, ranks, constants), model, work


def _matmul(row: Row, constants: Constants | None) -> tuple[float, float]:
    """Return predicted and measured times of a matmul of the best shape, a sixth faster than those in training."""
    card = card_of(row, constants, next(iter(CATALOGUE[row["gpu"]].attention)) if row["gpu"] in CATALOGUE else None)
    share = card.efficiency.matmul / (1 + card.efficiency.matmul_half_tokens / 8192)
    return 1 / (card.peak_flops_per_s * min(BEST_SHAPE * share, 1.0)), 1 / (float(row["value"]) * TERA)


def _attention_over_gpus(row: Row, constants: Constants | None) -> tuple[float, float]:
    """Return the predicted and the measured forward of attention over several GPUs, with its messages."""
    cluster, model, work = _attention_job(row, constants, number(row, "sp") * number(row, "cp"))
    cost = make_cost_model("calibrated", cluster, model, work)
    grouping, tokens_D, heads_D = cost.arrays(_schedule(row, model))
    passes = BlockPasses(cluster, model, work)
    assigned = passes.assigned(grouping, tokens_D[None], heads_D[None])
    forward = passes.rings(assigned)[0]._replace(start_s=np.asarray(assigned.exchange_BK))
    return float(ring_finish_s(forward)[0]), 1 / float(row["value"])


# --- HexiSeq's testbeds


def _unlike(row: Row, constants: Constants | None) -> tuple[float, float]:
    """Return predicted and measured values of a schedule on unequal GPUs.

    They are inverse tokens per second, or Algorithm 1's gain over the fastest uniform schedule.
    """
    if not row["gpu"].startswith("hexiseq") or not row["model"] or not row["seq_len"]:
        raise CannotExpressError("length, batch or plan not stated in the source")
    cluster = load_cluster(row["gpu"])
    nodes = [
        replace(
            node, devices=tuple(with_attention(d, "flash_attn_2", CATALOGUE[d.name].attention) for d in node.devices)
        )
        for node in cluster.nodes
    ]
    work = Workload(seq_len=number(row, "seq_len"), micro_batches=8)
    cost = make_cost_model("calibrated", replace(cluster, nodes=tuple(nodes)), load_model(row["model"]), work)
    if "gain" not in row["kind"]:
        try:
            schedule = strategy("hexiseq" if row["attention"] == "plan" else row["attention"], cost)
        except PlanError:  # heads that the ranks do not divide: as equal as whole heads allow
            schedule = ulysses(cluster.num_ranks, cost.model.num_heads, cost.model.num_kv_heads)
        return 1 / cost.predict(schedule).tokens_per_s, 1 / float(row["value"])
    rates = []
    for name in COMPARED:
        try:
            uniform = cost.predict(strategy(name, cost))
        except PlanError:
            continue
        rates += [uniform.tokens_per_s] if uniform.feasible else []
    return cost.predict(strategy("hexiseq", cost)).tokens_per_s / max(rates), float(row["value"])


def length_of(row: Row) -> str:
    """Return the class of lengths of a point."""
    if not row["seq_len"]:
        return "-"
    classes = ((1024, "1K"), (4096, "4K"), (16384, "16K"), (65536, "64K"), (262144, "256K"))
    length = int(row["seq_len"])
    return next((f"up to {name}" for most, name in classes if length <= most), "longer")


def kernel_name(row: Row) -> str:
    """Return GPU and kernel of a point."""
    return f"{row['gpu']}, {kernel_of(row)}"
