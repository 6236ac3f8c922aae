"""The commands by name. A module of commands is imported when one of them is run, or when all are listed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click

__all__ = ["MODULE_OF", "app"]

MODULE_OF = {
    "plan": "planning",
    "fit": "planning",
    "replicas": "planning",
    "replan": "planning",
    "simulate": "predicting",
    "compare": "predicting",
    "show": "predicting",
    "report": "pages",
    "trace": "pages",
    "profile": "ranks",
    "selftest": "ranks",
    "weights": "training",
    "doctor": "training",
}
"""Every command, and its module in `ds_hetero.cli.commands`."""


_ENDLESS = re.compile(r"(\S{60})\S{60,}")


class _Commands(click.Group):
    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read options before the command's name."""
        with _shortening():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Read the command's options and run it."""
        with _shortening():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, in the order in which a new user meets them."""
        return list(MODULE_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None where there is none of the name."""
        if cmd_name not in MODULE_OF:
            return None
        module = import_module(f"ds_hetero.cli.commands.{MODULE_OF[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command


@contextlib.contextmanager
def _shortening() -> Iterator[None]:
    """Have messages quote the beginning of what has no end."""
    try:
        yield
    except click.UsageError as error:
        message = error.format_message()
        if not _ENDLESS.search(message):
            raise
        raise click.UsageError(_ENDLESS.sub(r"\1...", message), error.ctx) from None


@click.command(cls=_Commands, context_settings={"show_default": True, "max_content_width": 120})
def app() -> None:
    """Train long sequences on GPUs that are not alike, inside DeepSpeed."""
