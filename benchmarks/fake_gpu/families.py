"""Compare the activations that `ds-hetero fit` counts with those of whole training steps, for ten families of models.

    python -m benchmarks.fake_gpu.families [--only FAMILY] [--processes N] [--json] [--output FILE]

Each family has the sizes of its configuration in transformers, four layers (six of Gemma 3, one of which sees the whole
sequence) and a small vocabulary. Nothing is recomputed, so that a step keeps all activations. Two lengths run on a fake
GPU: the difference of their peaks is what one step keeps more for the longer sequence, without weights and optimizer
state. The exit code is 0 if all errors of this difference are within `TARGET`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fake_gpu.jobs import FAMILY, Setting
from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.measure.workers import as_completed

RESULT = FOLDER / "fit_families.json"
TARGET = 0.03
LENGTHS = (8_192, 16_384)
FAMILIES = (
    *("llama", "qwen2", "gemma2", "gemma3_text", "mistral"),
    *("phi3", "olmo3", "apertus", "gpt_oss", "deepseek_v3"),
)


def main() -> int:
    """Run the command; return 0 if the errors are within `TARGET`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families whose name has this in it")
    parser.add_argument("--processes", type=int, default=1, help="steps that run at a time")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    former = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    peaks = {(row["family"], length): peak for row in former for length, peak in zip(LENGTHS, row["peak"], strict=True)}
    tasks = [(family, length) for family in FAMILIES if args.only in family for length in LENGTHS]
    todo = [task for task in tasks if task not in peaks]
    with progress(Console(stderr=True)) as report:
        completed = as_completed(_peak, todo, args.processes, start_method="spawn")
        for done, (_, (task, peak)) in enumerate(completed):
            peaks[task] = peak
            report((done + 1) / len(todo), task[0])
            _write(peaks, args.output)
    result = _write(peaks, args.output)
    if args.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 0 if result["worst"] <= TARGET else 1


def setting_of(family: str, length: int) -> Setting:
    """Return the job of a family: two unequal GPUs, ZeRO-1, nothing recomputed, no tiles."""
    return Setting(
        model=f"{FAMILY}{family}",
        cluster="workstation-4090-3090",
        length=length,
        zero_stage=1,
        tile_tokens=None,
        checkpointing=False,
    )


def _peak(task: tuple[str, int]) -> tuple[tuple[str, int], int]:
    """Return the peak of rank 0 in a step."""
    from benchmarks.fake_gpu.step import run_step

    return task, run_step(setting_of(*task).job(), 0).peak


def _write(peaks: dict[tuple[str, int], int], output: Path) -> dict[str, Any]:
    """Write the peaks of families that ran at both lengths, and today's estimates of ``fit``."""
    rows = []
    for family in FAMILIES:
        if any((family, length) not in peaks for length in LENGTHS):
            continue
        peak = [peaks[family, length] for length in LENGTHS]
        fit = [setting_of(family, length).fit_bytes(0) for length in LENGTHS]
        error = (fit[1] - fit[0]) / (peak[1] - peak[0]) - 1
        rows.append({"family": family, "peak": peak, "fit": fit, "error": error, "error_of_peak": fit[1] / peak[1] - 1})
    worst = max((abs(row["error"]) for row in rows), default=0.0)
    result = {**header("python -m benchmarks.fake_gpu.families"), "lengths": LENGTHS, "rows": rows, "worst": worst}
    write(result, output)
    return result


def _show(result: dict[str, Any]) -> None:
    """Print a row of every family."""
    short, long = (f"{length:,} tokens" for length in LENGTHS)
    table = Table("family", f"peak, {short}", long, "fit of the difference", "of the longer peak")
    for row in result["rows"]:
        sizes = [f"{peak / 2**30:.2f} GiB" for peak in row["peak"]]
        table.add_row(row["family"], *sizes, f"{row['error']:+.1%}", f"{row['error_of_peak']:+.1%}")
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    print(f"worst {result['worst']:.1%}")


if __name__ == "__main__":
    sys.exit(main())
