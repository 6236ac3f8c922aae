"""How commands write: one JSON object for machines, tables and lines for people, and files that can be written."""

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
    """Refuse a file that cannot be written, before anything is computed. Raises `PlanError`: why it cannot.

    Args:
        endings: of names, each of which is a kind of file that can be written; any name where there are none.
    """
    if out is None:
        return
    if endings and out.suffix not in endings:
        raise PlanError(f"{option} must end in {' or '.join(endings)}, got {shortened(str(out))}.")
    try:
        folder, is_folder = out.resolve().parent, out.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a name that no file can have
        raise PlanError(f"{option} {shortened(str(out))} cannot be written: {_reason(error)}.") from None
    if is_folder or not os.access(folder, os.W_OK):
        where = shortened(str(folder))
        reason = "it is a folder" if is_folder else f"{where} is no folder that may be written to"
        raise PlanError(f"{option} {shortened(str(out))} cannot be written: {reason}.")


def write_out(out: Path, text: str) -> None:
    """Write the file that ``--out`` names. Raises `PlanError` for what `check_out` cannot see, as a full disk."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--out {shortened(str(out))} cannot be written: {_reason(error)}.") from None


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else shortened(str(error))


def write_plan(out: Path, plan: JsonObject, scenario: JsonObject) -> None:
    """Write a plan with what it was made for: as its file, or where ``out`` ends in .html as the page of ``report``."""
    if out.suffix == ".html":
        from ds_hetero.reporting.described_plan import DescribedPlan
        from ds_hetero.reporting.plan_page import plan_page
        from ds_hetero.reporting.scenario import read_scenario
        from ds_hetero.values.plans import read_plan

        write_out(out, plan_page(DescribedPlan(plan=read_plan(plan), scenario=read_scenario(scenario))))
        return
    write_out(out, json.dumps({**plan, SCENARIO: scenario}, indent=1) + "\n")


def print_json(data: JsonObject) -> None:
    """One JSON object on stdout."""
    print(json.dumps(data, allow_nan=False))


def print_written(out: Path | None, remark: str = "") -> None:
    """Say what was written, if anything was."""
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
    """Print a table; a row that is None draws a line, and ``numbers`` are aligned at the right."""
    print(framed_table(columns, rows, title, numbers=numbers))
    if caption is not None:
        print(caption)


def prediction_lines(prediction: Prediction) -> list[str]:
    """Prediction of a schedule, how sure it is, and what limits it, in three lines."""
    least, most = (time_text(seconds) for seconds in prediction.range_s)
    return [
        f"predicted:  {time_text(prediction.block_s)} per block, {time_text(prediction.iteration_s)} per iteration, "
        f"{prediction.tokens_per_s:,.0f} tokens/s ({terms_text(prediction)})",
        f"range:      {least} to {most} per iteration in 8 of 10 cases; {prediction.confidence}",
        f"bottleneck: {prediction.bottleneck.text}",
    ]


def terms_text(prediction: Prediction) -> str:
    """The terms of a block as shares of it."""
    names = ("non-attention", "all-to-all", "ring")
    return ", ".join(f"{name} {share}" for name, share in zip(names, term_shares(prediction), strict=True))


def term_shares(prediction: Prediction) -> list[str]:
    """Shares of a block: outside attention, all-to-all, ring."""
    terms = prediction.terms
    parts = (terms.non_attention_s, terms.all_to_all_s, terms.ring_steps_s)
    return [f"{100 * seconds / prediction.block_s:.0f} %" for seconds in parts]


def rank_ranges(ranks: Sequence[int]) -> str:
    """``0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


_COLUMNS = ("pipelines", "micro-batches", "stage", "devices", "layers", "time", "memory GiB", "of")


def print_pipelines(costs: StageCosts, finished: Finished) -> None:
    """One row per stage; pipelines of one makeup once."""
    print_table(_COLUMNS, _rows(costs, finished))


def _rows(costs: StageCosts, finished: Finished) -> Iterator[tuple[str, ...] | None]:
    from ds_hetero.planner.pipeline_search.finish import memory_bytes

    memory = memory_bytes(costs, finished)
    for members in finished.makeups:
        i = members[0]
        pipeline, cut = finished.candidate.placed[i], finished.candidate.cuts[i]
        head = (f"{len(members)} x", f"{pipeline.micro_batches} of {pipeline.micro_batch_size}")
        for j, block in enumerate(pipeline.blocks):
            devices = [costs.pools.kinds[part.kind].device for part in block.parts]
            names = [f"{part.size} {device.name}" for part, device in zip(block.parts, devices, strict=True)]
            yield (
                *(head if j == 0 else ("", "")),
                str(j),
                f"{' + '.join(names)}{'' if block.inner == 'one' else f' {block.inner}'}",
                f"{sum(cut.layers[:j])}-{sum(cut.layers[: j + 1])}",
                time_text(cut.forward_s[j] + cut.backward_s[j]),
                " + ".join(map(bytes_text, memory[i][j])),
                " + ".join(bytes_text(device.usable_bytes) for device in devices),
            )
        yield None
