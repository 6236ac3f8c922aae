"""Sections of the page about one schedule: shares of the ranks, uniform schedules, documents of a row, and timelines.

Timelines are of a block and of a step: predicted above measured, waiting in grey.
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

MAX_LANES = 64
MAX_NAMED_DOCUMENTS = 12  # of a lane; more are counted
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
"""Causes of a step's time, with their colours."""
LEAST_SHARE = 1e-9  # share of a row below which a time is what is left of differences

_Timelines = Mapping[str, Sequence[Sequence[Bar]]]
"""Bars of every rank, ``"predicted"`` and ``"measured"``; none where there is nothing to draw."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSections:
    """Charts and tables of one replica, whose ranks begin at 0."""

    page: Page  # takes the charts
    cost: CostModel
    schedule: Schedule
    prediction: Prediction
    ranks: Sequence[MeasuredRank] = ()  # a mean step of each in a run; empty without one
    trace: Sequence[Sequence[TracedRange]] = ()  # ranges of one step of each

    @cached_property
    def rows(self) -> list[RankRow]:
        """The ranks that are shown."""
        return rank_rows(self.cost, self.schedule, bool(self.ranks))

    def shares(self) -> list[Markup]:
        """Return two charts and a table of what every rank does and holds."""
        memory = self.cost.memory_parts(*self.cost.arrays(self.schedule))
        parts = {name.replace("_", " "): np.asarray(part).tolist() for name, part in memory.items() if np.max(part) > 0}
        tokens, heads = self.schedule.tokens(self.cost.workload.seq_len), heads_of(self.schedule)
        return [
            self._work_chart(tokens, heads),
            self._memory_chart(parts),
            self._shares_table(tokens, heads, parts),
        ]

    def _work_chart(self, tokens: Mapping[int, int], heads: Mapping[int, int]) -> Markup:
        of_tokens = [round(100 * tokens[row.rank] / self.cost.workload.seq_len, 3) for row in self.rows]
        of_heads = [round(100 * heads[row.rank] / self.schedule.num_heads, 3) for row in self.rows]
        series = [
            {"name": "tokens", "values": of_tokens, "colour": "attention"},
            {"name": "heads of its group", "values": of_heads, "colour": "model"},
        ]
        data = {"rows": self._names, "unit": "%", "series": series}
        label = "Tokens and query heads of a rank, as shares of all"
        return self.page.chart("bars", label, data, 90 + 44 * len(self.rows))

    @property
    def _names(self) -> list[str]:
        return [f"{row.name}, {row.device}" for row in self.rows]

    def _memory_chart(self, parts: Mapping[str, Sequence[float]]) -> Markup:
        def gib(values: Sequence[float]) -> list[float]:
            return [round(values[row.rank] / GIB, 3) for row in self.rows]

        card = gib(self.cost.capacity_bytes_D.tolist())
        series: list[JsonDict] = [{"name": "the card", "values": card, "behind": True, "colour": "wait"}]
        series += ({"name": name, "values": gib(part), "stack": "need"} for name, part in parts.items())
        beside = ""
        if self.ranks:
            series.append({"name": "measured", "values": gib([rank.memory_bytes for rank in self.ranks])})
            beside = ", beside what was measured"
        label = f"Memory of a rank in GiB by cause{beside}; in grey what the card has"
        data = {"rows": self._names, "unit": "GiB", "series": series}
        return self.page.chart("bars", label, data, 120 + (52 if self.ranks else 36) * len(self.rows))

    def _shares_table(
        self, tokens: Mapping[int, int], heads: Mapping[int, int], parts: Mapping[str, Sequence[float]]
    ) -> Markup:
        prediction = self.prediction
        headings = ["", "device", "tokens", "heads", "busy", *(f"{name}, GiB" for name in parts), "memory, GiB", "of"]
        headings += ["measured, GiB"] if self.ranks else []
        cells = []
        for row in self.rows:
            rank = row.rank
            busy = f"{prediction.busy_s[rank] / prediction.block_s:.0%}"
            memory_parts = (f"{part[rank] / GIB:.2f}" for part in parts.values())
            memory = bytes_text(prediction.memory_bytes[rank]), bytes_text(self.cost.capacity_bytes_D[rank])
            measured = [bytes_text(self.ranks[rank].memory_bytes)] if self.ranks else []
            shares = row.name, row.device, f"{tokens[rank]:,}", heads[rank]
            cells.append([*shares, busy, *memory_parts, *memory, *measured])
        return html_table(headings, cells, "Shares and memory of a rank")

    def baselines(self) -> list[Markup]:
        """Return a chart and a table of uniform schedules."""
        others, prediction = Baselines.under(self.cost), self.prediction
        rows = [("this plan", time_text(prediction.block_s), f"{prediction.tokens_per_s:,.0f}", "1.00 x", "")]
        rates = {"this plan": prediction.tokens_per_s}
        for candidate in others.candidates:
            if candidate.schedule == self.schedule:
                continue
            other = candidate.prediction
            reason = compared(candidate.name, other, prediction).reason
            faster = f"{prediction.tokens_per_s / other.tokens_per_s:.2f} x"
            rows.append((candidate.name, time_text(other.block_s), f"{other.tokens_per_s:,.0f}", faster, reason))
            if other.feasible:
                rates[candidate.name] = other.tokens_per_s
        rows += [(name, "-", "-", "-", reason) for name, reason in others.missing.items()]
        series = [{"name": "tokens/s", "values": list(rates.values()), "colour": "model"}]
        data = {"rows": list(rates), "unit": "", "series": series}
        label = "Tokens per second of this plan and of those that fit"
        headings = ("schedule", "a block", "tokens/s", "this plan is faster by", "why it loses")
        return [
            self.page.chart("bars", label, data, 90 + 34 * len(rates)),
            html_table(headings, rows, "Uniform schedules on the same cards"),
        ]

    def block(self) -> list[Markup | str]:
        """Return a chart and two tables of one block."""
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
        both = {"predicted": predicted, "measured": measured_block(self.trace)}
        return [
            self._timeline("A block, forward and backward of one layer; waiting is grey", both, _BLOCK_KINDS),
            html_table(("part", "time", "share"), rows, "A predicted block by part, on the rank that takes longest"),
            self._kinds_table(both, _BLOCK_KINDS, "A block by rank"),
        ]

    @cached_property
    def _predicted_block(self) -> list[list[Bar]]:
        return predicted_block(self.cost, self.schedule, self.prediction)

    def step(self) -> list[Markup]:
        """Return two charts and a table of one optimizer step."""
        predicted = predicted_step(self.cost, self.schedule, self.prediction)
        both = {"predicted": predicted, "measured": measured_step(self.trace)}
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
        when = "A step: what a rank does when; the waiting of a forward or backward is put at its end, in grey"
        data = {"rows": names, "unit": "s", "series": series}
        return [
            self._timeline(when, both, _STEP_KINDS),
            self.page.chart("bars", label, data, 110 + 32 * len(names)),
            html_table(("", *_CAUSES, "a step"), texts, label),
        ]

    def _predicted_causes(self) -> list[list[float]]:
        """Seconds of a predicted step in the order of `_CAUSES`, by rank."""
        cost, prediction, blocks = self.cost, self.prediction, self._predicted_block
        repeats = cost.model.num_layers * cost.workload.micro_batches
        loss_s = prediction.parts_s.get("loss_s", 0.0) * cost.workload.micro_batches
        rows = []
        for rank in self.schedule.ranks:
            bars: Sequence[Bar] = blocks[rank] if blocks else [("model", 0.0, prediction.busy_s[rank])]
            of_kind = dict.fromkeys(KINDS, 0.0)
            for kind, start_s, stop_s in bars:
                of_kind[kind] += (stop_s - start_s) * repeats
            busy = [of_kind["attention"], of_kind["model"] + loss_s, of_kind["all-to-all"]]
            step_s = max(prediction.iteration_s - prediction.block_s * repeats - loss_s, 0.0)
            waiting_s = max(prediction.iteration_s - sum(busy) - step_s, 0.0)
            rows.append([*busy, waiting_s, step_s])
        return rows

    def _timeline(self, label: str, both: _Timelines, kinds: Sequence[str]) -> Markup:
        names: list[str] = []
        bars: list[list[float]] = []
        for row in self.rows:
            for source, of_ranks in both.items():
                if of_ranks:
                    bars += [[len(names), kinds.index(kind), start, stop] for kind, start, stop in of_ranks[row.rank]]
                    names.append(f"{row.name} {source}" if both["measured"] else row.name)
        data = {"rows": names, "kinds": list(kinds), "bars": bars}
        return self.page.chart("timeline", label, data, 100 + 36 * len(names))

    def _kinds_table(self, both: _Timelines, kinds: Sequence[str], caption: str) -> Markup:
        rows = []
        for row in self.rows:
            for source, of_ranks in both.items():
                if of_ranks:
                    seconds = _seconds_by_kind(of_ranks[row.rank], kinds)
                    least_s = LEAST_SHARE * sum(seconds)
                    shown_s = [kind_s if kind_s > least_s else 0.0 for kind_s in seconds]
                    rows.append((f"{row.name} {source}", *map(time_text, shown_s)))
        return html_table(("", *kinds), rows, caption)


def _seconds_by_kind(bars: Sequence[Bar], kinds: Sequence[str]) -> list[float]:
    """Seconds of all bars of every kind."""
    durations: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, start_s, stop_s in bars:
        durations[kind].append(stop_s - start_s)
    return list(map(sum, durations.values()))


def add_documents(page: Page, cost: CostModel, schedule: Schedule, lengths: Sequence[int], of: str) -> None:
    """Add the section; nothing under a cost model that does not place documents."""
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
    others = ", ".join(
        f"{name} {time_text(seconds) if seconds else 'not possible'}" for name, seconds in report.others_s.items()
    )
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
    return f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
