"""Section "end": what the run has started and nothing else would end."""

from __future__ import annotations

import os
import subprocess

from benchmarks.first_gpu.parts import Context, Part, Section


def stop_mps(context: Context) -> None:
    """Ask the daemon of section "environment" to end, by its own pipe."""
    command = os.environ.get("FIRST_GPU_MPS")
    if command is None:
        context.report({"mps": "was not started"})
        return
    ended = subprocess.run([command], input="quit\n", capture_output=True, text=True, timeout=10)
    context.report({"mps": "ended" if ended.returncode == 0 else ended.stderr.strip()[-200:]})


SECTION = Section(
    name="end",
    budget_s=15,
    decides="nothing",
    parts=(Part(name="stop MPS", run=stop_mps, limit_s=12),),
)
