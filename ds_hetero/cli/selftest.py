"""``ds-hetero selftest``: does everything that training needs work on these ranks?

torchrun --nproc-per-node 8 -m ds_hetero.cli selftest
deepspeed --num_gpus 8 --module ds_hetero.cli selftest
accelerate launch --num_processes 8 -m ds_hetero.cli selftest

Imports no torch before its arguments are known to be sound.
"""

from __future__ import annotations

import os
from pathlib import Path

from ds_hetero.cli.printing import check_out
from ds_hetero.common.extras import require
from ds_hetero.errors import ConfigError

__all__ = ["run"]

_LAUNCH = (
    "This is one process alone. To test the ranks that will train, with their links, start it as they are started:\n"
    "  torchrun --nproc-per-node N -m ds_hetero.cli selftest\n"
    "  deepspeed --module ds_hetero.cli selftest\n"
    "  accelerate launch --num_processes N -m ds_hetero.cli selftest"
)


def run(*, quick: bool, limit_s: float, out: Path | None, as_json: Path | None, host_names: bool) -> bool:
    """Check the arguments and run the test; return whether everything works.

    Raises:
        ConfigError: an argument is wrong.
        PlanError: a file cannot be written.
        DependencyError: torch is not installed.
    """
    if not 1 <= limit_s <= 3600:
        raise ConfigError(f"--timeout-s must be between 1 and 3600, got {limit_s:g}.")
    for file in (out, as_json):
        if file is not None and int(os.environ.get("RANK", "0")) == 0:
            check_out(file)
    require("torch", purpose="ds-hetero selftest")
    from ds_hetero.selftest.run import Options, run

    if "RANK" not in os.environ:
        print(_LAUNCH)
    return run(Options(quick=quick, limit_s=limit_s, out=out, as_json=as_json, with_host_names=host_names))
