"""``ds-hetero fit``: does it fit, up to which length, and what would make it fit?"""

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
MAX_COLUMNS = 6  # of ranks, as columns


@dataclass(frozen=True, slots=True)
class _Outlook:
    """Outlook of one cluster: today's, or one of those that are asked for."""

    name: str  # ``today``, or what is asked
    cluster: Cluster  # its devices
    longest: int  # sequence that fits
    changed: Fitted | None  # its schedule and prediction after the remedy; None where nothing is near to fitting
    remedy: tuple[Change, ...] = ()  # changes that make it fit; none where it fits without, or nothing helps
    why_not: str | None = None  # a sentence that says why it does not fit; None where it does

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of a step over its time; None where there is no schedule."""
        if self.changed is None:
            return None
        return self.changed.prediction.tokens_per_s

    def to_dict(self) -> JsonDict:
        """Plain data for JSON."""
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
    others = [read_what_if(text, scenario.cluster) for text in what_if]
    with _progress(["this cluster", "its longest sequence", "what would make it fit", *what_if]) as begin_next:
        begin_next()
        fitted = best_schedule(scenario.cost, source)
        begin_next()
        longest = longest_sequence(scenario.cost, source)
        begin_next()
        advice = () if fitted.fits else advise(fitted, source)
        remedy = next((each for each in advice if each.fits), None)
        outlooks = [_outlook("today", fitted, source, remedy, longest)]
        for text, cluster in zip(what_if, others, strict=True):
            begin_next()
            outlooks.append(_other_outlook(text, replace(scenario, clusters=(cluster,)), source, remedy))
    every = stacks(fitted.cost, fitted.schedule)
    price = price_of_prediction(fitted.cost, fitted.prediction)
    saves = None if copies is None else shared_memory(fitted.cost, copies)
    if as_json:
        further = {"price": price.to_dict(trained), "assumed": assumptions(scenario), "saves": saves}
        print_json({**_report(fitted, every, longest, advice, outlooks), **further})
    else:
        _print_stacks(fitted, every)
        _print_verdict(scenario, fitted, longest, price.lines(trained) if fitted.fits else [])
        if saves is not None:
            print(saves_line(fitted.cost, saves))
        _print_outlooks(outlooks, advice)
    if not fitted.fits:
        raise click.exceptions.Exit(1)


@contextlib.contextmanager
def _progress(steps: Sequence[str]) -> Iterator[Callable[[], None]]:
    """A bar on stderr where somebody watches; the function begins the next step."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    console, names = Console(stderr=True), iter(steps)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(steps), completed=-1)
        yield lambda: bar.update(task, advance=1, description=next(names))


def _other_outlook(name: str, scenario: Scenario, source: str | Schedule, remedy: Advice | None) -> _Outlook:
    try:
        fitted = best_schedule(scenario.cost, source)
    except PlanError as error:
        return _Outlook(name, scenario.cluster, 0, None, (), str(error))
    return _outlook(name, fitted, source, remedy)


def _outlook(
    name: str, fitted: Fitted, source: str | Schedule, remedy: Advice | None, longest: int | None = None
) -> _Outlook:
    """Outlook of a cluster: as it is if that fits, else after today's remedy, or one of its own where there is none.

    Args:
        longest: sequence that fits as it is, where that is known.
    """
    cluster = fitted.cost.cluster
    if fitted.fits:
        longest = longest_sequence(fitted.cost, source) if longest is None else longest
        return _Outlook(name, cluster, longest, fitted)
    tried = advise(fitted, source) if remedy is None else (Advice.of(fitted, source, remedy.changes),)
    best = next((each for each in tried if each.fits), None)
    if best is None or best.after is None:
        reason = fitted.prediction.reason
        if remedy is not None:
            after = tried[0].after
            reason = f"with {remedy.name}, {tried[0].why_not if after is None else after.prediction.reason}"
        return _Outlook(name, cluster, 0, fitted, (), reason)
    is_planned = any(change.name == PLANNED for change in best.changes)
    longest = longest_sequence(best.after.cost, "plan" if is_planned else source)
    return _Outlook(name, cluster, longest, best.after, best.changes)


