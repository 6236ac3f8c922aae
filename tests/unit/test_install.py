"""install.sh leaves the environment of another clone alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support import ROOT


def test_a_linked_environment_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    clone, others = tmp_path / "clone", tmp_path / "others"
    clone.mkdir()
    others.mkdir()
    (others / "installed-train").touch()  # newer than setup.cfg: otherwise nothing would be left to do
    for name in ("install.sh", "setup.cfg"):
        shutil.copy(ROOT / name, clone)
    (clone / ".venv").symlink_to(others)
    run = subprocess.run(["bash", "install.sh", "train"], cwd=clone, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert f".venv is a link to {others}" in run.stderr and "Remove the link" in run.stderr
    assert [path.name for path in others.iterdir()] == ["installed-train"]
