"""Compare predictions with public measurements of real GPUs, by the median error and the ninth decile.

python -m benchmarks.real_cards                              errors by kind, card, kernel and length
python -m benchmarks.real_cards --measurements FILE --json   the same for another file with these columns
python -m benchmarks.real_cards --halves                     fit to one part of the points, test on the others
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.real_cards.compare import Comparison, compare, kernel_name, length_of
from benchmarks.real_cards.fit import PARTS, fit
from benchmarks.real_cards.points import MEASUREMENTS, Row, read_rows

TARGETS = {  # median, ninth decile; the second None where none is set
    "time": (0.06, 0.18),
    "memory": (0.08, None),
    "max_length": (0.15, None),
    "attention": (0.06, None),
    "time_lora": (0.12, None),
    "time_qlora": (0.12, None),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every target is met."""
    options = _parser().parse_args(arguments)
    with options.measurements.open(encoding="utf-8-sig", newline="") as file:
        rows = read_rows(file)
    if options.halves:
        return _halves(rows, as_json=options.json)
    done, refused = compare(rows)
    outcome = {
        "errors": _errors(done, lambda point: point.kind),
        "inside_range": _inside(done),
        "refused": dict(Counter(f"{point.kind}: {point.reason}" for point in refused)),
    }
    outcome["missed"] = missed = list(_missed(outcome["errors"]))
    if options.rows:
        _write_rows(done, options.rows)
    if options.json:
        print(json.dumps(outcome))
        return 1 if missed else 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in _tables(done):
        console.print(table)
    console.print(f"inside the 80 % range: {outcome['inside_range']:.0%} of the steps")
    for reason, count in sorted(outcome["refused"].items()):
        console.print(f"{count:5d} not compared, {reason}", highlight=False)
    for failure in missed:
        console.print(f"NOT MET: {failure}", highlight=False)
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_cards", description=__doc__.partition("\n")[0])
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS, help="a file with the same columns")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--rows", type=Path, help="write a line for every point here, as CSV")
    parser.add_argument("--halves", action="store_true", help="fit on one part of the points, test on the others")
    return parser


def _errors(done: Iterable[Comparison], key: Callable[[Comparison], str]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for point in done:
        groups[key(point)].append(point.error)
    return {name: _summary(errors) for name, errors in sorted(groups.items())}


def _summary(errors: Sequence[float]) -> dict[str, float]:
    size = np.abs(errors)
    return {
        "points": len(errors),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "bias": float(np.median(errors)),
    }


def _inside(done: Iterable[Comparison]) -> float:
    """Return the share of steps that are inside the range of their prediction."""
    inside = [point.is_inside for point in done if point.kind.startswith("time")]
    return float(np.mean(inside)) if inside else 1.0


def _missed(errors: dict[str, dict[str, float]]) -> Iterable[str]:
    for kind, (median, ninth) in TARGETS.items():
        error = errors.get(kind)
        if error and error["median"] > median:
            yield f"{kind}: median error {error['median']:.1%}, target {median:.0%}"
        if error and ninth is not None and error["p90"] > ninth:
            yield f"{kind}: 90th percentile {error['p90']:.1%}, target {ninth:.0%}"


def _tables(done: Sequence[Comparison]) -> Iterable[Table]:
    """Yield the tables of errors."""
    times = [point for point in done if point.kind.startswith("time")]
    yield _table("By kind", _errors(done, lambda point: point.kind))
    yield _table("Steps by card", _errors(times, lambda point: f"{point.row['gpu']}, {point.kind}"))
    yield _table("Steps by length", _errors(times, lambda point: f"{point.kind}, {length_of(point.row)}"))
    yield _table("Steps by source", _errors(times, lambda point: f"{point.row['source'][:36]}, {point.kind}"))
    memory = [point for point in done if point.kind in ("memory", "max_length")]
    yield _table(
        "Memory by source",
        _errors(memory, lambda point: f"{point.kind}, {point.row['source'][:24]}, {point.row['peft']}"),
    )
    kernels = [point for point in done if point.kind == "attention"]
    yield _table("Kernels of attention", _errors(kernels, lambda point: kernel_name(point.row)))


def _table(title: str, errors: dict[str, dict[str, float]]) -> Table:
    table = Table(title=title)
    for column in ("", "points", "median error", "90th percentile", "bias"):
        table.add_column(column, justify="right" if column else "left")
    for name, point in errors.items():
        shares = (f"{point[key]:{form}}" for key, form in (("median", ".1%"), ("p90", ".1%"), ("bias", "+.1%")))
        table.add_row(name, str(point["points"]), *shares)
    return table


def _write_rows(done: Iterable[Comparison], path: Path) -> None:
    columns = ("id", "source", "gpu", "gpus", "model", "seq_len", "recompute", "peft", "attention")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, "kind", "predicted", "measured", "error"])
        for comparison in done:
            values = [comparison.row[column] for column in columns]
            writer.writerow(
                [
                    *values,
                    comparison.kind,
                    f"{comparison.predicted:.5g}",
                    f"{comparison.measured:.5g}",
                    f"{comparison.error:.4f}",
                ]
            )


def _halves(rows: Sequence[Row], *, as_json: bool) -> int:
    """Fit constants to a part of the points, and print the errors of the others with them.

    Return 0 if the targets are met.
    """
    outcome: dict[str, Any] = {}
    for name, is_own in PARTS.items():
        constants = fit([row for row in rows if is_own(row)])
        parts = {"own": [row for row in rows if is_own(row)], "other": [row for row in rows if not is_own(row)]}
        outcome[name] = {"constants": constants}
        for part, points in parts.items():
            outcome[name][part] = _errors(compare(points, constants, TARGETS)[0], lambda point: point.kind)
        is_half = name.endswith("half")
        outcome[name]["missed"] = list(_missed(outcome[name]["other"])) if is_half else []
    if as_json:
        print(json.dumps(outcome))
    else:
        _show_halves(outcome)
    return 1 if any(point["missed"] for point in outcome.values()) else 0


def _show_halves(outcome: Mapping[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name, point in outcome.items():
        for part, title in (("own", f"Fitted to {name}: these points"), ("other", f"Fitted to {name}: the others")):
            console.print(_table(title, point[part]))
        for card, values in point["constants"].items():
            console.print(f"{card}: {values}", highlight=False)
        for failure in point["missed"]:
            console.print(f"NOT MET: {failure}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
