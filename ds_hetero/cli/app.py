"""The command group ``ds-hetero``: lists the commands by name, and imports only the module of the command that runs."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import click

from ds_hetero import __version__
from ds_hetero.common.spelling import nearest
from ds_hetero.common.terminal import coloured, fitted_text, terminal_width
from ds_hetero.errors import HeteroError

_COMMANDS_BY_FOLDER = {
    "planning": {
        "plan": "Search the best job for GPUs, a model and a length, and say why.",
        "fit": "Does it fit into memory, up to which length, and what would make it fit? Ends with 0 if it fits, "
        "1 if not.",
        "replicas": "Schedules and micro-batches for replicas that differ, so that all finish together.",
        "replan": "Plan pipelines again after devices are lost or added, and say what must move.",
        "simulate": "Predict time and memory of a given schedule or plan of pipelines.",
        "compare": "All strategies, or all planners of pipelines, on one cluster, in one table.",
    },
    "showing": {
        "cards": "List the cards of the catalogue, or NAMES of them; of one that it lacks print a stub for a cluster "
        "file.",
        "show": "Draw a schedule or a plan of pipelines with its timeline, or show where the documents of a batch lie.",
        "report": "Make one HTML page of PLAN, as plan --out or plan --json wrote it, and of what a job measured "
        "that ran it.",
        "launch-files": "Write hostfile, scripts and configuration that start PLAN on its hosts, unequal ones too.",
        "elastic": "Say what an elastic job that runs on this node is doing, who is there, and what its memory holds.",
        "measured": "Turn RUN, the run.json of a job or the JSON of a self-test, into rows of measurements.csv, "
        "to be judged by.",
        "trace": "Write the predicted step of PLAN as a trace for Perfetto; with --run the measured one beside it.",
    },
    "installed": {
        "profile": "Measure devices and links of the live ranks; run it under the launcher that will train.",
        "selftest": "Test kernels, links, collectives and a training step on the live ranks; run it under the "
        "launcher.",
        "weights": "Make a Hugging Face folder of a checkpoint of pipelines, without ranks.",
        "doctor": "Say what is installed, which kernels work on this machine's devices, and what a section comes to.",
    },
}
COMMANDS = {name: text for commands in _COMMANDS_BY_FOLDER.values() for name, text in commands.items()}
"""Help texts of all commands, in the order of the help page. ``launch-files`` is in ``showing/launch_files.py``."""

_ERROR = "Error: "  # click prints it in front of the message of a `click.UsageError`
_INTERRUPTED = 130  # exit code of a program that SIGINT ended: 128 plus the signal's number, as shells count
_LONG_WORD = re.compile(r"(\S{60})\S{60,}")  # at least 120 characters; the group is the part that messages quote


class _Commands(click.Group):
    """Group of all commands, which imports the module of a command when it runs: the imports take long."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the options before the command's name."""
        with _fitted_usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Read the command's options and run it. Ctrl-C, where the command itself does not take it, ends with 130."""
        try:
            with _fitted_usage_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:  # click's own answer is exit code 1, which the command "fit" gives for "does not fit"
            print("interrupted", file=sys.stderr)
            ctx.exit(_INTERRUPTED)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, see `click.Group.resolve_command`.

        Raises:
            click.UsageError: there is no such command; the message suggests the most similar name.
        """
        similar_name = None if args[0] in COMMANDS else nearest(args[0], COMMANDS)
        if similar_name is not None:
            ctx.fail(f"there is no command {args[0]!r}; did you mean {similar_name!r}?")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        width = formatter.width - 6 - max(map(len, COMMANDS))
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, click.Command(name, help=text).get_short_help_str(width)) for name, text in COMMANDS.items()]
            )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of this name; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        folder = next(folder for folder, commands in _COMMANDS_BY_FOLDER.items() if cmd_name in commands)
        module = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"ds_hetero.cli.{folder}.{module}"), module)
        return command


@contextlib.contextmanager
def _fitted_usage_errors() -> Iterator[None]:
    """Wrap messages of `click.UsageError` to the terminal; words of 120 and more characters end after 60 in "..."."""
    try:
        yield
    except click.UsageError as error:
        message = error.format_message()
        shortened = _LONG_WORD.sub(r"\1...", message)
        fitted = fitted_text(f"{_ERROR}{shortened}", terminal_width(sys.stderr)).removeprefix(_ERROR)
        if fitted == message:
            raise
        raise click.UsageError(fitted, error.ctx) from None


@click.command(cls=_Commands, context_settings={"show_default": True, "max_content_width": 120})
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """Train long sequences on GPUs that are not alike, inside DeepSpeed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: arguments without the program's name; None: those of this process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0].startswith("--local_rank"):  # DeepSpeed's launcher gives it to every process
        del arguments[0]
    try:
        app(args=arguments, prog_name="ds-hetero")
    except HeteroError as error:
        name = type(error).__name__
        message = fitted_text(f"{name}: {error}", terminal_width(sys.stderr))
        print(coloured(name, "bad", sys.stderr) + message.removeprefix(name), file=sys.stderr)
        return 2
    return 0
