"""Sections of the page on one schedule: work and memory of ranks, timelines, baselines, and documents of a row.

Timelines show a block and a step, the predicted one above the measured one; waiting is grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.common.units import GIB
from ds_hetero.cost import CalibratedCostModel, CostModel, Prediction
from ds_hetero.planner.documents.summary import DocumentsReport, report_documents
from ds_hetero.planner.results.candidates import Baselines
from ds_hetero.planner.results.schedule import compared
from ds_hetero.reporting.html import Markup, Page, html_table
from ds_hetero.reporting.run_file import MeasuredRank, TracedRange
from ds_hetero.reporting.shared_sections import RankRow, heads_of, rank_rows
from ds_hetero.reporting.timelines import KINDS, Bar, measured_block, measured_step, predicted_block, predicted_step
from ds_hetero.values.schedule import Schedule

MAX_LANES = 64  # lanes in the table
MAX_NAMED_DOCUMENTS = 12  # documents of a lane that are listed; further ones are counted
_HEADINGS = ("zone", "ranks", "documents", "tokens")
_BLOCK_KINDS = ("attention", "model", "all-to-all", "wait")
_STEP_KINDS = ("forward", "loss", "backward", "step", "wait")
_CAUSES = {
    "attention": "attention",
    "rest of the model": "model",
    "all-to-all": "all-to-all",
    "waiting": "wait",
    "optimizer, ZeRO and the rest": "step",
}
"""Causes of a step's time, each with the name of its colour in the charts."""
ROUNDING_SHARE = 1e-9  # times below this share of their row are rounding errors of differences, and shown as 0

