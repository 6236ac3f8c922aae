"""Run a script, a module or an installed command as it is, with this engine registered, under any launcher.

torchrun --nproc-per-node 4 -m ds_hetero.run train.py --deepspeed ds_config.json
torchrun --nproc-per-node 4 -m ds_hetero.run -m package.train --deepspeed ds_config.json
deepspeed --module ds_hetero.run train.py --deepspeed ds_config.json

python -m ds_hetero.run --elastic train.py --deepspeed ds_config.json     starts the processes of a node itself, and
                                                                          again whenever one of them dies

A command that starts the processes of the job itself, as ``trl sft`` does, starts them without this engine: run the
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
    """Register, then run what is named first on the command line with the arguments after it."""
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
    script = _script_of(arguments[0])
    sys.argv = [script, *local_rank, *arguments[1:]]
    sys.path[0] = str(Path(script).resolve().parent)
    ds_hetero.register()
    runpy.run_path(script, run_name="__main__")
    _note_success()


def _run_module(arguments: list[str], local_rank: list[str]) -> None:
    """Run a module as ``python -m`` does, looking in the working directory first."""
    sys.path[0] = str(Path.cwd())
    if not arguments or not is_installed(arguments[0]):
        _refuse(f"{arguments[0]!r} is not a module" if arguments else "-m without a module")
    sys.argv = [arguments[0], *local_rank, *arguments[1:]]  # the module's file takes the first place
    ds_hetero.register()
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    _note_success()


def _note_success() -> None:
    from ds_hetero.elastic.worker import own_worker

    if (worker := own_worker()) is not None:
        worker.note_success()


def _script_of(name: str) -> str:
    """Return the file of a script, or of an installed command that is one of Python's."""
    if Path(name).is_file():
        return name
    command = shutil.which(name) if Path(name).name == name else None
    if command is None:
        _refuse(f"{name!r} is neither a file nor an installed command")
    with Path(command).open("rb") as file:
        first = file.readline(200)
    if not (first.startswith(b"#!") and b"python" in first):
        _refuse(f"the command {name!r} ({command}) is not a script of Python")
    return command


def _refuse(problem: str) -> NoReturn:
    print(f"{_USAGE}: {problem}.", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
