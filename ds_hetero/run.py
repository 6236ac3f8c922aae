"""Run a script, a module or an installed command unchanged, with this engine registered, under any launcher.

torchrun --nproc-per-node 4 -m ds_hetero.run train.py --deepspeed ds_config.json
torchrun --nproc-per-node 4 -m ds_hetero.run -m package.train --deepspeed ds_config.json
deepspeed --module ds_hetero.run train.py --deepspeed ds_config.json

python -m ds_hetero.run --elastic train.py --deepspeed ds_config.json     starts the processes of a node, and restarts
                                                                          them whenever one of them dies

A command that starts the processes of the job itself, such as ``trl sft``, starts them without this engine: run the
module that trains instead.
"""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import ds_hetero
from ds_hetero.common.extras import is_installed

_USAGE = "python -m ds_hetero.run SCRIPT ARGS, or -m MODULE ARGS, or COMMAND ARGS"


def main() -> None:
    """Register ds_hetero, then run the script, module or command of the command line with the arguments after it."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--elastic"]:
        from ds_hetero.elastic.node.launch import main as run_node

        run_node(arguments[1:])
    local_rank = [arguments.pop(0)] if arguments and arguments[0].startswith("--local_rank") else []
    if not arguments:
        _refuse("no script was given")
    if arguments[0] == "-m":
        _run_module(arguments[1:], local_rank)
        return
    script = _find_script(arguments[0])
    sys.argv = [script, *local_rank, *arguments[1:]]
    sys.path[0] = str(Path(script).resolve().parent)
    ds_hetero.register()
    runpy.run_path(script, run_name="__main__")
    _note_success()


def _run_module(arguments: list[str], local_rank: list[str]) -> None:
    """Run a module as ``python -m`` does, looking in the working directory first."""
    sys.path[0] = str(Path.cwd())
    if not arguments or not is_installed(arguments[0]):
        _refuse(f"{arguments[0]!r} is not a module" if arguments else "-m has no module after it")
    sys.argv = [arguments[0], *local_rank, *arguments[1:]]  # runpy replaces the first entry by the module's file
    ds_hetero.register()
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    _note_success()


def _note_success() -> None:
    """Tell the agent of an elastic job, if this is one, that this process has ended without an error."""
    from ds_hetero.elastic.worker import own_worker

    if (worker := own_worker()) is not None:
        worker.note_success()


def _find_script(name: str) -> str:
    """Return the file of a script, or of an installed command that is a Python script; exit with code 2 for others."""
    if Path(name).is_file():
        return name
    command = shutil.which(name) if Path(name).name == name else None
    if command is None:
        _refuse(f"{name!r} is neither a file nor an installed command")
    with Path(command).open("rb") as file:
        first_line = file.readline(200)
    if not (first_line.startswith(b"#!") and b"python" in first_line):
        _refuse(f"the command {name!r} ({command}) is not a Python script")
    return command


def _refuse(problem: str) -> NoReturn:
    """Print the usage and the problem on stderr, and exit with code 2."""
    print(f"{_USAGE}: {problem}.", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
