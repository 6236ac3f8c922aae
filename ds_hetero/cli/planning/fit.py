"""``ds-hetero fit``: says whether a training fits into memory, up to which length, and which changes make it fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import click

from ds_hetero.cli.options import AS_JSON, TRAINED_TOKENS
from ds_hetero.cli.planning.job_headline import headline
from ds_hetero.cli.planning.saves import saves_line, shared_memory
from ds_hetero.cli.planning.scenario_jobs import best_beside
from ds_hetero.cli.printing import print_json, print_lines, print_table, rank_ranges
from ds_hetero.cli.scenario import Scenario, read_schedule, scenario_options
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import JsonDict
from ds_hetero.common.terminal import coloured, fitted_text, terminal_width
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.cost.price import price_of_prediction
from ds_hetero.cost.workload import Buffers
from ds_hetero.errors import PlanError
from ds_hetero.planner.memory import (
    Advice,
    Fitted,
    Stack,
    advise,
    best_schedule,
    longest_sequence,
    read_what_if,
    stacks,
)
from ds_hetero.planner.memory.breakdown import PARTS
from ds_hetero.planner.memory.changes import PLANNED, Change
from ds_hetero.planner.results.sentences import describe
from ds_hetero.reporting.assumptions import assumed_line, assumptions
from ds_hetero.values.baselines import STRATEGIES
from ds_hetero.values.schedule import Schedule

_BUCKET_HELP = "Elements of DeepSpeed's buffer for gradients; left out, DeepSpeed's default."
MAX_COLUMNS = 6  # kinds of ranks that the table of memory shows; chosen, never measured


@dataclass(frozen=True, slots=True)
class _Outlook:
    """Whether and how a training fits on one cluster: today's cluster, or that of a ``--what-if``."""

    name: str  # "today", or the text of the --what-if
    cluster: Cluster
    longest: int  # tokens of the longest sequence that fits; 0 if none does
    changed: Fitted | None  # schedule and prediction after the remedy; None if the cluster has no schedule at all
    remedy: tuple[Change, ...] = ()  # changes that make it fit; empty if it fits without changes, or nothing helps
    why_not: str | None = None  # reason as a sentence; None if it fits

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted tokens per second; None without a schedule."""
        if self.changed is None:
            return None
        return self.changed.prediction.tokens_per_s

    def to_dict(self) -> JsonDict:
        """Return plain data for JSON."""
        return {
            "what_if": self.name,
            "devices": [device.name for device in self.cluster.devices],
            "fits": self.why_not is None,
            "with": [change.name for change in self.remedy],
            "longest_sequence": self.longest,
            "iteration_s": self.changed and self.changed.iteration_s,
            "tokens_per_s": self.tokens_per_s,
            "reason": self.why_not,
        }


@click.command
@scenario_options(cost_model=False)
@click.option("--schedule", default="plan", help="Schedule file, or a strategy's name.")
@click.option(
    "--what-if", multiple=True, help="add=3090, remove=1 or network=10: the same beside today's; may be repeated."
)
@click.option(
    "--elastic",
    "copies",
    type=click.IntRange(0, 8),
    help="Say what an elastic job takes of the hosts' memory, with so many copies of each rank's part.",
)
@click.option("--reduce-bucket-size", type=click.IntRange(min=0), default=500_000_000, help=_BUCKET_HELP)
@TRAINED_TOKENS
@AS_JSON
@click.pass_context
def fit(
    context: click.Context,
    scenario: Scenario,
    schedule: str,
    what_if: Sequence[str],
    reduce_bucket_size: int,
    copies: int | None,
    trained: float,
    as_json: bool,
) -> None:
    """Does it fit into memory, up to which length, and what would make it fit? Ends with 0 if it fits, 1 if not."""
    scenario = scenario.with_workload(buffers=Buffers(reduce_bucket=reduce_bucket_size))
    source = schedule if schedule in STRATEGIES else read_schedule(schedule, scenario.cost)
    # Read before the searches, so that a wrong option is refused at once.
    changed_clusters = [read_what_if(text, scenario.cluster) for text in what_if]
    steps = ["this cluster", "its longest sequence", "what would make it fit", *what_if, "the best job"]
    with _progress(steps) as begin_next:
        begin_next()
        fitted = best_schedule(scenario.cost, source)
        begin_next()
        longest = longest_sequence(scenario.cost, source)
        begin_next()
        advice = () if fitted.fits else advise(fitted, source)
        remedy = _first_that_fits(advice)
        outlooks = [_outlook("today", fitted, source, remedy, longest)]
        for text, cluster in zip(what_if, changed_clusters, strict=True):
            begin_next()
            outlooks.append(_what_if_outlook(text, replace(scenario, clusters=(cluster,)), source, remedy))
        begin_next()
        job = best_beside(scenario, context) if source == "plan" else None
    breakdowns = stacks(fitted.cost, fitted.schedule)
    price = price_of_prediction(fitted.cost, fitted.prediction)
    saves = None if copies is None else shared_memory(fitted.cost, copies)
    if as_json:
        further = {"price": price.to_dict(trained), "assumed": assumptions(scenario), "saves": saves}
        job_data = {"job": job and job.to_dict()}
        print_json({**_report(fitted, breakdowns, longest, advice, outlooks), **further, **job_data})
    else:
        _print_breakdowns(fitted, breakdowns)
        _print_verdict(scenario, fitted, longest, price.lines(trained) if fitted.fits else [])
        if saves is not None:
            print_lines(saves_line(fitted.cost, saves))
        _print_outlooks(outlooks, advice)
        if job is not None:
            print("\n".join(headline(job, fitted.iteration_s if fitted.fits else None)))
    if not fitted.fits:
        raise click.exceptions.Exit(1)


def _first_that_fits(advice: Sequence[Advice]) -> Advice | None:
    """Return the cheapest advice that makes it fit, None if none does; ``advice`` is sorted, cheapest first."""
    return next((change for change in advice if change.fits), None)


@contextlib.contextmanager
def _progress(steps: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr, if that is a terminal; yield a function that begins the next step."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    console, names = Console(stderr=True), iter(steps)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(steps), completed=-1)  # the first step begins, and completes none
        yield lambda: bar.update(task, advance=1, description=next(names))


def _what_if_outlook(name: str, scenario: Scenario, source: str | Schedule, remedy: Advice | None) -> _Outlook:
    """Return the outlook of the cluster of a ``--what-if``, which may have no schedule at all."""
    try:
        fitted = best_schedule(scenario.cost, source)
    except PlanError as error:
        return _Outlook(name, scenario.cluster, 0, None, (), str(error))
    return _outlook(name, fitted, source, remedy)


def _outlook(
    name: str, fitted: Fitted, source: str | Schedule, remedy: Advice | None, longest: int | None = None
) -> _Outlook:
    """Return the outlook of a cluster: without a remedy if the schedule fits, else with one.

    Clusters are compared under the same changes, so the remedy of today's cluster is applied. If today's cluster needs
    none, the cheapest remedy for this cluster is.

    Args:
        remedy: cheapest advice that makes it fit on today's cluster; None if there is none.
        longest: longest sequence that fits without a remedy; None if it has to be searched for.
    """
    cluster = fitted.cost.cluster
    if fitted.fits:
        longest = longest_sequence(fitted.cost, source) if longest is None else longest
        return _Outlook(name, cluster, longest, fitted)
    tried = advise(fitted, source) if remedy is None else (Advice.of(fitted, source, remedy.changes),)
    best = _first_that_fits(tried)
    if best is None or best.after is None:
        reason = fitted.prediction.reason
        if remedy is not None:
            after = tried[0].after
            remaining_reason = tried[0].why_not if after is None else after.prediction.reason
            reason = f"with {remedy.name}, {remaining_reason}"
        return _Outlook(name, cluster, 0, fitted, (), reason)
    is_planned = any(change.name == PLANNED for change in best.changes)
    longest = longest_sequence(best.after.cost, "plan" if is_planned else source)
    return _Outlook(name, cluster, longest, best.after, best.changes)


def _report(
    fitted: Fitted, breakdowns: Sequence[Stack], longest: int, advice: Sequence[Advice], outlooks: Sequence[_Outlook]
) -> JsonDict:
    """Return plain data for ``--json``."""
    return {
        "fits": fitted.fits,
        "ranks": [breakdown.to_dict() for breakdown in breakdowns],
        "longest_sequence": longest,
        "schedule": fitted.schedule.to_dict(),
        "predicted": fitted.prediction.to_dict(),
        "advice": [change.to_dict() for change in advice],
        "today": outlooks[0].to_dict(),
        "what_if": [outlook.to_dict() for outlook in outlooks[1:]],
    }


def _print_verdict(scenario: Scenario, fitted: Fitted, longest: int, price: Sequence[str]) -> None:
    """Print whether the schedule fits, how fast it is and what it costs."""
    prediction, work = fitted.prediction, scenario.workload
    verdict, colour = ("fits", "good") if fitted.fits else ("does not fit", "bad")
    reason = "" if fitted.fits else f": {prediction.reason}"
    lines = [
        f"{scenario.model.name}, {work.seq_len:,} tokens x {work.micro_batch}, ZeRO stage {work.zero_stage}: {verdict}"
        f"{reason}",
        f"schedule:   {describe(fitted.schedule, scenario.cluster)}",
        f"predicted:  {time_text(prediction.iteration_s)} per iteration, {prediction.tokens_per_s:,.0f} tokens/s"
        f"{'' if fitted.fits else ', if it fitted'}",
        f"longest:    {f'{longest:,} tokens fit' if longest else 'no length fits'}",
        *_host_lines(fitted),
        *price,
        assumed_line(scenario),
    ]
    text = fitted_text("\n".join(lines), terminal_width())
    print(text.replace(verdict, coloured(verdict, colour), 1))


def _host_lines(fitted: Fitted) -> list[str]:
    """Return a line with the offloaded bytes on the machine that has most of them; no line without offloads."""
    host_bytes = fitted.prediction.host_bytes
    nodes = fitted.cost.cluster.nodes
    fullest = max(range(len(nodes)), key=lambda node: host_bytes[node])
    needed_bytes, node = host_bytes[fullest], nodes[fullest]
    if not needed_bytes:
        return []
    has = "" if node.host_memory_bytes is None else f" of {bytes_text(node.host_memory_bytes)}"
    return [f"host:       offloads take {bytes_text(needed_bytes)}{has} GiB of the memory of {node.name}"]


def _print_outlooks(outlooks: Sequence[_Outlook], advice: Sequence[Advice]) -> None:
    """Print whether it fits on other clusters, and the changes that would make it fit on today's."""
    if len(outlooks) > 1:
        outlook_columns = ("what if", "fits", "longest", "per iteration", "tokens/s")
        print_table(outlook_columns, map(_outlook_row, outlooks), "The same on other clusters")
        print_lines(*(f"{outlook.name} does not fit: {outlook.why_not}" for outlook in outlooks if outlook.why_not))
    if advice:
        advice_columns = ("change", "fits", "per iteration", "remark")
        print_table(advice_columns, map(_advice_row, advice), "What would make it fit, cheapest first")
        best = _first_that_fits(advice)
        if best is None:
            print_lines("nothing that this engine can do is enough; use shorter sequences, more cards or larger ones")
        else:
            print_lines(*(f"to do:      {change.how}" for change in best.changes))


