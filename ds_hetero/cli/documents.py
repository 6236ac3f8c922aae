"""``ds-hetero show --documents`` and ``ds-hetero plan --lengths``: batches of documents on the units of a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds_hetero.cli.lengths import draw_batches, read_distribution, read_lengths
from ds_hetero.cli.plan import ranks_text
from ds_hetero.cli.plan_files import scenario_dict, write_plan
from ds_hetero.cli.printing import check_out, print_json
from ds_hetero.cli.scenario import Scenario, read_schedule
from ds_hetero.common.text import time_text
from ds_hetero.common.units import GB
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.errors import PlanError
from ds_hetero.planner.documents.for_lengths import PlannedForLengths, plan_for_lengths
from ds_hetero.planner.documents.report import DocumentsReport, report_documents

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["plan", "show"]

MAX_ROWS = 64  # of a table; more ranks or lanes are counted
SAMPLED_BATCHES = 8


def show(
    scenario: Scenario,
    source: str,
    documents: Path | None,
    sample: str | None,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Place one batch and print where its documents lie.

    Args:
        scenario: cluster, model, workload; the workload's length is that of the row.
        source: schedule file or strategy; ``plan`` is the best schedule for this batch.
        documents: file of the lengths.
        sample: distribution to draw them from, instead.
        seed: of the drawing.
        out: picture to write.
        as_json: print one JSON object instead of tables.
    """
    if (documents is None) == (sample is None):
        raise PlanError("give either --documents FILE or --sample DISTRIBUTION.")
    if out is not None:
        from ds_hetero.cli.documents_picture import check_format

        check_format(out)
        check_out(out)
    cost = _calibrated(scenario)
    length = scenario.workload.seq_len
    if sample is not None:
        lengths = draw_batches(read_distribution(sample), length, 1, seed)[0]
    else:
        lengths = read_lengths(str(documents))
    schedule = plan_for_lengths(cost, [lengths]).best.schedule if source == "plan" else read_schedule(source, cost)
    report = report_documents(cost, schedule, lengths)
    if out is not None:
        from ds_hetero.cli.documents_picture import draw

        draw(scenario, report).savefig(out, dpi=120)
    if as_json:
        print_json({**report.to_dict(), **({"out": str(out)} if out else {})})
        return
    from rich.console import Console

    console = Console()
    console.print(_lanes_table(report))
    console.print(_ranks_table(scenario, report))
    console.print("\n".join(_summary(report)), markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        print(f"written to {out}")


def plan(scenario: Scenario, source: str, seed: int, out: Path | None, as_json: bool) -> None:
    """Choose the schedule whose units place batches of a distribution fastest.

    Args:
        scenario: cluster, model, workload; the workload's length is that of a row.
        source: file of lengths, or the name of a distribution.
        seed: of the drawing.
        out: schedule file to write.
        as_json: print one JSON object instead of a table.
    """
    if out is not None:
        check_out(out)
    distribution = read_distribution(source)
    batches = draw_batches(distribution, scenario.workload.seq_len, SAMPLED_BATCHES, seed)
    planned = plan_for_lengths(_calibrated(scenario), batches)
    schedule = planned.best.schedule
    if out is not None:
        described = scenario_dict(
            scenario.cost_model, scenario.model, scenario.workload, [scenario.cluster], batches[0]
        )
        write_plan(out, schedule.to_dict(), described)
    if as_json:
        predicted = {**planned.best.to_dict(), "tokens_per_s": _tokens_per_s(scenario, planned)}
        candidates = [each.to_dict() for each in planned.candidates]
        lengths = {"distribution": distribution.name, "batches": planned.batches, "seed": seed}
        print_json(
            {"schedule": schedule.to_dict(), "predicted": predicted, "candidates": candidates, "lengths": lengths}
        )
        return
    from rich.console import Console

    console = Console()
    console.print(_candidates_table(planned))
    lines = [
        f"{scenario.model.name}, rows of {scenario.workload.seq_len} tokens, documents as in {distribution.name}, "
        f"{planned.batches} batches",
        f"chosen:     {planned.best.name}",
        f"predicted:  {time_text(planned.best.block_s or 0.0)} per block, "
        f"{_tokens_per_s(scenario, planned):,.0f} tokens/s through all blocks",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        print(f"written to {out}")


def _calibrated(scenario: Scenario) -> CalibratedCostModel:
    cost = scenario.cost
    if not isinstance(cost, CalibratedCostModel):
        raise PlanError(f"documents are placed under the calibrated cost model, not the {cost.name} one.")
    return cost


def _tokens_per_s(scenario: Scenario, planned: PlannedForLengths) -> float:
    """Tokens per second of the blocks alone, of all layers."""
    work = scenario.workload
    return work.seq_len * work.micro_batch / ((planned.best.block_s or 1.0) * scenario.model.num_layers)


def _candidates_table(planned: PlannedForLengths) -> Table:
    """One row per schedule: mean time of a block, against the ideal of single ranks and against the stream."""
    from rich.table import Table

    ideal = planned.candidates[0].ideal_s

    table = Table("schedule", "block", "over ideal", "as a stream", title="Schedules for batches of documents")
    for each in planned.candidates:
        if each.block_s is None or each.stream_s is None:
            table.add_row(each.name, "-", "-", str(each.reason))
        else:
            over = f"{each.block_s / ideal:.3f}"
            table.add_row(each.name, time_text(each.block_s), over, time_text(each.stream_s))
    return table


def _lanes_table(report: DocumentsReport) -> Table:
    """One row per lane: its zone, its ranks, its documents by index, and the tokens of every unit."""
    from rich.table import Table

    table = Table("zone", "ranks", "documents", "tokens", "tokens by unit", title="Lanes, in the order of the forward")
    index = {document: str(j) for j, document in enumerate(report.documents)}
    groups = report.placement.schedule.ring_groups
    for lane in report.placement.lanes[:MAX_ROWS]:
        names = [index.get(span, "padding") for span in lane.spans]
        shown = ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
        tokens = [sum(column) for column in zip(*lane.tokens, strict=True)]
        by_unit = ", ".join(f"{count:,}" for count in tokens[:8]) + (", ..." if len(tokens) > 8 else "")
        ranks = ranks_text([rank for unit in lane.members for rank in groups[unit].ranks])
        way = ", by heads" if lane.by_heads else ", proxies" if lane.proxies else ""
        table.add_row(lane.zone(report.costs.node) + way, ranks, shown, f"{sum(tokens):,}", by_unit)
    if len(report.placement.lanes) > MAX_ROWS:
        table.add_row("...", f"{len(report.placement.lanes) - MAX_ROWS} more lanes", "", "", "")
    return table


def _ranks_table(scenario: Scenario, report: DocumentsReport) -> Table:
    """One row per unit: what it holds, how long it computes and receives, against the ideal."""
    from rich.table import Table

    table = Table(
        "ranks", "device", "tokens", "linear", "attention", "receives", "over ideal", title="Load of one block"
    )
    loads = report.loads
    for unit, group in enumerate(report.placement.schedule.ring_groups[:MAX_ROWS]):
        busy_s = loads.linear_s[unit] + loads.attention_s[unit]
        times = (loads.linear_s[unit], loads.attention_s[unit], loads.received_s[unit])
        device = scenario.cluster.devices[group.ranks[0]].name
        over = f"{busy_s / report.ideal_s:.3f}"
        table.add_row(ranks_text(group.ranks), device, f"{loads.tokens[unit]:,}", *map(time_text, times), over)
    if report.placement.schedule.ring_size > MAX_ROWS:
        table.add_row(f"{report.placement.schedule.ring_size - MAX_ROWS} more", *[""] * 6)
    return table


def _summary(report: DocumentsReport) -> list[str]:
    """Lines for people: the time against the ideal and against other placements, tokens by zone, bytes by link."""
    predicted_s, length = report.loads.predicted_s, report.placement.length
    zones = ", ".join(f"{zone} {100 * count / length:.0f} %" for zone, count in report.zone_tokens.items())
    others = [
        f"{name} {time_text(seconds)} ({seconds / predicted_s:.2f} x)" if seconds else f"{name} not possible"
        for name, seconds in report.others_s.items()
    ]
    sent = report.bytes_by_link
    return [
        f"{len(report.documents)} documents, {length:,} tokens",
        f"predicted:  {time_text(predicted_s)} per block, ideal {time_text(report.ideal_s)}; slowest computes "
        f"{report.balance:.3f} of the ideal",
        f"others:     {', '.join(others)}",
        f"tokens:     {zones}",
        f"sent:       {sent['inside_nodes'] / GB:.2f} GB inside nodes, "
        f"{sent['between_nodes'] / GB:.2f} GB between nodes, per block",
    ]
