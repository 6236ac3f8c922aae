"""Tokens, heads and memory by rank on the page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import GIB, bytes_text
from ds_hetero.cost import CostModel, Prediction
from ds_hetero.reporting.html import Markup, Page, html_table
from ds_hetero.reporting.run_file import MeasuredRank
from ds_hetero.reporting.sections.rank_rows import RankRow, heads_of, rank_rows
from ds_hetero.values.schedule import Schedule


def shares(
    page: Page, cost: CostModel, schedule: Schedule, prediction: Prediction, measured: Sequence[MeasuredRank]
) -> list[Markup]:
    """Return two charts and a table.

    Args:
        page: that is being made.
        cost: of the replica.
        schedule: of the replica.
        prediction: of the schedule.
        measured: its ranks in a run; empty without.
    """
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
