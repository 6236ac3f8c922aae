"""Commands that run under a launcher, on the live ranks."""

from __future__ import annotations

from pathlib import Path

import click

from ds_hetero.cli.options import AS_JSON, FILE
from ds_hetero.common.extras import require

__all__ = ["profile", "selftest"]


@click.command
@click.option("--out", type=FILE, help="Cluster file to write, .yaml or .json.")
@click.option("--dtype", help="bfloat16, float16 or float32; left out, what is usual on the device.")
@click.option("--window-s", type=float, default=0.15, help="Seconds per timing.")
@click.option("--again", is_flag=True, help='Have the next job with "cluster": "measure" measure anew; works alone.')
@AS_JSON
def profile(out: Path | None, dtype: str | None, window_s: float, again: bool, as_json: bool) -> None:
    """Measure devices and links of the live ranks; run it under the launcher that will train."""
    require("torch", purpose="ds-hetero profile")
    from ds_hetero.cli import profile as command

    command.run(out, dtype, window_s, again, as_json)


@click.command
@click.option("--quick", is_flag=True, help="One head size and one ZeRO stage.")
@click.option("--timeout-s", type=float, default=60.0, help="Seconds that a call may take before the test ends.")
@click.option("--out", type=FILE, help="Write the report here as text, to attach to an issue.")
@click.option("--json", "as_json", type=FILE, help="Write the report here as JSON.")
@click.option("--host-names", is_flag=True, help="Name hosts instead of numbering nodes.")
def selftest(quick: bool, timeout_s: float, out: Path | None, as_json: Path | None, host_names: bool) -> None:
    """Test kernels, links, collectives and a training step on the live ranks; run it under the launcher."""
    from ds_hetero.cli import selftest as command

    if not command.run(quick=quick, limit_s=timeout_s, out=out, as_json=as_json, host_names=host_names):
        raise click.exceptions.Exit(1)
