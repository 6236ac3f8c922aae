"""The commands; what they do is in a module each, imported when the command is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """Train long sequences on GPUs that are not alike, inside DeepSpeed."""


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option(help="A ds_config.json whose section is to be checked.")] = None,
    world_size: Annotated[int, typer.Option(help="Processes of the job, to check a schedule against.")] = 1,
    num_heads: Annotated[int, typer.Option(help="Query heads of the model.")] = 32,
    num_kv_heads: Annotated[int, typer.Option(help="KV heads of the model.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """What is installed, which kernels work on this machine's devices, and what a configuration's section comes to."""
    from ds_hetero.cli.doctor import examine, show

    report = examine(config, world_size, num_heads, num_kv_heads)
    show(report, as_json)
    if not report["healthy"]:
        raise typer.Exit(1)
