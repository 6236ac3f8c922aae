"""Ranks of one job may run different attention kernels: torch's, plain operations, and Triton in its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.sweep(keep=0)
@pytest.mark.parametrize("tests", ["sub-rings", pytest.param("not sub-rings", marks=pytest.mark.slow)])
def test_ranks_with_different_kernels_equal_one_process(tests: str) -> None:
    """Triton decides at its first import whether it interprets, and the ranks' server has it: a fresh process."""
    file = Path(__file__).with_name("mixed_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, str(file)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