def _print_breakdowns(fitted: Fitted, breakdowns: Sequence[Stack]) -> None:
    """Print a table of memory, with a column for each set of equal ranks and a row for each part of the memory."""
    tokens = fitted.schedule.tokens(fitted.cost.workload.seq_len)
    ranks_of_column: dict[tuple[str, ...], list[int]] = {}
    for breakdown in breakdowns:
        column = (breakdown.device, f"{tokens[breakdown.rank]:,}", *_cells(breakdown))
        ranks_of_column.setdefault(column, []).append(breakdown.rank)
    columns = list(ranks_of_column)[:MAX_COLUMNS]
    headings = [rank_ranges(ranks_of_column[column]) for column in columns]
    labels = ("device", "tokens", *(part.replace("_", " ") for part in PARTS), "total", "card", "free")
    rows: list[Sequence[str] | None] = list(zip(labels, *columns, strict=True))
    rows.insert(len(rows) - 3, None)  # a line above the totals
    rows.insert(2, None)  # a line below device and tokens
    num_more = len(ranks_of_column) - MAX_COLUMNS
    print_table(
        ("ranks", *headings),
        rows,
        "Memory of a rank at its peak, GiB",
        caption=f"{num_more} more kinds of ranks: see --json" if num_more > 0 else None,
        numbers=True,
    )


