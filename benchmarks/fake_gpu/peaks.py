"""Compare the memory estimates of `ds-hetero fit` with peaks of whole training steps on GPUs that do not exist.

    python -m benchmarks.fake_gpu.peaks [--only NAME] [--processes N] [--json] [--output FILE]

All layers of every job of `benchmarks.fake_gpu.jobs` and `MORE` run, with one rank of each share of tokens and heads. A
rank of a large model takes minutes: ranks that are in the file run again only if their share has changed. Models with
linear attention are left out, because transformers' replacement for their kernels takes more memory; so are models with
images, whose towers `fit` does not count.

The exit code is 0 if the median and the largest error are within `TARGETS`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fake_gpu.__main__ import ranks_of_kinds
from benchmarks.fake_gpu.jobs import SETTINGS, Setting
from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.measure.workers import as_completed

RESULT = FOLDER / "fit_fake_gpu.json"
TARGETS = {"median": 0.03, "worst": 0.08}
_CARDS = {"cluster": "workstation-4090-3090", "length": 32_768}
MORE = (
    Setting(model="llama-3.1-8b", cluster="hexiseq-setting-1", length=131_072, zero_stage=2),
    Setting(model="llama-3.2-1b", zero_stage=2, tile_tokens=None, checkpointing=False, **_CARDS),
    Setting(model="llama-3.2-1b", zero_stage=3, **_CARDS),
    Setting(model="llama-3.2-3b", zero_stage=1, **_CARDS),
    Setting(model="llama-3.2-1b", zero_stage=3, keep_attention=True, **_CARDS),
    Setting(model="llama-3.2-1b", zero_stage=2, tile_tokens=None, keep_attention=True, **_CARDS),
    Setting(model="llama-3.2-3b", zero_stage=1, keep_attention=True, **_CARDS),
    Setting(model="llama-3.1-8b", cluster="cloud-l40s-a10g", length=65_536, keep_attention=True),
    Setting(model="llama-3.1-8b", cluster="hexiseq-setting-1", length=131_072, zero_stage=2, keep_attention=True),
    Setting(model="qwen3-0.6b", zero_stage=1, **_CARDS),
    Setting(model="qwen3-4b", zero_stage=2, tile_tokens=None, **_CARDS),
)


def main() -> int:
    """Run the command; return 0 if the errors are within `TARGETS`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="jobs whose name has this in it")
    parser.add_argument("--processes", type=int, default=2, help="ranks that run at a time")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    former_rows = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    peaks = {(row["job"], row["rank"], row["tokens"]): row["peak_bytes"] for row in former_rows}
    tasks = [
        (setting, rank)
        for setting in (*SETTINGS, *MORE)
        if setting.cost_model().model.recurrent is None and not setting.images
        for rank in ranks_of_kinds(setting)
    ]
    todo = [task for task in tasks if args.only in task[0].name and _key(*task) not in peaks]
    with progress(Console(stderr=True)) as report:
        completed = as_completed(_peak, todo, args.processes, start_method="spawn")
        for done, (_, (key, peak)) in enumerate(completed):
            peaks[key] = peak
            report((done + 1) / len(todo), key[0])
            _write(tasks, peaks, args.output)
    result = _write(tasks, peaks, args.output)
    if args.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 0 if all(result["errors"][name] <= most for name, most in TARGETS.items()) else 1


def _key(setting: Setting, rank: int) -> tuple[str, int, int]:
    return setting.title, rank, setting.schedule().tokens(setting.length)[rank]


def _peak(task: tuple[Setting, int]) -> tuple[tuple[str, int, int], int]:
    from benchmarks.fake_gpu.step import run_step

    return _key(*task), run_step(task[0].job(), task[1]).peak


def _write(tasks: list[tuple[Setting, int]], peaks: dict[tuple[str, int, int], int], output: Path) -> dict[str, Any]:
    """Write the peaks so far, and today's estimates of ``fit``."""
    rows = []
    for setting, rank in tasks:
        key = job, _, tokens = _key(setting, rank)
        if key in peaks:
            row = {"job": job, "rank": rank, "tokens": tokens, "peak_bytes": peaks[key]}
            rows.append({**row, "fit_bytes": setting.fit_bytes(rank)})
    sizes = [abs(row["fit_bytes"] / row["peak_bytes"] - 1) for row in rows]
    errors = {"median": median(sizes), "worst": max(sizes)} if sizes else dict.fromkeys(TARGETS, 0.0)
    result = {**header("python -m benchmarks.fake_gpu.peaks"), "rows": rows, "errors": errors}
    write(result, output)
    return result


def _show(result: dict[str, Any]) -> None:
    table = Table("job", "rank", "tokens", "peak, GiB", "fit, GiB", "error")
    for row in result["rows"]:
        peak, fit = row["peak_bytes"], row["fit_bytes"]
        sizes = f"{peak / 2**30:.2f}", f"{fit / 2**30:.2f}", f"{fit / peak - 1:+.1%}"
        table.add_row(row["job"], str(row["rank"]), f"{row['tokens']:,}", *sizes)
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    print(f"median {result['errors']['median']:.1%}, worst {result['errors']['worst']:.1%}")


if __name__ == "__main__":
    sys.exit(main())
