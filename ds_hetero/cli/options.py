"""Options that several commands share, with their types and readers.

The options on cluster, model and training are in `ds_hetero.cli.scenario`.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds_hetero.common.reading import MAX_SEQ_LEN, expect_whole_number, is_file, is_pipe, read_file, shortened
from ds_hetero.common.spelling import nearest
from ds_hetero.cost.workload import EXPERT_RULES
from ds_hetero.errors import PlanError

if TYPE_CHECKING:
    from ds_hetero.planner.documents.length_distributions import LengthDistribution

FILE = click.Path(path_type=Path)


class _Tokens(click.ParamType):  # type: ignore[type-arg]  # generic in new releases of click, and not in 8.1
    """Type of an option with a number of tokens: ``131072``, or ``128K`` for 128 x 1024, or ``1M`` for 1024K."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of tokens; end with a usage error if ``value`` is not one."""
        digits, unit = (value[:-1], value[-1].upper()) if str(value)[-1:].upper() in ("K", "M") else (value, "")
        try:
            return int(digits) * {"": 1, "K": 1024, "M": 1024**2}[unit]
        except ValueError:
            self.fail(f"{value!r} is not a number of tokens, such as 131072, or 128K for 128 x 1024.", param, ctx)


class _Amount(click.ParamType):  # type: ignore[type-arg]
    """Type of an option with the tokens of a whole training: ``300M`` is 300 x 10^6, ``1B`` is 10^9."""

    name = "amount"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of tokens; end with a usage error if ``value`` is not between 1 and 10^18."""
        text = str(value).upper()
        unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:], 1.0)
        try:
            amount = float(text.rstrip("KMBT")) * unit
        except ValueError:
            amount = 0.0
        if not 1 <= amount < 1e18:
            self.fail(f"{value!r} is not a number of training tokens, such as 300M or 1B.", param, ctx)
        return amount


BEST_EXPERTS = "best"  # value of --experts: the planner chooses, whichever is faster


class _Experts(click.ParamType):  # type: ignore[type-arg]
    """Type of an option that says how experts are divided: a rule, weights such as ``3,1``, ``best`` or ``no``."""

    name = "experts"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | tuple[float, ...] | None:
        """Return the rule, ``best``, the weights, or None for ``no``; end with a usage error for anything else."""
        text = str(value)
        if text == "no":
            return None
        if text == BEST_EXPERTS or text in EXPERT_RULES:
            return text
        try:
            return tuple(map(float, text.split(",")))
        except ValueError:
            self.fail(f"{text!r} is neither best, no, {', '.join(EXPERT_RULES)}, nor weights such as 3,1.", param, ctx)


TOKENS = _Tokens()
EXPERTS = _Experts()
TRAINED_TOKENS = click.option(
    "--tokens",
    "trained",
    type=_Amount(),
    default="1B",
    help="Tokens of the whole training, for its days and its price.",
)

LAYOUT = click.option("--layout", help="zigzag or contiguous; left out, the planner's choice.")
PARALLEL = click.option(
    "--parallel", default="sequence", help="sequence: one replica; full: pipelines of unequal stages."
)
GLOBAL_BATCH = click.option("--global-batch", type=int, help="Sequences per optimizer step, for --parallel full.")
PLAN_FILE = click.option("--plan", type=FILE, help="Plan file of pipelines, instead of --schedule.")
SEED = click.option("--seed", type=int, default=0, help="Of the batches that are drawn from a distribution.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")


def command_line_of(command: click.Command) -> str:
    """Return the command line of another command, with those options of the running command that both take.

    After ``ds-hetero plan --gpus 5090 --layout zigzag``, the line of ``fit`` is ``ds-hetero fit --gpus 5090``: ``fit``
    does not take ``--layout``. Options that were left out stay left out.
    """
    context = click.get_current_context()
    accepted = {parameter.name for parameter in command.params}
    words = ["ds-hetero", str(command.name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        is_written = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not is_written or name not in accepted or not isinstance(parameter, click.Option):
            continue
        value = context.params[name]
        # A switch such as --causal/--full has the name of its off side in secondary_opts.
        flag = parameter.opts[0] if value is not False else (parameter.secondary_opts or parameter.opts)[0]
        words.append(flag)
        if not parameter.is_flag:
            words.append(shlex.quote(str(value)))
    return " ".join(words)


def batch_of_pipelines(parallel: str, global_batch: int | None) -> int | None:
    """Return ``--global-batch`` for ``--parallel full``, else None. Raises `PlanError`: unknown value, or no batch."""
    if parallel not in ("sequence", "full"):
        raise PlanError(f"--parallel {shortened(parallel)} is unknown; it is sequence or full.")
    if parallel == "full" and global_batch is None:
        raise PlanError("--parallel full shares the samples of a step among pipelines. Give --global-batch.")
    return global_batch if parallel == "full" else None


MAX_DOCUMENTS = 100_000  # documents in a lengths file; chosen, never measured


def read_lengths(path: str) -> list[int]:
    """Return the document lengths in a file: a JSON list of tokens, or an object with the list as ``lengths``.

    Raises:
        PlanError: the file cannot be read, or has no such list.
    """
    data = read_file(path, "lengths", PlanError)
    if isinstance(data, Mapping):
        data = data.get("lengths")
    if not isinstance(data, list) or not 1 <= len(data) <= MAX_DOCUMENTS:
        raise PlanError(
            f"lengths file {shortened(path)} must hold a list of 1 to {MAX_DOCUMENTS:,} lengths, got {shortened(data)}."
        )
    where = f"lengths file {shortened(path)}"
    for index, length in enumerate(data):
        expect_whole_number(f"{where}: length {index}", length, 1, MAX_SEQ_LEN, PlanError)
    return data


def read_distribution(source: str) -> LengthDistribution:
    """Return the distribution of document lengths with this name, or that of the lengths in a file.

    Raises:
        PlanError: ``source`` is neither, or the file cannot be read.
    """
    from ds_hetero.planner.documents.length_distributions import DISTRIBUTIONS, LengthDistribution

    if source in DISTRIBUTIONS and not is_file(source):
        return DISTRIBUTIONS[source]
    if not (is_file(source) or is_pipe(source)):
        similar_name = nearest(source, DISTRIBUTIONS)
        raise PlanError(
            f"{shortened(source)} is neither a file of lengths nor a distribution"
            f"{f'; did you mean {similar_name!r}?' if similar_name else '.'} Distributions: {', '.join(DISTRIBUTIONS)}."
        )
    return LengthDistribution.of_lengths(source, read_lengths(source))


def draw_batches(distribution: LengthDistribution, tokens: int, count: int, seed: int) -> list[list[int]]:
    """Return ``count`` rows of ``tokens`` tokens, each a list of document lengths; equal arguments give equal rows."""
    generator = random.Random(seed)
    return [distribution.batch(tokens, generator) for _ in range(count)]
