"""Output of the commands: one JSON object for machines, tables and lines for people, and files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_hetero.common.reading import JsonObject, shortened
from ds_hetero.common.tables import framed_table
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.cost.model import Prediction
from ds_hetero.errors import PlanError
from ds_hetero.values.plans.plan import SCENARIO

if TYPE_CHECKING:
    from ds_hetero.cost.stages.stage import StageCosts
    from ds_hetero.planner.pipeline_search.finish import Finished

PICTURES = (".svg", ".png")
PLANS = (".json", ".html")


def check_out(out: Path | None, option: str = "--out", endings: Sequence[str] = ()) -> None:
    """Refuse a file that cannot be written, before anything is computed. Raises `PlanError`: the reason.

    Args:
        endings: of file names, one for each kind of file that the command writes; empty for any name.
    """
    if out is None:
        return
    if endings and out.suffix not in endings:
        raise PlanError(f"{option} must end in {' or '.join(endings)}, got {shortened(str(out))}.")
    try:
        folder, is_folder = out.resolve().parent, out.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a name that a file cannot have
        raise PlanError(f"{option} {shortened(str(out))} cannot be written: {_reason(error)}.") from None
    if is_folder or not os.access(folder, os.W_OK):
        reason = "it is a folder" if is_folder else f"{shortened(str(folder))} is not a writable folder"
        raise PlanError(f"{option} {shortened(str(out))} cannot be written: {reason}.")


def write_out(out: Path, text: str) -> None:
    """Write the file of ``--out``. Raises `PlanError`: a fault that `check_out` cannot see, such as a full disk."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--out {shortened(str(out))} cannot be written: {_reason(error)}.") from None


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else shortened(str(error))


def write_plan(out: Path, plan: JsonObject, scenario: JsonObject) -> None:
    """Write a plan with its scenario: as a plan file, or as the page of ``report`` if ``out`` ends in .html."""
    if out.suffix == ".html":
        from ds_hetero.reporting.described_plan import DescribedPlan
        from ds_hetero.reporting.plan_page import plan_page
        from ds_hetero.reporting.scenario import read_scenario
        from ds_hetero.values.plans import read_plan

        write_out(out, plan_page(DescribedPlan(plan=read_plan(plan), scenario=read_scenario(scenario))))
        return
    write_out(out, json.dumps({**plan, SCENARIO: scenario}, indent=1) + "\n")


def print_json(data: JsonObject) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(data, allow_nan=False))


def print_written(out: Path | None, remark: str = "") -> None:
    """Print the name of the written file, if there is one."""
    if out is not None:
        print(f"written to {out}{remark}")


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    title: str | None = None,
    *,
    caption: str | None = None,
    numbers: bool = False,
) -> None:
    """Print a table.

    Args:
        rows: the cells of each row; None draws a line.
        numbers: whether to align all columns but the first at the right.
    """
    print(framed_table(columns, rows, title, numbers=numbers))
    if caption is not None:
        print(caption)


def prediction_lines(prediction: Prediction) -> list[str]:
    """Return three lines: the prediction of a schedule, its range, and its bottleneck."""
    least, most = (time_text(seconds) for seconds in prediction.range_s)
    return [
        f"predicted:  {time_text(prediction.block_s)} per block, {time_text(prediction.iteration_s)} per iteration, "
        f"{prediction.tokens_per_s:,.0f} tokens/s ({terms_text(prediction)})",
        f"range:      {least} to {most} per iteration in 8 of 10 cases; {prediction.confidence}",
        f"bottleneck: {prediction.bottleneck.text}",
    ]


def terms_text(prediction: Prediction) -> str:
    """Return the shares of a block's time with their names: ``non-attention 61 %, all-to-all 7 %, ring 32 %``."""
    names = ("non-attention", "all-to-all", "ring")
    return ", ".join(f"{name} {share}" for name, share in zip(names, term_shares(prediction), strict=True))


def term_shares(prediction: Prediction) -> list[str]:
    """Return the shares of a block's time: outside attention, in all-to-alls, in ring steps."""
    terms = prediction.terms
    parts = (terms.non_attention_s, terms.all_to_all_s, terms.ring_steps_s)
    return [f"{100 * seconds / prediction.block_s:.0f} %" for seconds in parts]


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return ranks as ranges: ``0-3, 7``."""
    ranges: list[tuple[int, int]] = []  # first and last rank
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


_COLUMNS = ("pipelines", "micro-batches", "stage", "devices", "layers", "time", "memory GiB", "of")


def print_pipelines(costs: StageCosts, finished: Finished) -> None:
    """Print a table of the stages, one row per stage; equal pipelines are printed once."""
    print_table(_COLUMNS, _rows(costs, finished))


def _rows(costs: StageCosts, finished: Finished) -> Iterator[tuple[str, ...] | None]:
    from ds_hetero.planner.pipeline_search.finish import memory_bytes

    memory = memory_bytes(costs, finished)
    for equal_pipelines in finished.makeups:
        number = equal_pipelines[0]
        pipeline, cut = finished.candidate.placed[number], finished.candidate.cuts[number]
        pipeline_cells = (f"{len(equal_pipelines)} x", f"{pipeline.micro_batches} of {pipeline.micro_batch_size}")
        for j, block in enumerate(pipeline.blocks):
            devices = [costs.pools.kinds[part.kind].device for part in block.parts]
            names = [f"{part.size} {device.name}" for part, device in zip(block.parts, devices, strict=True)]
            inner = "" if block.inner == "one" else f" {block.inner}"
            yield (
                *(pipeline_cells if j == 0 else ("", "")),  # in the first row of the pipeline only
                str(j),
                " + ".join(names) + inner,
                f"{sum(cut.layers[:j])}-{sum(cut.layers[: j + 1])}",
                time_text(cut.forward_s[j] + cut.backward_s[j]),
                " + ".join(map(bytes_text, memory[number][j])),
                " + ".join(bytes_text(device.usable_bytes) for device in devices),
            )
        yield None
