"""The command ``ds-hetero``: tables for people, ``--json`` for machines, exit code 2 and one message for bad input."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; ``arguments`` are without the program's name."""
    from ds_hetero.cli.app import app
    from ds_hetero.errors import HeteroError

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0].startswith("--local_rank"):  # DeepSpeed's launcher tells everybody
        del arguments[0]
    try:
        app(args=arguments, prog_name="ds-hetero")
    except HeteroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0
