"""Train one job in one process, and on four unequal ranks that fail, leave, return and change their speeds.

    python -m benchmarks.long_run                       # 3,000 steps in fp32: half an hour on two cores
    python -m benchmarks.long_run --dtype bf16
    python -m benchmarks.long_run --quick --json        # 90 steps: a minute or two
    python -m benchmarks.long_run.soak                  # does anything grow over 20,000 steps?

Parts, each in a folder of its own, which keep what they have done: if the command is stopped, the same command goes on.

    alone      one process, plain torch
    rounded    the same, document by document, which differs in rounding alone
    last_bit   the same from weights that differ in their last bits
    ranks      four emulated nodes; benchmarks/long_run/course.py says what happens to them

``--parts ranks`` runs some parts only, such as in another terminal at the same time. The comparison is made when
``alone``, ``ranks`` and one of the other two are there. The exit code is 1 if a check fails:

    samples     none lost, none trained on twice; tokens and learning rates equal at every step
    events      no more steps lost than lie between two saves
    fp32        evaluation losses within 0.1 %; losses within 1e-4, until rounding alone makes a larger difference
    bf16        evaluation losses differ by no more than three times what rounding alone makes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.elastic.nodes import environment_of_ranks, exit_at_sigterm
from benchmarks.long_run import alone, cluster, compare
from benchmarks.long_run.course import SPEEDS, step_of
from benchmarks.long_run.job import Job
from benchmarks.long_run.records import Record, Records, by_step
from benchmarks.measure.results import FOLDER, header, write

ALONE = {"alone": [], "rounded": ["--by-document"], "last_bit": ["--last-bit"]}  # options, by part
PARTS = (*ALONE, "ranks")
ROUNDING = {"rounded", "last_bit"}  # parts that differ from ``alone`` in rounding
# Of the larger difference of two runs that differ in rounding alone. How far rounding moves a chaotic training is
# chance, so that a few runs show its size, but not its limit. Chosen, not measured.
_ROUNDING_FACTOR = 3.0
_CACHE = FOLDER.parents[1] / ".cache" / "long_run"


def main() -> int:
    """Run the command; return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--quick", action="store_true", help="90 steps")
    parser.add_argument("--steps", type=int, default=3000, help="two and a half epochs, whatever their number")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--folder", type=Path, help="of all parts")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: {sorted(unknown)} is not of {', '.join(PARTS)}")
    exit_at_sigterm()
    name = f"{options.dtype}{'_quick' if options.quick else ''}"
    folder = options.folder or _CACHE / (
        name if options.steps == parser.get_default("steps") else f"{name}_{options.steps}"
    )
    job, save_every = job_of(options.dtype, options.steps, is_quick=options.quick)
    for part in options.parts:
        run_part(part, job, folder / part, save_every, _printer(part, job))
    records = {part: Records(folder / part / file).read() for part, file in files_of_parts().items()}
    records = {part: of_part for part, of_part in records.items() if _is_done(of_part)}
    if not {"alone", "ranks"} <= records.keys() or not records.keys() & ROUNDING:
        print(f"to come: {', '.join(part for part in PARTS if part not in records)}", file=sys.stderr)
        return 0
    command = " ".join(["python -m benchmarks.long_run", *sys.argv[1:]])
    result = {**header(command), "emulated": True, **summarize(job, records, save_every)}
    write(result, options.output or FOLDER / f"long_run_{name}.json")
    if options.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 0 if all(result["checks"].values()) else 1


