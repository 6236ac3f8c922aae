"""``ds-hetero show``: draws a schedule or a plan of pipelines, or shows where the documents of a batch lie."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds_hetero.cli.options import AS_JSON, FILE, PLAN_FILE, SEED
from ds_hetero.cli.printing import (
    PICTURES,
    check_out,
    print_json,
    print_lines,
    print_table,
    print_written,
    rank_ranges,
    write_plan,
)
from ds_hetero.cli.scenario import Scenario, predict_plan_file, read_schedule, scenario_options
from ds_hetero.cli.showing.save_picture import save_picture
from ds_hetero.common.reading import JsonDict
from ds_hetero.common.text import time_text
from ds_hetero.common.units import GB
from ds_hetero.errors import PlanError

if TYPE_CHECKING:
    from ds_hetero.planner.documents.summary import DocumentsReport

MAX_ROWS = 64  # rows of a table; a last row says how many more there are


@click.command
@scenario_options()
@click.option(
    "--out",
    type=FILE,
    help="Picture to write, .svg or .png, or the page of report, .html; may be left out with --documents and --sample.",
)
@click.option("--schedule", default="plan", help="Schedule file, output of plan --json, or a strategy's name.")
@PLAN_FILE
@click.option(
    "--documents", type=FILE, help="JSON file with the lengths of a row's documents: where they lie, and the load."
)
@click.option("--sample", help="The same for a row drawn from arxiv, github, prolong64k, or a file of lengths.")
@SEED
@AS_JSON
def show(
    scenario: Scenario, out: Path | None, schedule: str, plan: Path | None, as_json: bool, **of_batch: Any
) -> None:
    """Draw a schedule or a plan of pipelines with its timeline, or show where the documents of a batch lie."""
    if of_batch["documents"] is not None or of_batch["sample"] is not None:
        _show_documents(scenario, schedule, out, as_json, **of_batch)
        return
    if out is None:
        raise click.UsageError("give --out, the picture to write.")
    data = _show_schedule(scenario, schedule, out) if plan is None else _show_pipelines(scenario, plan, out)
    if as_json:
        print_json({"out": str(out), **data})
    else:
        print_written(out)


def _show_schedule(scenario: Scenario, source: str, out: Path) -> JsonDict:
    """Predict a schedule and write its picture or page; return both as data for ``--json``."""
    check_out(out, endings=(*PICTURES, ".html"))
    cost = scenario.cost
    schedule = read_schedule(source, cost)
    prediction = cost.predict(schedule)
    if out.suffix == ".html":
        write_plan(out, schedule.to_dict(), scenario.to_dict())
    else:
        from ds_hetero.cli.showing.schedule_picture import draw_schedule

        save_picture(draw_schedule(scenario, cost, schedule, prediction), out)
    return {"schedule": schedule.to_dict(), "predicted": prediction.to_dict()}


def _show_pipelines(scenario: Scenario, path: Path, out: Path) -> JsonDict:
    """Predict a plan of pipelines and write its picture or page; return both as data for ``--json``."""
    check_out(out, endings=(*PICTURES, ".html"))
    plan, costs, finished = predict_plan_file(scenario, path)
    if out.suffix == ".html":
        write_plan(out, plan.to_dict(), scenario.to_dict())
    else:
        from ds_hetero.cli.showing.pipelines_picture import draw_pipelines

        save_picture(draw_pipelines(costs, finished), out)
    return {"step_s": finished.step_s, "plan": plan.to_dict()}


def _show_documents(
    scenario: Scenario,
    source: str,
    out: Path | None,
    as_json: bool,
    documents: Path | None,
    sample: str | None,
    seed: int,
) -> None:
    """Place the documents of one batch on the ranks, and print where they lie and what every unit computes.

    Args:
        source: schedule file or strategy; ``plan`` searches for the best schedule for this batch.
    """
    from ds_hetero.cli.options import draw_batches, read_distribution, read_lengths
    from ds_hetero.planner.documents.for_lengths import plan_for_lengths
    from ds_hetero.planner.documents.summary import report_documents

    if (documents is None) == (sample is None):
        raise PlanError("give either --documents FILE or --sample DISTRIBUTION.")
    check_out(out, endings=PICTURES)
    cost = scenario.cost_of_documents
    if sample is not None:
        (lengths,) = draw_batches(read_distribution(sample), scenario.workload.seq_len, 1, seed)
    else:
        lengths = read_lengths(str(documents))
    schedule = plan_for_lengths(cost, [lengths]).best.schedule if source == "plan" else read_schedule(source, cost)
    report = report_documents(cost, schedule, lengths)
    if out is not None:
        from ds_hetero.cli.showing.documents_picture import draw_documents

        save_picture(draw_documents(scenario, report), out)
    if as_json:
        print_json({**report.to_dict(), **({"out": str(out)} if out else {})})
        return
    print_table(
        ("zone", "ranks", "documents", "tokens", "tokens by unit"),
        _lane_rows(report),
        "Lanes, in the order of the forward",
    )
    columns = ("ranks", "device", "tokens", "linear", "attention", "receives", "over ideal")
    print_table(columns, _unit_rows(scenario, report), "Load of one block")
    print_lines(*_summary(report))
    print_written(out)


def _lane_rows(report: DocumentsReport) -> Iterator[tuple[str, ...]]:
    """Yield a row for each lane: zone, ranks, indices of its documents, and tokens of every unit."""
    index = {document: str(j) for j, document in enumerate(report.documents)}
    groups = report.placement.schedule.ring_groups
    for lane in report.placement.lanes[:MAX_ROWS]:
        names = [index.get(span, "padding") for span in lane.spans]
        documents = ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
        tokens = lane.member_tokens
        by_unit = ", ".join(f"{count:,}" for count in tokens[:8]) + (", ..." if len(tokens) > 8 else "")
        ranks = chain.from_iterable(groups[unit].ranks for unit in lane.members)
        exchange = ""
        if lane.by_heads:
            exchange = ", by heads"
        elif lane.proxies:
            exchange = ", proxies"
        yield lane.zone(report.costs.node) + exchange, rank_ranges(list(ranks)), documents, f"{sum(tokens):,}", by_unit
    if len(report.placement.lanes) > MAX_ROWS:
        yield "...", f"{len(report.placement.lanes) - MAX_ROWS} more lanes", "", "", ""


def _unit_rows(scenario: Scenario, report: DocumentsReport) -> Iterator[tuple[str, ...]]:
    """Yield a row for each unit: ranks, device, tokens, times of computing and receiving, and computing over ideal."""
    loads = report.loads
    for unit, group in enumerate(report.placement.schedule.ring_groups[:MAX_ROWS]):
        busy_s = loads.linear_s[unit] + loads.attention_s[unit]
        times = (loads.linear_s[unit], loads.attention_s[unit], loads.received_s[unit])
        device = scenario.cluster.devices[group.ranks[0]].name
        over_ideal = f"{busy_s / report.ideal_s:.3f}"
        yield rank_ranges(group.ranks), device, f"{loads.tokens[unit]:,}", *map(time_text, times), over_ideal
    if report.placement.schedule.ring_size > MAX_ROWS:
        yield f"{report.placement.schedule.ring_size - MAX_ROWS} more", *[""] * 6


def _summary(report: DocumentsReport) -> list[str]:
    """Return lines on the time of a block, compared with the ideal and other placements, and on tokens and traffic."""
    predicted_s, length = report.loads.predicted_s, report.placement.length
    zones = ", ".join(f"{zone} {100 * count / length:.0f} %" for zone, count in report.zone_tokens.items())
    other_placements = [
        f"{name} {time_text(seconds)} ({seconds / predicted_s:.2f} x)" if seconds else f"{name} not possible"
        for name, seconds in report.others_s.items()
    ]
    sent, moves = report.bytes_by_link, report.placement.moves
    moved = sum(move.tokens for move in moves)
    return [
        f"{len(report.documents)} documents, {length:,} tokens",
        f"predicted:  {time_text(predicted_s)} per block, ideal {time_text(report.ideal_s)}; slowest computes "
        f"{report.balance:.3f} of the ideal",
        f"others:     {', '.join(other_placements)}",
        f"tokens:     {zones}",
        *([f"moved:      {moved:,} tokens to other ranks before attention, and back after it"] if moves else []),
        f"sent:       {sent['inside_nodes'] / GB:.2f} GB inside nodes, "
        f"{sent['between_nodes'] / GB:.2f} GB between nodes, per block",
    ]
