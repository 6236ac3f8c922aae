"""Sections of the page about one schedule: shares of the ranks, uniform schedules, documents of a row, and timelines.

Timelines are of a block and of a step: predicted above measured, waiting in grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import GIB, bytes_text, time_text
from ds_hetero.cost import CalibratedCostModel, CostModel, Prediction
from ds_hetero.planner.documents.summary import DocumentsReport, report_documents
from ds_hetero.planner.planned import Baselines, compared
from ds_hetero.reporting.html import Markup, Page, html_table
from ds_hetero.reporting.run_file import MeasuredRank, TracedRange
from ds_hetero.reporting.shared_sections import RankRow, heads_of, rank_rows
from ds_hetero.reporting.timelines import KINDS, Bar, measured_block, measured_step, predicted_block, predicted_step
from ds_hetero.values.schedule import Schedule


def shares(
    page: Page, cost: CostModel, schedule: Schedule, prediction: Prediction, measured: Sequence[MeasuredRank]
) -> list[Markup]:
    """Add two charts and a table of a schedule on ``cost``'s replica; ``measured`` are its ranks in a run."""
    rows = rank_rows(cost, schedule, bool(measured))
    memory = cost.memory_parts(*cost.arrays(schedule))
    parts = {name.replace("_", " "): np.asarray(part).tolist() for name, part in memory.items() if np.max(part) > 0}
    return [
        _work_chart(page, cost, schedule, rows),
        _memory_chart(page, cost, rows, parts, measured),
        _table(cost, schedule, prediction, rows, parts, measured),
    ]


def _names(rows: Sequence[RankRow]) -> list[str]:
    return [f"{row.name}, {row.device}" for row in rows]


def _work_chart(page: Page, cost: CostModel, schedule: Schedule, rows: Sequence[RankRow]) -> Markup:
    seq_len = cost.workload.seq_len
    tokens, heads = schedule.tokens(seq_len), heads_of(schedule)
    of_tokens = [round(100 * tokens[row.rank] / seq_len, 3) for row in rows]
    of_heads = [round(100 * heads[row.rank] / schedule.num_heads, 3) for row in rows]
    series = [
        {"name": "tokens", "values": of_tokens, "colour": "attention"},
        {"name": "heads of its group", "values": of_heads, "colour": "model"},
    ]
    data = {"rows": _names(rows), "unit": "%", "series": series}
    return page.chart("bars", "Tokens and query heads of a rank, as shares of all", data, 90 + 44 * len(rows))


def _memory_chart(
    page: Page,
    cost: CostModel,
    rows: Sequence[RankRow],
    parts: dict[str, list[float]],
    measured: Sequence[MeasuredRank],
) -> Markup:
    def gib(values: Sequence[float]) -> list[float]:
        return [round(values[row.rank] / GIB, 3) for row in rows]

    series: list[JsonDict] = [
        {"name": "the card", "values": gib(cost.capacity_bytes_D.tolist()), "behind": True, "colour": "wait"},
        *({"name": name, "values": gib(part), "stack": "need"} for name, part in parts.items()),
    ]
    if measured:
        series.append({"name": "measured", "values": gib([rank.memory_bytes for rank in measured])})
    label = (
        f"Memory of a rank in GiB by cause{', beside what was measured' if measured else ''}; in grey what the card has"
    )
    data = {"rows": _names(rows), "unit": "GiB", "series": series}
    return page.chart("bars", label, data, 120 + (52 if measured else 36) * len(rows))


def _table(
    cost: CostModel,
    schedule: Schedule,
    prediction: Prediction,
    rows: Sequence[RankRow],
    parts: dict[str, list[float]],
    measured: Sequence[MeasuredRank],
) -> Markup:
    tokens, heads = schedule.tokens(cost.workload.seq_len), heads_of(schedule)
    headings = ["", "device", "tokens", "heads", "busy", *(f"{name}, GiB" for name in parts), "memory, GiB", "of"]
    headings += ["measured, GiB"] if measured else []
    cells = [
        [
            *(row.name, row.device, f"{tokens[row.rank]:,}", heads[row.rank]),
            f"{prediction.busy_s[row.rank] / prediction.block_s:.0%}",
            *(f"{part[row.rank] / GIB:.2f}" for part in parts.values()),
            bytes_text(prediction.memory_bytes[row.rank]),
            bytes_text(cost.capacity_bytes_D[row.rank]),
            *([bytes_text(measured[row.rank].memory_bytes)] if measured else []),
        ]
        for row in rows
    ]
    return html_table(headings, cells, "Shares and memory of a rank")


