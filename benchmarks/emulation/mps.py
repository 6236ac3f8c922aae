"""Slow ranks on one NVIDIA GPU: CUDA's multi-process service with a share of the multiprocessors for every process.

The hetero-ring paper slowed its second rank down in this way. The daemon runs with folders of its own, so that a daemon
of the machine is not touched, and ends with `mps`. Written from NVIDIA's documentation; it has not run on a GPU yet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_CONTROL = "nvidia-cuda-mps-control"
_START_S = 20


@contextmanager
def mps() -> Iterator[tuple[dict[str, str] | None, str]]:
    """Start the daemon; yield the environment of its clients, or None, and a text on what happened."""
    if shutil.which("nvidia-smi") is None:
        yield None, "no NVIDIA GPU"
        return
    if shutil.which(_CONTROL) is None:
        yield None, f"{_CONTROL} is not installed"
        return
    with tempfile.TemporaryDirectory(prefix="ds_hetero_mps_") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = os.environ | places
        try:
            started = subprocess.run(
                [_CONTROL, "-d"], env=environment, capture_output=True, text=True, timeout=_START_S
            )
        except subprocess.TimeoutExpired:
            yield None, f"{_CONTROL} did not start within {_START_S} s"
            return
        if started.returncode:
            yield None, f"{_CONTROL}: {(started.stderr or started.stdout).strip()}"
            return
        try:
            yield places, "MPS, active thread percentages"
        finally:
            subprocess.run([_CONTROL], input="quit -t 5\n", env=environment, capture_output=True, text=True, timeout=60)


def active_share(speed: float, fastest: float) -> dict[str, str]:
    """Return the environment of a client that may use its share of the GPU's multiprocessors."""
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 * speed / fastest:.4g}"}
