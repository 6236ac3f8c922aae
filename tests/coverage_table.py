"""Measure which lines of the package the unit tests run: ``python -m tests.coverage_table``.

It runs the unit tests once more, one at a time under coverage, which takes some 20 minutes, so CI leaves it out. It
prints a table by room. ``--write`` puts it into CONTRIBUTING.md. ``--least`` ends with 1 below a total.
Ranks are other processes, so what only tests/dist and tests/integration run counts as not covered: the running half is
covered better than the table says.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
_TABLE = re.compile(r"(?<=<!-- coverage -->\n).*?(?=<!-- end of coverage -->)", re.DOTALL)


def measure(folder: Path) -> dict[str, Any]:
    """Run the unit tests under coverage and return its JSON report. Raises `CalledProcessError`: a test has failed."""
    coverage = (sys.executable, "-m", "coverage")
    tests = ("-m", "pytest", "-q", "-m", "not alone and not slow", "-p", "no:cacheprovider", "tests/unit")
    data = f"--data-file={folder / 'data'}"
    subprocess.run([*coverage, "run", data, "--source=ds_hetero", *tests], cwd=ROOT, check=True)
    report = folder / "report.json"
    subprocess.run([*coverage, "json", data, "-q", "-o", str(report)], cwd=ROOT, check=True)
    content: dict[str, Any] = json.loads(report.read_text())
    return content


def lines_by_room(report: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return covered lines and all lines of each folder of the package; modules beside them count as "ds_hetero"."""
    covered: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for name, file in report["files"].items():
        parts = Path(name).parts
        room = parts[1] if len(parts) > 2 else parts[0]
        covered[room] += file["summary"]["covered_lines"]
        lines[room] += file["summary"]["num_statements"]
    return {room: (covered[room], lines[room]) for room in sorted(lines)}


def table_of(rooms: Mapping[str, tuple[int, int]]) -> str:
    """Return a table of Markdown: one row per room and one for all."""
    rows = [*rooms.items(), ("all", _sum(rooms))]
    cells = [f"| {name} | {lines:,} | {_percent(covered, lines)} % |" for name, (covered, lines) in rows]
    return "\n".join(("| room | lines | covered |", "|---|---|---|", *cells)) + "\n"


def percent_of_all(rooms: Mapping[str, tuple[int, int]]) -> int:
    """Return the covered lines of the package in percent."""
    return _percent(*_sum(rooms))


def with_table(page: str, rooms: Mapping[str, tuple[int, int]]) -> str:
    """Return the page with the table between its marks."""
    return _TABLE.sub(lambda _: table_of(rooms), page)


def _sum(rooms: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    covered, lines = zip(*rooms.values(), strict=True)
    return sum(covered), sum(lines)


def _percent(covered: int, lines: int) -> int:
    return 100 * covered // lines if lines else 100


def main() -> int:
    """Measure, print, and write or judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage_table")
    parser.add_argument("--write", action="store_true", help="update CONTRIBUTING.md")
    parser.add_argument("--least", type=int, default=0, metavar="PERCENT", help="end with 1 if the total is below")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rooms = lines_by_room(measure(Path(folder)))
    print(table_of(rooms), end="")
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text(), rooms))
    if percent_of_all(rooms) < arguments.least:
        print(f"{percent_of_all(rooms)} % of the lines are covered, {arguments.least} are asked for", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
