"""Run the lab's commands; see `benchmarks.lab`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.lab.tables import TABLES
from benchmarks.measure.results import FOLDER, header, progress, write


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    table = TABLES[options.table]
    console = Console(stderr=True)
    begin = time.perf_counter()
    result = {**header(" ".join(["python -m benchmarks.lab", *words])), "emulated": True}
    with progress(console) as report:
        result |= table.run(options, report)
    result["seconds"] = round(time.perf_counter() - begin, 1)
    output = options.output or FOLDER / f"lab_{options.table}{'_quick' if options.quick else ''}.json"
    write(result, output)
    if options.json:
        print(json.dumps(result))
    else:
        table.show(result, Console(width=None if sys.stdout.isatty() else 130))
    console.print(f"written to {output}")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quick", action="store_true", help="the cases that matter most, in less than five minutes")
    common.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    common.add_argument("--output", type=Path, help="the result file; default: in benchmarks/results")
    common.add_argument("--rounds", type=int, help="turns of every contender")
    common.add_argument("--heads", type=int, help="query heads of the layer; time and bytes are in proportion to them")
    common.add_argument("--tokens", type=int, nargs="+", help="sequence lengths")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description=__doc__.partition(";")[0])
    commands = parser.add_subparsers(dest="table", required=True)
    for name, table in TABLES.items():
        table.add_options(commands.add_parser(name, parents=[common], help=table.help, description=table.help))
    return parser


if __name__ == "__main__":
    main()