def job_of(dtype: str, steps: int, *, is_quick: bool) -> tuple[Job, int]:
    """Return the job, and the steps between two saves in memory."""
    if is_quick:
        short = {"evaluate_every": 10, "evaluation_rows": 4, "warm_up_steps": 10, "pause_s": 5.0}
        return Job(steps=90, rows=36, dtype=dtype, **short), 4
    return Job(steps=steps, rows=steps * 2 // 5, evaluate_every=max(1, steps // 15), dtype=dtype), 20


def files_of_parts() -> dict[str, str]:
    """Return the name of the file of records, by part."""
    return {**dict.fromkeys(ALONE, alone.RECORDS), "ranks": cluster.RECORDS}


def run_part(part: str, job: Job, folder: Path, save_every: int, on_step: Callable[[int], None]) -> None:
    """Run a part from where it was stopped; do nothing if it is done."""
    if _is_done(Records(folder / files_of_parts()[part]).read()):
        return
    folder.mkdir(parents=True, exist_ok=True)
    job.write(folder / "job.json")
    if part == "ranks":
        cluster.run(job, folder, save_every, on_step)
    else:
        command = [sys.executable, "-m", "benchmarks.long_run.alone", str(folder)]
        command += ALONE[part]
        subprocess.run(command, check=True, env=environment_of_ranks(), cwd=FOLDER.parents[1])


def _is_done(records: list[Record]) -> bool:
    return any(record["event"] == "done" for record in records)


def summarize(job: Job, records: dict[str, list[Record]], save_every: int) -> dict[str, Any]:
    """Return differences, events and curves.

    Args:
        records: by part; of ``alone``, ``ranks``, and at least one of `ROUNDING`.
        save_every: steps between two saves in memory.
    """
    ranks, reference = records["ranks"], records["alone"]
    losses = compare.compare_losses(ranks, reference)
    rounding = {
        part: compare.compare_losses(records[part], reference) for part in ALONE if part in ROUNDING & records.keys()
    }
    samples = compare.compare_samples(ranks, reference, job.steps)
    events = compare.describe_events(ranks)
    repeated = compare.repeated_differences(ranks)
    return {
        "dtype": job.dtype,
        "steps": job.steps,
        "epochs": job.epochs,
        "save_every": save_every,
        "losses": losses,
        "losses_of_rounding": rounding,
        "samples": samples,
        "repeated": repeated,
        "events": events,
        "speeds": [{"step": step_of(job, at), **cores} for at, cores in SPEEDS],
        "adaptations": compare.adaptations(ranks, [step_of(job, at) for at, _ in SPEEDS[1:]]),
        "checks": _checks(job, losses, rounding, samples, events, save_every),
        "curves": _curves(records),
    }


def _checks(
    job: Job,
    losses: dict[str, Any],
    rounding: dict[str, dict[str, Any]],
    samples: dict[str, Any],
    events: Sequence[dict[str, Any]],
    save_every: int,
) -> dict[str, bool]:
    """Return which checks hold, by name."""
    checks = {
        "all steps": losses["steps"] == job.steps and samples["steps_missing"] == 0,
        "samples": samples["samples_lost"] == samples["samples_doubled"] == samples["rows_other_than_alone"] == 0,
        "tokens": samples["tokens"] == samples["tokens_alone"],
        "learning rates": samples["learning_rate_largest"] == 0,
        "steps lost": all(event["lost_steps"] <= save_every for event in events),
        "steps lost with notice": all(event["lost_steps"] == 0 for event in events if event["kind"] != "worker"),
    }
    of_steps = _ROUNDING_FACTOR * max(run["largest"] for run in rounding.values())
    of_evaluations = _ROUNDING_FACTOR * max(run["evaluation_largest"] for run in rounding.values())
    if job.dtype == "fp32":
        checks["losses"] = losses["largest"] <= max(compare.GOAL, of_steps)
        checks["evaluation"] = losses["evaluation_largest"] <= compare.EVALUATION_GOAL
    else:
        checks["evaluation"] = losses["evaluation_largest"] <= of_evaluations
    return checks


def _curves(records: dict[str, list[Record]]) -> dict[str, Any]:
    """Return the numbers of all steps, for pictures."""
    curves: dict[str, Any] = {}
    for part, of_part in records.items():
        steps, evaluations = by_step(of_part, "step"), by_step(of_part, "evaluation")
        curves[part] = {
            "loss": [_rounded(record["loss"]) for record in steps.values()],
            "evaluation": {str(step): record["loss"] for step, record in evaluations.items()},
        }
    steps = by_step(records["ranks"], "step")
    curves["lr"] = [_rounded(record["lr"]) for record in steps.values()]
    curves["seconds"] = [round(record["seconds"], 3) for record in steps.values()]
    curves["tokens_by_node"] = {
        node: [record["tokens_by_node"].get(node, 0) for record in steps.values()] for node in SPEEDS[0][1]
    }
    for part in records.keys() - {"alone"}:
        of_steps = compare.differences(records[part], records["alone"])
        curves[part]["difference"] = [float(f"{value:.2g}") for value in of_steps.values()]
    return curves


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _printer(part: str, job: Job) -> Callable[[int], None]:
    def show(step: int) -> None:
        print(f"{part}: step {step:,} of {job.steps:,}", end="\r", file=sys.stderr, flush=True)

    return show


def _show(result: dict[str, Any]) -> None:
    """Print the tables."""
    runs, samples = {"four ranks": result["losses"], **result["losses_of_rounding"]}, result["samples"]
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table("", *runs, title=f"Against one process, {result['dtype']}")
    table.add_row("loss of a step, largest difference", *(f"{run['largest']:.1e}" for run in runs.values()))
    first = [str(run["first_step_above_goal"] or "none") for run in runs.values()]
    table.add_row(f"first step above {compare.GOAL:g}", *first)
    largest = [f"{run['evaluation_largest']:.1e}" for run in runs.values()]
    table.add_row("evaluation loss, largest difference", *largest)
    console.print(table)
    lost, doubled = samples["samples_lost"], samples["samples_doubled"]
    print(f"samples: {lost} lost, {doubled} doubled; tokens {samples['tokens']:,} and {samples['tokens_alone']:,}")
    print(f"learning rates: largest difference {samples['learning_rate_largest']:.0e}")
    print(f"steps repeated: {result['repeated']['steps']}, losses differ by {result['repeated']['largest']:.0e}")
    table = Table("event", "node", "step", "ranks", "steps lost", "seconds")
    for event in result["events"]:
        numbers = (event["step"], event["ranks"], event["lost_steps"], event["seconds"])
        table.add_row(event["kind"], event["node"], *map(str, numbers))
    console.print(table)
    for name, holds in result["checks"].items():
        print(f"{name}: {'ok' if holds else 'FAILS'}")


if __name__ == "__main__":
    sys.exit(main())