def _report(
    fitted: Fitted, every: Sequence[Stack], longest: int, advice: Sequence[Advice], outlooks: Sequence[_Outlook]
) -> JsonDict:
    return {
        "fits": fitted.fits,
        "ranks": [stack.to_dict() for stack in every],
        "longest_sequence": longest,
        "schedule": fitted.schedule.to_dict(),
        "predicted": fitted.prediction.to_dict(),
        "advice": [each.to_dict() for each in advice],
        "today": outlooks[0].to_dict(),
        "what_if": [outlook.to_dict() for outlook in outlooks[1:]],
    }


def _print_verdict(scenario: Scenario, fitted: Fitted, longest: int, price: Sequence[str]) -> None:
    """Say whether it fits, how fast it is and what it costs."""
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
    """Bytes that offloads put into the memory of the fullest machine, as a line; none without offloads."""
    need, node = max(
        zip(fitted.prediction.host_bytes, fitted.cost.cluster.nodes, strict=True), key=lambda each: each[0]
    )
    has = "" if node.host_memory_bytes is None else f" of {bytes_text(node.host_memory_bytes)}"
    return [f"host:       offloads take {bytes_text(need)}{has} GiB of the memory of {node.name}"] if need else []


def _print_outlooks(outlooks: Sequence[_Outlook], advice: Sequence[Advice]) -> None:
    """Other clusters, and what would make it fit."""
    if len(outlooks) > 1:
        columns = ("what if", "fits", "longest", "per iteration", "tokens/s")
        print_table(columns, map(_outlook_row, outlooks), "The same on other clusters")
        print("\n".join(f"{each.name} does not fit: {each.why_not}" for each in outlooks if each.why_not))
    if advice:
        heads = ("change", "fits", "per iteration", "remark")
        print_table(heads, map(_advice_row, advice), "What would make it fit, cheapest first")
        best = next((each for each in advice if each.fits), None)
        if best is None:
            print("nothing that this engine can do is enough; use shorter sequences, more cards or larger ones")
        else:
            print("\n".join(f"to do:      {change.how}" for change in best.changes))


def _print_stacks(fitted: Fitted, every: Sequence[Stack]) -> None:
    """A column per kind of rank, a row per part."""
    tokens = fitted.schedule.tokens(fitted.cost.workload.seq_len)
    kinds: dict[tuple[str, ...], list[int]] = {}
    for stack in every:
        kinds.setdefault((stack.device, str(tokens[stack.rank]), *_cells(stack)), []).append(stack.rank)
    labels = ("device", "tokens", *(part.replace("_", " ") for part in PARTS), "total", "card", "free")
    rows: list[Sequence[str] | None] = list(zip(labels, *list(kinds)[:MAX_COLUMNS], strict=True))
    rows[-3:-3] = [None]
    rows[2:2] = [None]
    more = len(kinds) - MAX_COLUMNS
    print_table(
        ("", *map(rank_ranges, list(kinds.values())[:MAX_COLUMNS])),
        rows,
        "Memory of a rank at its peak, GiB",
        caption=f"{more} more kinds of ranks: see --json" if more > 0 else None,
        numbers=True,
    )


def _cells(stack: Stack) -> tuple[str, ...]:
    parts = (bytes_text(getattr(stack, part)) for part in PARTS)
    return (*parts, bytes_text(stack.total), bytes_text(stack.card), bytes_text(stack.free))


def _advice_row(advice: Advice) -> tuple[str, ...]:
    if advice.after is None:
        return advice.name, "no", "-", str(advice.why_not)
    lacks = "" if advice.fits else f"{bytes_text(advice.missing_bytes)} GiB too much"
    if not advice.fits and advice.missing_bytes <= 0:  # the cards hold it, a machine does not
        lacks = str(advice.after.prediction.reason)
    return advice.name, "yes" if advice.fits else "no", time_text(advice.after.iteration_s), lacks


def _outlook_row(outlook: _Outlook) -> tuple[str, ...]:
    if outlook.why_not is not None or outlook.changed is None:
        return outlook.name, "no", "-", "-", "-"
    fits = "yes" if not outlook.remedy else f"with {' and '.join(change.name for change in outlook.remedy)}"
    speed = (time_text(outlook.changed.iteration_s), f"{outlook.tokens_per_s:,.0f}")
    return outlook.name, fits, f"{outlook.longest:,}", *speed