def baselines(page: Page, cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[Markup]:
    """Return a chart and a table."""
    others = Baselines.under(cost)
    rows = [("this plan", time_text(prediction.block_s), f"{prediction.tokens_per_s:,.0f}", "1.00 x", "")]
    rates = [("this plan", prediction.tokens_per_s)]
    for candidate in others.candidates:
        if candidate.schedule == schedule:
            continue
        other = candidate.prediction
        reason = compared(candidate.name, other, prediction).reason
        faster = f"{prediction.tokens_per_s / other.tokens_per_s:.2f} x"
        rows.append((candidate.name, time_text(other.block_s), f"{other.tokens_per_s:,.0f}", faster, reason))
        if other.feasible:
            rates.append((candidate.name, other.tokens_per_s))
    rows += [(name, "-", "-", "-", reason) for name, reason in others.missing.items()]
    chart = page.chart(
        "bars",
        "Tokens per second of this plan and of those that fit",
        {
            "rows": [name for name, _ in rates],
            "unit": "",
            "series": [{"name": "tokens/s", "values": [rate for _, rate in rates], "colour": "model"}],
        },
        90 + 34 * len(rates),
    )
    headings = ("schedule", "a block", "tokens/s", "this plan is faster by", "why it loses")
    return [chart, html_table(headings, rows, "Uniform schedules on the same cards")]


MAX_LANES = 64
_HEADINGS = ("zone", "ranks", "documents", "tokens")


def add_documents(page: Page, cost: CostModel, schedule: Schedule, lengths: Sequence[int], of: str) -> None:
    """Add the section; nothing under a cost model that does not place documents."""
    if not isinstance(cost, CalibratedCostModel):
        return
    report = report_documents(cost, schedule, lengths)
    loads, groups = report.loads, schedule.ring_groups
    units = [_ranks(group.ranks) for group in groups]
    zones = {zone: [0] * len(groups) for zone in ("local", "node", "cluster")}
    for lane in report.placement.lanes:
        for tokens in lane.tokens:
            for unit, count in zip(lane.members, tokens, strict=True):
                zones[lane.zone(report.costs.node)][unit] += count
    chart = page.chart(
        "bars",
        "Tokens of every unit: in documents that are whole on it, cut inside its machine, cut between machines",
        {
            "rows": units,
            "unit": "",
            "series": [
                {"name": zone, "values": values, "stack": "tokens"} for zone, values in zones.items() if any(values)
            ],
        },
        90 + 34 * len(units),
    )
    others = ", ".join(f"{name} {time_text(s) if s else 'not possible'}" for name, s in report.others_s.items())
    page.section(
        f"Documents and their lanes{of}",
        f"One row of {len(report.documents)} documents, {report.placement.length:,} tokens: a block is predicted to "
        f"take {time_text(loads.predicted_s)}, at perfect balance {time_text(report.ideal_s)}. "
        f"Other placements: {others}.",
        chart,
        html_table(_HEADINGS, _lanes(report, units), "Lanes, in the order of the forward"),
    )


def _lanes(report: DocumentsReport, units: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Row of the table for every lane."""
    index = {document: j for j, document in enumerate(report.documents)}
    return [
        (
            lane.zone(report.costs.node),
            ", ".join(units[unit] for unit in lane.members),
            ", ".join(str(index.get(span, "padding")) for span in lane.spans[:12])
            + (f" and {len(lane.spans) - 12} more" if len(lane.spans) > 12 else ""),
            f"{sum(stop - start for start, stop in lane.spans):,}",
        )
        for lane in report.placement.lanes[:MAX_LANES]
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


_BLOCK_KINDS = ("attention", "model", "all-to-all", "wait")
_STEP_KINDS = ("forward", "loss", "backward", "step", "wait")
_CAUSES = {
    "attention": "attention",
    "rest of the model": "model",
    "all-to-all": "all-to-all",
    "waiting": "wait",
    "optimizer, ZeRO and the rest": "step",
}
"""Causes of a step's time, with their colours."""
ROUNDING = 1e-9  # share of a row below which a time is what is left of differences


@dataclass(frozen=True, slots=True)
class MeasuredReplica:
    """Measurements of the ranks of one replica; both are empty without a run."""

    ranks: Sequence[MeasuredRank] = ()  # a mean step of each
    trace: Sequence[Sequence[TracedRange]] = ()  # ranges of one step of each


def block(
    page: Page, cost: CostModel, schedule: Schedule, prediction: Prediction, measured: MeasuredReplica
) -> list[Markup | str]:
    """Return a chart and two tables of one block."""
    predicted = predicted_block(cost, schedule, prediction)
    if not predicted:
        return ["The timeline of a schedule of this size is not drawn."]
    terms = prediction.terms
    parts = {
        "outside attention": terms.non_attention_s,
        "all-to-all": terms.all_to_all_s,
        "ring steps": terms.ring_steps_s,
        "a block": prediction.block_s,
    }
    rows = [(name, time_text(seconds), f"{seconds / prediction.block_s:.0%}") for name, seconds in parts.items()]
    both = {"predicted": predicted, "measured": measured_block(measured.trace)}
    ranks = rank_rows(cost, schedule, bool(measured.ranks))
    return [
        _timeline(page, "A block, forward and backward of one layer; waiting is grey", ranks, both, _BLOCK_KINDS),
        html_table(("part", "time", "share"), rows, "A predicted block by part, on the rank that takes longest"),
        _kinds_table(ranks, both, _BLOCK_KINDS, "A block by rank"),
    ]


def step(
    page: Page, cost: CostModel, schedule: Schedule, prediction: Prediction, measured: MeasuredReplica
) -> list[Markup]:
    """Return two charts and a table of one optimizer step."""
    ranks = rank_rows(cost, schedule, bool(measured.ranks))
    both = {"predicted": predicted_step(cost, schedule, prediction), "measured": measured_step(measured.trace)}
    names: list[str] = []
    rows: list[list[float]] = []
    causes = _predicted_causes(cost, schedule, prediction)
    for row in ranks:
        names.append(f"{row.name} predicted" if measured.ranks else row.name)
        rows.append(causes[row.rank])
        if measured.ranks:
            own = measured.ranks[row.rank]
            names.append(f"{row.name} measured")
            waiting_s = own.ring_wait_s + own.idle_s + own.hop_s + own.bubble_s
            rows.append([own.attention_s, own.model_s, own.all_to_all_s, waiting_s, own.sync_s + own.rest_s])
    series = [
        {"name": name, "values": [row[i] for row in rows], "stack": "step", "colour": colour}
        for i, (name, colour) in enumerate(_CAUSES.items())
    ]
    label = "A step by cause" + (": predicted above measured" if measured.ranks else ", predicted")
    texts = [[name, *map(time_text, row), time_text(sum(row))] for name, row in zip(names, rows, strict=True)]
    when = "A step: what a rank does when; the waiting of a forward or backward is put at its end, in grey"
    return [
        _timeline(page, when, ranks, both, _STEP_KINDS),
        page.chart("bars", label, {"rows": names, "unit": "s", "series": series}, 110 + 32 * len(names)),
        html_table(("", *_CAUSES, "a step"), texts, label),
    ]


def _predicted_causes(cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[list[float]]:
    """Seconds of a predicted step in the order of `_CAUSES`, by rank."""
    repeats = cost.model.num_layers * cost.workload.micro_batches
    loss_s = prediction.parts_s.get("loss_s", 0.0) * cost.workload.micro_batches
    blocks = predicted_block(cost, schedule, prediction)
    rows = []
    for rank in schedule.ranks:
        bars: Sequence[Bar] = blocks[rank] if blocks else [("model", 0.0, prediction.busy_s[rank])]
        of_kind = dict.fromkeys(KINDS, 0.0)
        for kind, start_s, stop_s in bars:
            of_kind[kind] += (stop_s - start_s) * repeats
        known = [of_kind["attention"], of_kind["model"] + loss_s, of_kind["all-to-all"]]
        step_s = max(prediction.iteration_s - prediction.block_s * repeats - loss_s, 0.0)
        rows.append([*known, max(prediction.iteration_s - sum(known) - step_s, 0.0), step_s])
    return rows


def _timeline(
    page: Page, label: str, ranks: Sequence[RankRow], both: Mapping[str, Sequence[Sequence[Bar]]], kinds: Sequence[str]
) -> Markup:
    names: list[str] = []
    bars: list[list[float]] = []
    for row in ranks:
        for source, of_ranks in both.items():
            if of_ranks:
                bars += [[len(names), kinds.index(kind), start, stop] for kind, start, stop in of_ranks[row.rank]]
                names.append(f"{row.name} {source}" if both["measured"] else row.name)
    return page.chart("timeline", label, {"rows": names, "kinds": list(kinds), "bars": bars}, 100 + 36 * len(names))


def _kinds_table(
    ranks: Sequence[RankRow], both: Mapping[str, Sequence[Sequence[Bar]]], kinds: Sequence[str], caption: str
) -> Markup:
    rows = []
    for row in ranks:
        for source, of_ranks in both.items():
            if of_ranks:
                bars = of_ranks[row.rank]
                sums = [sum(stop - start for name, start, stop in bars if name == kind) for kind in kinds]
                least_s = ROUNDING * sum(sums)
                rows.append((f"{row.name} {source}", *(time_text(each if each > least_s else 0.0) for each in sums)))
    return html_table(("", *kinds), rows, caption)
