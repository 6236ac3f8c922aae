"""Measure which lines of the package the tests run: ``python -m tests.coverage_table``.

It runs tests once more under coverage, two at a time, without those marked slow or alone, and prints a table by room.
Ranks and commands that tests start are processes of their own; they count too. ``--write`` puts the table into
CONTRIBUTING.md, ``--least`` ends with 1 below a total. CI leaves it out: coverage makes tests half as fast.

All tests at once take long. ``--data FOLDER`` keeps what was recorded, so that a later run adds other ``--tests``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
TESTS = ("tests/unit", "tests/dist")
_TWO_AT_A_TIME = ("--numprocesses", "2", "--dist", "loadfile")
# "fork" and "_exit" are for ranks: a fork server makes them, and they leave without Python's way out.
_SETTINGS = """[run]
source = {package}
data_file = {data}
parallel = true
patch = subprocess, fork, _exit
disable_warnings = no-data-collected, module-not-measured, module-not-imported
"""
_TABLE = re.compile(r"(?<=<!-- coverage -->\n).*?(?=<!-- end of coverage -->)", re.DOTALL)


def measure(folder: Path, tests: Sequence[str]) -> dict[str, Any]:
    """Run tests under coverage and return its JSON report of all that the folder holds.

    Raises:
        CalledProcessError: a test has failed.
    """
    settings = folder / "coveragerc"
    settings.write_text(_SETTINGS.format(package=ROOT / "ds_hetero", data=folder / "recorded"))
    coverage, rcfile = (sys.executable, "-m", "coverage"), f"--rcfile={settings}"
    if tests:
        pytest = ("-m", "pytest", "-q", "-m", "not alone and not slow", "-p", "no:cacheprovider", *_TWO_AT_A_TIME)
        subprocess.run([*coverage, "run", rcfile, *pytest, *tests], cwd=ROOT, check=True)
    data, report = f"--data-file={folder / 'combined'}", folder / "report.json"
    recorded = map(str, folder.glob("recorded.*"))
    subprocess.run([*coverage, "combine", rcfile, data, "--keep", "-q", *recorded], cwd=ROOT, check=True)
    subprocess.run([*coverage, "json", rcfile, data, "-q", "-o", str(report)], cwd=ROOT, check=True)
    content: dict[str, Any] = json.loads(report.read_text())
    return content


def tests_so_far(folder: Path, tests: Sequence[str]) -> list[str]:
    """Add paths of tests to the list in the folder, and return all."""
    names = folder / "tests.txt"
    before = names.read_text().split() if names.exists() else []
    names.write_text("\n".join(all_tests := sorted({*before, *tests})))
    return all_tests


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


def with_table(page: str, rooms: Mapping[str, tuple[int, int]], tests: Sequence[str] = TESTS) -> str:
    """Return the page with the table, and the tests that it counts, between its marks."""
    counted = ", ".join(f"`{name}`" for name in tests)
    text = f"Tests, without those marked slow or alone: {counted}.\n\n{table_of(rooms)}"
    return _TABLE.sub(lambda _: text, page)


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
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files or folders of tests; none: only the table")
    parser.add_argument("--data", type=Path, help="folder that keeps what was recorded, for a later run to add to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as fresh:
        folder = (arguments.data or Path(fresh)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        rooms = lines_by_room(measure(folder, arguments.tests))
        tests = tests_so_far(folder, arguments.tests)
    print(table_of(rooms), end="")
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text(), rooms, tests))
    if percent_of_all(rooms) < arguments.least:
        print(f"{percent_of_all(rooms)} % of the lines are covered, {arguments.least} are asked for", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