def _cells(breakdown: Stack) -> tuple[str, ...]:
    """Return the cells of a column: every part of a rank's memory, their total, the card's memory, and what is free."""
    parts = (bytes_text(getattr(breakdown, part)) for part in PARTS)
    return (*parts, bytes_text(breakdown.total), bytes_text(breakdown.card), bytes_text(breakdown.free))


def _advice_row(advice: Advice) -> tuple[str, ...]:
    """Return the cells of a change: name, whether the training fits with it, time of a step, and missing memory."""
    if advice.after is None:
        return advice.name, "no", "-", str(advice.why_not)
    remark = "" if advice.fits else f"{bytes_text(advice.missing_bytes)} GiB too much"
    if not advice.fits and advice.missing_bytes <= 0:  # it fits into the cards, but not into a host's memory
        remark = str(advice.after.prediction.reason)
    return advice.name, "yes" if advice.fits else "no", time_text(advice.after.iteration_s), remark


def _outlook_row(outlook: _Outlook) -> tuple[str, ...]:
    """Return the cells of a cluster: whether it fits and with which changes, longest sequence, time and speed."""
    if outlook.why_not is not None or outlook.changed is None:
        return outlook.name, "no", "-", "-", "-"
    fits = "yes" if not outlook.remedy else f"with {' and '.join(change.name for change in outlook.remedy)}"
    speed = (time_text(outlook.changed.iteration_s), f"{outlook.tokens_per_s:,.0f}")
    return outlook.name, fits, f"{outlook.longest:,}", *speed
