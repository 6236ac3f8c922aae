"""``ds-hetero selftest``: tests kernels, links, collectives and a training step on the live ranks.

torchrun --nproc-per-node 8 -m ds_hetero.cli selftest
deepspeed --num_gpus 8 --module ds_hetero.cli selftest
accelerate launch --num_processes 8 -m ds_hetero.cli selftest

Options are checked before torch is imported, which takes seconds.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from ds_hetero.cli.options import FILE
from ds_hetero.cli.printing import check_out, print_lines
from ds_hetero.common.extras import require
from ds_hetero.errors import ConfigError

_LAUNCH_HINT = (
    "This is one process alone. To test the ranks that will train, with their links, start it as they are started:\n"
    "  torchrun --nproc-per-node N -m ds_hetero.cli selftest\n"
    "  deepspeed --module ds_hetero.cli selftest\n"
    "  accelerate launch --num_processes N -m ds_hetero.cli selftest"
)


@click.command
@click.option("--quick", is_flag=True, help="One head size and one ZeRO stage.")
@click.option("--measure", is_flag=True, help="Train for some minutes, and compare with what is predicted.")
@click.option("--timeout-s", type=float, default=60.0, help="Seconds that a call may take before the test ends.")
@click.option("--out", type=FILE, help="Write the report here as text, to attach to an issue.")
@click.option("--json", "as_json", type=FILE, help="Write the report here as JSON.")
@click.option("--host-names", is_flag=True, help="Name hosts instead of numbering nodes.")
def selftest(
    quick: bool, measure: bool, timeout_s: float, out: Path | None, as_json: Path | None, host_names: bool
) -> None:
    """Test kernels, links, collectives and a training step on the live ranks; run it under the launcher."""
    if not 1 <= timeout_s <= 3600:
        raise ConfigError(f"--timeout-s must be between 1 and 3600, got {timeout_s:g}.")
    if int(os.environ.get("RANK", "0")) == 0:
        for file in (out, as_json):
            check_out(file)
    require("torch", purpose="ds-hetero selftest")
    from ds_hetero.selftest.run import Options, run

    if "RANK" not in os.environ:
        print_lines(_LAUNCH_HINT)
    options = Options(
        quick=quick, measure=measure, limit_s=timeout_s, out=out, as_json=as_json, with_host_names=host_names
    )
    if not run(options):
        raise click.exceptions.Exit(1)
