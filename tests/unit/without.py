"""Run a program in a process in which some packages cannot be imported, as if they were not installed."""

import json
import subprocess
import sys
from collections.abc import Iterable

from tests.support import ROOT

_BLOCK = """
import json, sys

class Missing:
    names = set(json.loads(sys.argv.pop(1)))

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run_without(packages: Iterable[str], program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run ``program``, which finds ``arguments`` in sys.argv[1:]; its failure is this test's."""
    command = [sys.executable, "-c", _BLOCK + program, json.dumps(sorted(packages)), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return run
