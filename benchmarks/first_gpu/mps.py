"""Start and end the daemon of CUDA's Multi-Process Service.

``nvidia-cuda-mps-control -d`` succeeds once the daemon has forked. Its server starts with the first process that uses
the device, and may fail there, as it does in containers; every later process would then fail, too. So
`benchmarks.first_gpu.runner` lets a separate process try the device before a part runs with MPS.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

COMMAND = "nvidia-cuda-mps-control"
_COMMAND_OF_DAEMON = "FIRST_GPU_MPS"  # variable of all parts: a daemon was started by this command
_START_S, _STOP_S = 5.0, 5.0  # chosen, never measured
LONGEST_S = _START_S + _STOP_S  # of `start`
_LONGEST_TEXT = 300


class MpsError(RuntimeError):
    """The daemon does not start."""


def start(command: str, folder: Path) -> dict[str, str]:
    """Start a daemon, and return the variables by which processes find it.

    Args:
        command: path of the control command.
        folder: for its pipes and logs.

    Raises:
        MpsError: with the output of the command.
    """
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipes"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "logs")}
    for directory in variables.values():
        Path(directory).mkdir()
    variables[_COMMAND_OF_DAEMON] = command
    try:
        _run([command, "-d"], variables, _START_S)
    except MpsError:
        stop(variables)
        raise
    return variables


def stop(variables: Mapping[str, str]) -> bool:
    """End the daemon that ``variables`` of `start` lead to, by its own pipe; return whether there was one."""
    command = variables.get(_COMMAND_OF_DAEMON)
    if command is None:
        return False
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # nothing else can be done about it
        subprocess.run(
            [command], input="quit\n", env={**os.environ, **variables}, capture_output=True, text=True, timeout=_STOP_S
        )
    return True


def _run(command: list[str], variables: Mapping[str, str], limit_s: float) -> None:
    """Run a command that has to succeed. Its output goes to a file, because a daemon would keep a pipe open."""
    output = Path(variables["CUDA_MPS_LOG_DIRECTORY"], "output")
    name = " ".join([Path(command[0]).name, *command[1:]])
    try:
        with output.open("w") as file:
            ended = subprocess.run(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            )
    except subprocess.TimeoutExpired as error:
        raise MpsError(f"{name} did not end within {limit_s:.0f} s") from error
    if ended.returncode:
        raise MpsError(f"{name}: {output.read_text(errors='replace').strip()[-_LONGEST_TEXT:]}")