_Timelines = Mapping[str, Sequence[Sequence[Bar]]]
"""Bars by rank, for ``"predicted"`` and ``"measured"``; an empty sequence if there is nothing to draw."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSections:
    """Makes the charts and tables of one replica, whose ranks begin at 0."""

    page: Page  # page to which the charts are added
    cost: CostModel
    schedule: Schedule
    prediction: Prediction
    ranks: Sequence[MeasuredRank] = ()  # mean step of every rank in a run; empty without a run
    trace: Sequence[Sequence[TracedRange]] = ()  # ranges of one step, by rank; empty without a trace

    @cached_property
    def rows(self) -> list[RankRow]:
        """Rows of the charts and tables: ranks, or sets of equal ranks."""
        return rank_rows(self.cost, self.schedule, bool(self.ranks))

    def shares(self) -> list[Markup]:
        """Make two charts and two tables of the work and the memory of every rank."""
        memory = self.cost.memory_parts(*self.cost.arrays(self.schedule))
        parts = {name.replace("_", " "): np.asarray(part).tolist() for name, part in memory.items() if np.max(part) > 0}
        tokens, heads = self.schedule.tokens(self.cost.workload.seq_len), heads_of(self.schedule)
        return [
            self._work_chart(tokens, heads),
            self._memory_chart(parts),
            self._shares_table(tokens, heads),
            self._memory_table(parts),
        ]

    def _work_chart(self, tokens: Mapping[int, int], heads: Mapping[int, int]) -> Markup:
        """Make the chart of tokens and heads, in percent."""
        token_percents = [round(100 * tokens[row.rank] / self.cost.workload.seq_len, 3) for row in self.rows]
        head_percents = [round(100 * heads[row.rank] / self.schedule.num_heads, 3) for row in self.rows]
        series = [{"name": "tokens", "values": token_percents, "colour": "attention"}]
        if any(percent < 100 for percent in head_percents):  # a rank that is a group of its own has all heads
            series.append({"name": "heads of its group", "values": head_percents, "colour": "model"})
        data = {"rows": self._names, "unit": "%", "series": series}
        label = "Tokens and query heads of a rank, as shares of all"
        return self.page.chart("bars", label, data, 90 + 44 * len(self.rows))

    @property
    def _names(self) -> list[str]:
        """Labels of `rows`, such as ``ranks 0-7, RTX-4090``."""
        return [f"{row.name}, {row.device}" for row in self.rows]

    def _memory_chart(self, parts: Mapping[str, Sequence[float]]) -> Markup:
        """Make the chart of memory by part, beside the capacity and the measured peak."""

        def gib(values: Sequence[float]) -> list[float]:
            """Return the GiB of each row of the chart, from the bytes of each rank."""
            return [round(values[row.rank] / GIB, 3) for row in self.rows]

        capacity_gib = gib(self.cost.capacity_bytes_D.tolist())
        series: list[JsonDict] = [{"name": "the card", "values": capacity_gib, "behind": True, "colour": "wait"}]
        series += ({"name": name, "values": gib(part), "stack": "need"} for name, part in parts.items())
        measured_text = ""
        if self.ranks:
            series.append({"name": "measured", "values": gib([rank.memory_bytes for rank in self.ranks])})
            measured_text = ", beside what was measured"
        label = f"Memory of a rank in GiB by cause{measured_text}; in grey what the card has"
        data = {"rows": self._names, "unit": "GiB", "series": series}
        return self.page.chart("bars", label, data, 120 + (52 if self.ranks else 36) * len(self.rows))

    def _memory_table(self, parts: Mapping[str, Sequence[float]]) -> Markup:
        """Make the table of the ranks' memory by cause."""
        cells = [[row.name, *(f"{part[row.rank] / GIB:.2f}" for part in parts.values())] for row in self.rows]
        return html_table(["", *parts], cells, "Memory of a rank by cause, GiB")

    def _shares_table(self, tokens: Mapping[int, int], heads: Mapping[int, int]) -> Markup:
        """Make the table of the ranks' work and memory."""
        prediction = self.prediction
        headings = ["", "device", "tokens", "heads", "busy", "memory, GiB", "of"]
        headings += ["measured, GiB"] if self.ranks else []
        cells = []
        for row in self.rows:
            rank = row.rank
            busy = f"{prediction.busy_s[rank] / prediction.block_s:.0%}"
            memory = bytes_text(prediction.memory_bytes[rank]), bytes_text(self.cost.capacity_bytes_D[rank])
            measured = [bytes_text(self.ranks[rank].memory_bytes)] if self.ranks else []
            shares = row.name, row.device, f"{tokens[rank]:,}", heads[rank]
            cells.append([*shares, busy, *memory, *measured])
        return html_table(headings, cells, "Shares and memory of a rank")

    def baselines(self) -> list[Markup]:
        """Make a chart and a table of the baselines, which are uniform schedules."""
        baselines, prediction = Baselines.under(self.cost), self.prediction
        rows = [("this plan", time_text(prediction.block_s), f"{prediction.tokens_per_s:,.0f}", "1.00 x", "")]
        rates = {"this plan": prediction.tokens_per_s}
        for candidate in baselines.candidates:
            if candidate.schedule == self.schedule:
                continue
            other = candidate.prediction
            reason = compared(candidate.name, other, prediction).reason
            faster = f"{prediction.tokens_per_s / other.tokens_per_s:.2f} x"
            rows.append((candidate.name, time_text(other.block_s), f"{other.tokens_per_s:,.0f}", faster, reason))
            if other.feasible:
                rates[candidate.name] = other.tokens_per_s
        rows += [(name, "-", "-", "-", reason) for name, reason in baselines.missing.items()]
        series = [{"name": "tokens/s", "values": list(rates.values()), "colour": "model"}]
        data = {"rows": list(rates), "unit": "", "series": series}
        label = "Tokens per second of this plan and of those that fit"
        headings = ("schedule", "a block", "tokens/s", "this plan is faster by", "why it loses")
        return [
            self.page.chart("bars", label, data, 90 + 34 * len(rates)),
            html_table(headings, rows, "Uniform schedules on the same cards"),
        ]

    def block(self) -> list[Markup | str]:
        """Make a timeline and two tables of one block, or a sentence if the timeline would be too large."""
        prediction, predicted = self.prediction, self._predicted_block
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
        timelines = {"predicted": predicted, "measured": measured_block(self.trace)}
        return [
            self._timeline("A block, forward and backward of one layer; waiting is grey", timelines, _BLOCK_KINDS),
            html_table(("part", "time", "share"), rows, "A predicted block by part, on the rank that takes longest"),
            self._kinds_table(timelines, _BLOCK_KINDS, "A block by rank"),
        ]

    @cached_property
    def _predicted_block(self) -> list[list[Bar]]:
        """What each rank does during a predicted block, as bars by rank; see `ds_hetero.reporting.timelines`."""
        return predicted_block(self.cost, self.schedule, self.prediction)

    def step(self) -> list[Markup]:
        """Make a timeline, a chart and a table of one optimizer step."""
        predicted = predicted_step(self.cost, self.schedule, self.prediction)
        timelines = {"predicted": predicted, "measured": measured_step(self.trace)}
        names: list[str] = []
        rows: list[list[float]] = []
        causes = self._predicted_causes()
        for row in self.rows:
            names.append(f"{row.name} predicted" if self.ranks else row.name)
            rows.append(causes[row.rank])
            if self.ranks:
                rank = self.ranks[row.rank]
                names.append(f"{row.name} measured")
                waiting_s = rank.ring_wait_s + rank.idle_s + rank.hop_s + rank.bubble_s
                rows.append([rank.attention_s, rank.model_s, rank.all_to_all_s, waiting_s, rank.sync_s + rank.rest_s])
        series = []
        for i, (name, colour) in enumerate(_CAUSES.items()):
            series.append({"name": name, "values": [row[i] for row in rows], "stack": "step", "colour": colour})
        label = "A step by cause" + (": predicted above measured" if self.ranks else ", predicted")
        texts = [[name, *map(time_text, row), time_text(sum(row))] for name, row in zip(names, rows, strict=True)]
        when = "A step: what a rank does when; waiting is grey"
        data = {"rows": names, "unit": "s", "series": series}
        return [
            self._timeline(when, timelines, _STEP_KINDS),
            self.page.chart("bars", label, data, 110 + 32 * len(names)),
            html_table(("", *_CAUSES, "a step"), texts, label),
        ]

    def _predicted_causes(self) -> list[list[float]]:
        """Return for every rank how many seconds of a predicted step each of `_CAUSES` takes."""
        cost, prediction, blocks = self.cost, self.prediction, self._predicted_block
        repeats = cost.model.num_layers * cost.workload.micro_batches
        loss_s = prediction.parts_s.get("loss_s", 0.0) * cost.workload.micro_batches
        rows = []
        for rank in self.schedule.ranks:
            bars: Sequence[Bar] = blocks[rank] if blocks else [("model", 0.0, prediction.busy_s[rank])]
            seconds_by_kind = dict.fromkeys(KINDS, 0.0)
            for kind, start_s, stop_s in bars:
                seconds_by_kind[kind] += (stop_s - start_s) * repeats
            busy = [seconds_by_kind["attention"], seconds_by_kind["model"] + loss_s, seconds_by_kind["all-to-all"]]
            step_s = max(prediction.iteration_s - prediction.block_s * repeats - loss_s, 0.0)
            waiting_s = max(prediction.iteration_s - sum(busy) - step_s, 0.0)
            rows.append([*busy, waiting_s, step_s])
        return rows

    def _timeline(self, label: str, timelines: _Timelines, kinds: Sequence[str]) -> Markup:
        """Make the chart of timelines: for every row the predicted bars, and below them the measured ones."""
        names: list[str] = []
        bars: list[list[float]] = []
        for row in self.rows:
            for source, bars_by_rank in timelines.items():
                if bars_by_rank:
                    for kind, start_s, stop_s in bars_by_rank[row.rank]:
                        bars.append([len(names), kinds.index(kind), start_s, stop_s])
                    names.append(f"{row.name} {source}" if timelines["measured"] else row.name)
        data = {"rows": names, "kinds": list(kinds), "bars": bars}
        return self.page.chart("timeline", label, data, 100 + 36 * len(names))

    def _kinds_table(self, timelines: _Timelines, kinds: Sequence[str], caption: str) -> Markup:
        """Make the table of the seconds of every kind of bar, by row."""
        rows = []
        for row in self.rows:
            for source, bars_by_rank in timelines.items():
                if bars_by_rank:
                    seconds = _seconds_by_kind(bars_by_rank[row.rank], kinds)
                    rounding_s = ROUNDING_SHARE * sum(seconds)
                    shown_s = [kind_s if kind_s > rounding_s else 0.0 for kind_s in seconds]
                    rows.append((f"{row.name} {source}", *map(time_text, shown_s)))
        return html_table(("", *kinds), rows, caption)


