"""The commands by name. A module of commands is imported when one of them is run, or when all are listed."""

from __future__ import annotations

from importlib import import_module

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


class _Commands(click.Group):
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


@click.command(cls=_Commands, context_settings={"show_default": True, "max_content_width": 120})
def app() -> None:
    """Train long sequences on GPUs that are not alike, inside DeepSpeed."""
