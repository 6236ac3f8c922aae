"""Print and write the results of commands: a JSON object for machines, tables and lines for people, and files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_hetero.common.reading import JsonObject, shortened
from ds_hetero.common.tables import framed_table
from ds_hetero.common.terminal import fitted_text, terminal_width
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.common.text import rank_ranges as rank_ranges  # commands import it from here
from ds_hetero.cost.model import Prediction
from ds_hetero.errors import PlanError
from ds_hetero.values.plans.plan import SCENARIO
from ds_hetero.values.plans.stages import inner_text

if TYPE_CHECKING:
    from ds_hetero.cost.stages.stage import StageCosts
    from ds_hetero.planner.pipeline_search.finish import Finished

TEXT_WIDTH = 80  # columns of a terminal for which text is broken into lines
PICTURES = (".svg", ".png")
PLANS = (".json", ".html")


def check_out(out: Path | None, option: str = "--out", endings: Sequence[str] = ()) -> None:
    """Raise an error if a file cannot be written, before anything is computed.

    Args:
        out: the file; None if the option was left out.
        option: name of the option, for messages.
        endings: allowed endings of the file's name, such as ``.json``; empty if every name is allowed.

    Raises:
        PlanError: the name has another ending, is that of a folder, or lies in a folder that is not writable.
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


def check_folder(out: Path) -> None:
    """Refuse a folder that cannot be written, before anything is computed. Raises `PlanError`."""
    check_out(out / "README.md" if out.is_dir() else out)


def write_folder(out: Path, files: Mapping[str, str]) -> None:
    """Write files into a folder, which is made if it is missing. Raises `PlanError`: a fault such as a full disk."""
    try:
        out.mkdir(exist_ok=True)
    except OSError as error:
        raise PlanError(f"--out {shortened(str(out))} cannot be made: {_reason(error)}.") from None
    for name, text in files.items():
        write_out(out / name, text)


def write_out(out: Path, text: str) -> None:
    """Write ``text`` to the file of ``--out``. Raises `PlanError`: it cannot be written, as on a full disk."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--out {shortened(str(out))} cannot be written: {_reason(error)}.") from None


def _reason(error: Exception) -> str:
    """Return why a file cannot be written: the system's text of an `OSError`, else the message of the error."""
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


def print_lines(*lines: str) -> None:
    """Print lines for people, wrapped to the terminal. A file or a pipe gets each line whole."""
    print(fitted_text("\n".join(lines), terminal_width()))


def print_written(out: Path | None, remark: str = "") -> None:
    """Print the name of the written file with a remark; print nothing if no file was written."""
    if out is not None:
        print_lines(f"written to {out}{remark}")


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
        rows: cells of each row; None draws a line between two rows.
        title: text above the table.
        caption: text below the table.
        numbers: whether to align all columns but the first at the right.
    """
    print(framed_table(columns, rows, title, numbers=numbers))
    if caption is not None:
        print_lines(caption)


def wrapped(label: str, text: str, *, indent: int = 12) -> list[str]:
    """Break a text behind a label into lines of `TEXT_WIDTH` columns; further lines are indented as far as the text."""
    from textwrap import wrap

    first = label.ljust(indent) if label else " " * indent
    return wrap(text, TEXT_WIDTH, initial_indent=first, subsequent_indent=" " * (indent if label else indent + 2))


def aligned_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines whose columns are aligned by spaces, without a frame."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def prediction_lines(prediction: Prediction) -> list[str]:
    """Return three lines: the predicted time of a schedule, the range of this prediction, and the bottleneck."""
    shortest, longest = (time_text(seconds) for seconds in prediction.range_s)
    return [
        f"predicted:  {time_text(prediction.block_s)} per block, {time_text(prediction.iteration_s)} per iteration, "
        f"{prediction.tokens_per_s:,.0f} tokens/s ({terms_text(prediction)})",
        f"range:      {shortest} to {longest} per iteration in 8 of 10 cases; {prediction.confidence}",
        f"bottleneck: {prediction.bottleneck.text}",
    ]


def terms_text(prediction: Prediction) -> str:
    """Return the shares of a block's time with their names: ``non-attention 61 %, all-to-all 7 %, ring 32 %``."""
    names = ("non-attention", "all-to-all", "ring")
    return ", ".join(f"{name} {share}" for name, share in zip(names, term_shares(prediction), strict=True))


def term_shares(prediction: Prediction) -> list[str]:
    """Return three percentages of a block's time: outside attention, in all-to-alls, and in ring steps."""
    terms = prediction.terms
    terms_s = (terms.non_attention_s, terms.all_to_all_s, terms.ring_steps_s)
    return [f"{100 * seconds / prediction.block_s:.0f} %" for seconds in terms_s]


_COLUMNS = ("pipelines", "micro-batches", "stage", "devices", "layers", "time", "memory GiB", "of")


def print_pipelines(costs: StageCosts, finished: Finished) -> None:
    """Print a table with one row per stage; equal pipelines are printed once, with their number."""
    print_table(_COLUMNS, stage_rows(costs, finished))


def stage_rows(costs: StageCosts, finished: Finished) -> Iterator[tuple[str, ...] | None]:
    """Yield the row of each stage, and None, which draws a line, after each set of equal pipelines."""
    from ds_hetero.planner.pipeline_search.finish import memory_bytes

    memory = memory_bytes(costs, finished)
    for equal_pipelines in finished.makeups:
        number = equal_pipelines[0]
        pipeline, cut = finished.candidate.placed[number], finished.candidate.cuts[number]
        pipeline_cells = (f"{len(equal_pipelines)} x", f"{pipeline.micro_batches} of {pipeline.micro_batch_size}")
        for j, block in enumerate(pipeline.blocks):
            devices = [costs.pools.kinds[part.kind].device for part in block.parts]
            names = [f"{part.size} {device.name}" for part, device in zip(block.parts, devices, strict=True)]
            inner = "" if block.inner == "one" else f" {inner_text(block.inner, block.tensor_size)}"
            yield (
                *(pipeline_cells if j == 0 else ("", "")),  # in the first row of the pipeline only
                str(j),
                " + ".join(names) + inner,
                _layers_text(sum(cut.layers[:j]), cut.layers[j]),
                time_text(cut.forward_s[j] + cut.backward_s[j]),
                " + ".join(map(bytes_text, memory[number][j])),
                " + ".join(bytes_text(device.usable_bytes) for device in devices),
            )
        yield None


def _layers_text(first: int, count: int) -> str:
    """Return the layers of a stage, the last one included: ``0-5`` for six layers from layer 0; "-" for none."""
    if count == 0:
        return "-"
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
