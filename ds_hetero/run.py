"""Run a script as it is, with this engine registered: ``python -m ds_hetero.run SCRIPT ARGS``, under any launcher.

torchrun --nproc-per-node 4 -m ds_hetero.run train.py --deepspeed ds_config.json
deepspeed --module ds_hetero.run train.py --deepspeed ds_config.json
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import ds_hetero

__all__ = ["main"]


def main() -> None:
    """Register, then run the script named first on the command line with the arguments after it."""
    arguments = sys.argv[1:]
    local_rank = [arguments.pop(0)] if arguments and arguments[0].startswith("--local_rank") else []
    if not arguments or not Path(arguments[0]).is_file():
        problem = f"{arguments[0]!r} is no file" if arguments else "no script was given"
        print(f"python -m ds_hetero.run SCRIPT ARGS: {problem}.", file=sys.stderr)
        sys.exit(2)
    script = arguments[0]
    sys.argv = [script, *local_rank, *arguments[1:]]
    sys.path[0] = str(Path(script).resolve().parent)
    ds_hetero.register()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