def _seconds_by_kind(bars: Sequence[Bar], kinds: Sequence[str]) -> list[float]:
    """Sum the seconds of all bars of every kind, in the order of ``kinds``."""
    durations: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, start_s, stop_s in bars:
        durations[kind].append(stop_s - start_s)
    return list(map(sum, durations.values()))


def add_documents(page: Page, cost: CostModel, schedule: Schedule, lengths: Sequence[int], suffix: str) -> None:
    """Add the section on one row of documents; add none under a cost model that cannot place documents.

    Args:
        lengths: tokens of each document.
        suffix: end of the title, `` of replica 1``; empty if there is one replica.
    """
    if not isinstance(cost, CalibratedCostModel):
        return
    report = report_documents(cost, schedule, lengths)
    loads, groups = report.loads, schedule.ring_groups
    units = [_ranks(group.ranks) for group in groups]
    zones = {zone: [0] * len(groups) for zone in ("local", "node", "cluster")}
    for lane in report.placement.lanes:
        tokens_of_unit = zones[lane.zone(report.costs.node)]
        for unit, tokens in zip(lane.members, lane.member_tokens, strict=True):
            tokens_of_unit[unit] += tokens
    label = "Tokens of every unit: in documents that are whole on it, cut inside its machine, cut between machines"
    series = [{"name": zone, "values": values, "stack": "tokens"} for zone, values in zones.items() if any(values)]
    chart = page.chart("bars", label, {"rows": units, "unit": "", "series": series}, 90 + 34 * len(units))
    other_placements = ", ".join(
        f"{name} {time_text(seconds) if seconds else 'not possible'}" for name, seconds in report.others_s.items()
    )
    page.section(
        f"Documents and their lanes{suffix}",
        f"One row of {len(report.documents)} documents, {report.placement.length:,} tokens: a block is predicted to "
        f"take {time_text(loads.predicted_s)}, at perfect balance {time_text(report.ideal_s)}. "
        f"Other placements: {other_placements}.",
        chart,
        html_table(_HEADINGS, _lanes(report, units), "Lanes, in the order of the forward"),
    )


def _lanes(report: DocumentsReport, units: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Return the table's rows: for every lane (documents that are split over the same units) zone, units and tokens."""
    index = {document: number for number, document in enumerate(report.documents)}
    rows = []
    for lane in report.placement.lanes[:MAX_LANES]:
        members = ", ".join(units[unit] for unit in lane.members)
        documents = ", ".join(str(index.get(span, "padding")) for span in lane.spans[:MAX_NAMED_DOCUMENTS])
        if len(lane.spans) > MAX_NAMED_DOCUMENTS:
            documents += f" and {len(lane.spans) - MAX_NAMED_DOCUMENTS} more"
        tokens = sum(stop - start for start, stop in lane.spans)
        rows.append((lane.zone(report.costs.node), members, documents, f"{tokens:,}"))
    return rows


def _ranks(ranks: Sequence[int]) -> str:
    """Return the text of consecutive ranks: ``rank 3`` or ``ranks 0-7``."""
    return f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
