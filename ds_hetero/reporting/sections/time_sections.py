"""The timelines of a block and of a step on the page: predicted above measured, waiting in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_hetero.common.text import time_text
from ds_hetero.cost import CostModel, Prediction
from ds_hetero.reporting.html import Markup, Page, html_table
from ds_hetero.reporting.run_file import MeasuredRank, TracedRange
from ds_hetero.reporting.sections.rank_rows import RankRow, rank_rows
from ds_hetero.reporting.timelines import KINDS, Bar, measured_block, measured_step, predicted_block, predicted_step
from ds_hetero.values.schedule import Schedule

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
    """Measurements of the ranks of one replica; both are empty without a run.

    Args:
        ranks: a mean step of each.
        trace: ranges of one step of each.
    """

    ranks: Sequence[MeasuredRank] = ()
    trace: Sequence[Sequence[TracedRange]] = ()


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
    page: Page,
    label: str,
    ranks: Sequence[RankRow],
    both: Mapping[str, Sequence[Sequence[Bar]]],
    kinds: Sequence[str],
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
