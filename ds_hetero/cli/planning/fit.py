"""``ds-hetero fit``: whether a training fits into memory, up to which length, and which changes would make it fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import click

from ds_hetero.cli.options import AS_JSON, TRAINED_TOKENS
from ds_hetero.cli.planning.saves import saves_line, shared_memory
from ds_hetero.cli.printing import print_json, print_table, rank_ranges
from ds_hetero.cli.scenario import Scenario, read_schedule, scenario_options
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import JsonDict
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
    """Result for one cluster: today's, or that of a ``--what-if``."""

    name: str  # ``today``, or the text of the ``--what-if``
    cluster: Cluster
    longest: int  # tokens of the longest sequence that fits
    changed: Fitted | None  # schedule and prediction after the remedy; None if no schedule comes near to fitting
    remedy: tuple[Change, ...] = ()  # changes that make it fit; empty if it fits without, or nothing helps
    why_not: str | None = None  # reason in a sentence, if it does not fit

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
def fit(
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
    # Read first, so that a wrong option is refused before the searches.
    changed_clusters = [read_what_if(text, scenario.cluster) for text in what_if]
    with _progress(["this cluster", "its longest sequence", "what would make it fit", *what_if]) as begin_next:
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
    breakdowns = stacks(fitted.cost, fitted.schedule)
    price = price_of_prediction(fitted.cost, fitted.prediction)
    saves = None if copies is None else shared_memory(fitted.cost, copies)
    if as_json:
        further = {"price": price.to_dict(trained), "assumed": assumptions(scenario), "saves": saves}
        print_json({**_report(fitted, breakdowns, longest, advice, outlooks), **further})
    else:
        _print_breakdowns(fitted, breakdowns)
        _print_verdict(scenario, fitted, longest, price.lines(trained) if fitted.fits else [])
        if saves is not None:
            print(saves_line(fitted.cost, saves))
        _print_outlooks(outlooks, advice)
    if not fitted.fits:
        raise click.exceptions.Exit(1)


def _first_that_fits(advice: Sequence[Advice]) -> Advice | None:
    """The cheapest advice that makes it fit, as advice comes cheapest first; None if none does."""
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
    """Outlook of a changed cluster, which may have no schedule at all."""
    try:
        fitted = best_schedule(scenario.cost, source)
    except PlanError as error:
        return _Outlook(name, scenario.cluster, 0, None, (), str(error))
    return _outlook(name, fitted, source, remedy)


def _outlook(
    name: str, fitted: Fitted, source: str | Schedule, remedy: Advice | None, longest: int | None = None
) -> _Outlook:
    """Outlook of a cluster, after a remedy if the schedule does not fit without one.

    The remedy is that of today's cluster, so that clusters are compared under the same changes; if today's fits without
    one, it is the cheapest for this cluster.

    Args:
        longest: longest sequence that fits without a remedy, if it is known already.
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
    verdict = "fits" if fitted.fits else f"does not fit: {prediction.reason}"
    lines = [
        f"{scenario.model.name}, {work.seq_len} tokens x {work.micro_batch}, ZeRO stage {work.zero_stage}: {verdict}",
        f"schedule:   {describe(fitted.schedule, scenario.cluster)}",
        f"predicted:  {time_text(prediction.iteration_s)} per iteration, {prediction.tokens_per_s:,.0f} tokens/s"
        f"{'' if fitted.fits else ', if it fitted'}",
        f"longest:    {f'{longest:,} tokens fit' if longest else 'no length fits'}",
        *_host_lines(fitted),
        *price,
        assumed_line(scenario),
    ]
    print("\n".join(lines))


def _host_lines(fitted: Fitted) -> list[str]:
    """A line with the offloaded bytes on the machine that has most of them; none without offloads."""
    host_bytes = fitted.prediction.host_bytes
    nodes = fitted.cost.cluster.nodes
    fullest = max(range(len(nodes)), key=lambda node: host_bytes[node])
    needed_bytes, node = host_bytes[fullest], nodes[fullest]
    if not needed_bytes:
        return []
    has = "" if node.host_memory_bytes is None else f" of {bytes_text(node.host_memory_bytes)}"
    return [f"host:       offloads take {bytes_text(needed_bytes)}{has} GiB of the memory of {node.name}"]


def _print_outlooks(outlooks: Sequence[_Outlook], advice: Sequence[Advice]) -> None:
    """Print the results for other clusters, and the changes that would make today's fit."""
    if len(outlooks) > 1:
        outlook_columns = ("what if", "fits", "longest", "per iteration", "tokens/s")
        print_table(outlook_columns, map(_outlook_row, outlooks), "The same on other clusters")
        print("\n".join(f"{outlook.name} does not fit: {outlook.why_not}" for outlook in outlooks if outlook.why_not))
    if advice:
        advice_columns = ("change", "fits", "per iteration", "remark")
        print_table(advice_columns, map(_advice_row, advice), "What would make it fit, cheapest first")
        best = _first_that_fits(advice)
        if best is None:
            print("nothing that this engine can do is enough; use shorter sequences, more cards or larger ones")
        else:
            print("\n".join(f"to do:      {change.how}" for change in best.changes))


def _print_breakdowns(fitted: Fitted, breakdowns: Sequence[Stack]) -> None:
    """Print the memory of the ranks: a column for equal ranks, a row for each part."""
    tokens = fitted.schedule.tokens(fitted.cost.workload.seq_len)
    ranks_of_column: dict[tuple[str, ...], list[int]] = {}
    for breakdown in breakdowns:
        column = (breakdown.device, str(tokens[breakdown.rank]), *_cells(breakdown))
        ranks_of_column.setdefault(column, []).append(breakdown.rank)
    columns = list(ranks_of_column)[:MAX_COLUMNS]
    headings = [rank_ranges(ranks_of_column[column]) for column in columns]
    labels = ("device", "tokens", *(part.replace("_", " ") for part in PARTS), "total", "card", "free")
    rows: list[Sequence[str] | None] = list(zip(labels, *columns, strict=True))
    rows.insert(len(rows) - 3, None)  # a line above the totals
    rows.insert(2, None)  # and one below device and tokens
    num_more = len(ranks_of_column) - MAX_COLUMNS
    print_table(
        ("", *headings),
        rows,
        "Memory of a rank at its peak, GiB",
        caption=f"{num_more} more kinds of ranks: see --json" if num_more > 0 else None,
        numbers=True,
    )


def _cells(breakdown: Stack) -> tuple[str, ...]:
    parts = (bytes_text(getattr(breakdown, part)) for part in PARTS)
    return (*parts, bytes_text(breakdown.total), bytes_text(breakdown.card), bytes_text(breakdown.free))


def _advice_row(advice: Advice) -> tuple[str, ...]:
    if advice.after is None:
        return advice.name, "no", "-", str(advice.why_not)
    lacks = "" if advice.fits else f"{bytes_text(advice.missing_bytes)} GiB too much"
    if not advice.fits and advice.missing_bytes <= 0:  # it fits into the cards, but not into a host's memory
        lacks = str(advice.after.prediction.reason)
    return advice.name, "yes" if advice.fits else "no", time_text(advice.after.iteration_s), lacks


def _outlook_row(outlook: _Outlook) -> tuple[str, ...]:
    if outlook.why_not is not None or outlook.changed is None:
        return outlook.name, "no", "-", "-", "-"
    fits = "yes" if not outlook.remedy else f"with {' and '.join(change.name for change in outlook.remedy)}"
    speed = (time_text(outlook.changed.iteration_s), f"{outlook.tokens_per_s:,.0f}")
    return outlook.name, fits, f"{outlook.longest:,}", *speed
