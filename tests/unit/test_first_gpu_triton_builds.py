"""Kernels without masked phases: every process writes the source that it imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.first_gpu.triton_builds import edge_free_kernels

NAME = "edge_free_triton_kernels"


def test_processes_that_share_a_folder_write_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is written anew is empty for a moment, in which another process would import it."""
    files = []
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        module = edge_free_kernels(tmp_path)
        assert module.__name__ == NAME  # by which Triton finds what it has compiled
        files.append(module.__file__)
    monkeypatch.delitem(sys.modules, NAME)
    assert len(set(files)) == 2
