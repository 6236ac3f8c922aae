"""``ds-hetero fit``: does it fit, up to which length, and what would make it fit?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_hetero.baselines import STRATEGIES
from ds_hetero.cli.plan import ranks_text
from ds_hetero.cli.printing import print_json
from ds_hetero.cli.scenario import Scenario, read_schedule
from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.errors import PlanError
from ds_hetero.planner.explain import describe
from ds_hetero.planner.fit import Advice, Fitted, Stack, advise, best_schedule, longest_sequence, read_what_if, stacks
from ds_hetero.planner.fit.stack import PARTS
from ds_hetero.schedule import Schedule

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["run"]

MAX_KINDS = 6  # of ranks, as columns


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What one cluster comes to: today's, or one of those that are asked for.

    Args:
        name: ``today``, or what is asked.
        fitted: its schedule and prediction; None where nothing is near to fitting.
        longest: sequence that fits.
        why_not: the reason where there is no schedule.
    """

    name: str
    fitted: Fitted | None
    longest: int
    why_not: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        prediction = self.fitted.prediction if self.fitted else None
        return {
            "what_if": self.name,
            "devices": [device.name for device in self.fitted.cost.cluster.devices] if self.fitted else None,
            "fits": prediction is not None and prediction.feasible,
            "longest_sequence": self.longest,
            "iteration_s": prediction.iteration_s if prediction else None,
            "tokens_per_s": prediction.tokens_per_s if prediction else None,
            "reason": prediction.reason if prediction else self.why_not,
        }


def run(scenario: Scenario, named: str, what_ifs: Sequence[str], as_json: bool) -> bool:
    """Examine and print; whether it fits.

    Args:
        scenario: cluster, model and workload, under the calibrated cost model.
        named: schedule file, or the name of the strategy that makes schedules.
        what_ifs: changes of the cluster, see `ds_hetero.planner.fit.what_if`.
        as_json: print JSON.

    Raises:
        ClusterError: a change that is none.
        PlanError: no schedule is near to fitting.
    """
    source = named if named in STRATEGIES else read_schedule(named, scenario.cost)
    others = [read_what_if(text, scenario.cluster) for text in what_ifs]
    fitted = best_schedule(scenario.cost, source)
    today = _Outlook("today", fitted, longest_sequence(scenario.cost, source))
    advice = () if fitted.fits else advise(fitted, source)
    outlooks = [_outlook(other.text, replace(scenario, cluster=other.cluster), source) for other in others]
    every = stacks(fitted.cost, fitted.schedule)
    if as_json:
        print_json(_report(fitted, every, today, advice, outlooks))
    else:
        _print(scenario, fitted, every, [today, *outlooks], advice)
    return fitted.fits


def _outlook(name: str, scenario: Scenario, source: str | Schedule) -> _Outlook:
    try:
        fitted = best_schedule(scenario.cost, source)
    except PlanError as error:
        return _Outlook(name, None, 0, str(error))
    return _Outlook(name, fitted, longest_sequence(scenario.cost, source))


def _report(
    fitted: Fitted, every: Sequence[Stack], today: _Outlook, advice: Sequence[Advice], outlooks: Sequence[_Outlook]
) -> dict[str, Any]:
    return {
        "fits": fitted.fits,
        "ranks": [stack.to_dict() for stack in every],
        "longest_sequence": today.longest,
        "schedule": fitted.schedule.to_dict(),
        "predicted": fitted.prediction.to_dict(),
        "advice": [each.to_dict() for each in advice],
        "today": today.to_dict(),
        "what_if": [outlook.to_dict() for outlook in outlooks],
    }


def _print(
    scenario: Scenario,
    fitted: Fitted,
    every: Sequence[Stack],
    outlooks: Sequence[_Outlook],
    advice: Sequence[Advice],
) -> None:
    from rich.console import Console

    console, prediction, work = Console(), fitted.prediction, scenario.workload
    console.print(_stacks_table(fitted, every))
    verdict = "fits" if fitted.fits else f"does not fit: {prediction.reason}"
    lines = [
        f"{scenario.model.name}, {work.seq_len} tokens x {work.micro_batch}, ZeRO stage {work.zero_stage}: {verdict}",
        f"schedule:   {describe(fitted.schedule, scenario.cluster)}",
        f"predicted:  {time_text(prediction.iteration_s)} per iteration, {prediction.tokens_per_s:,.0f} tokens/s"
        f"{'' if fitted.fits else ', if it fitted'}",
        f"longest:    {_longest_text(outlooks[0].longest)}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if len(outlooks) > 1:
        console.print(_outlook_table(outlooks))
    if advice:
        console.print(_advice_table(advice))
        best = next((each for each in advice if each.fits), None)
        closing = (
            "nothing that this engine can do is enough; use shorter sequences, more cards or larger ones"
            if best is None
            else "\n".join(f"to do:      {change.how}" for change in best.changes)
        )
        console.print(closing, markup=False, highlight=False, soft_wrap=True)


def _longest_text(longest: int) -> str:
    return f"{longest:,} tokens fit" if longest else "no length fits"


def _stacks_table(fitted: Fitted, every: Sequence[Stack]) -> Table:
    """A column per kind of rank, a row per part."""
    from rich.table import Table

    tokens = fitted.schedule.tokens(fitted.cost.workload.seq_len)
    kinds: dict[tuple[str, ...], list[Stack]] = {}
    for stack in every:
        kinds.setdefault((stack.device, str(tokens[stack.rank]), *_cells(stack)), []).append(stack)
    table = Table("", title="Memory of a rank at its peak, GiB")
    for members in list(kinds.values())[:MAX_KINDS]:
        table.add_column(ranks_text([stack.rank for stack in members]), justify="right")
    labels = ("device", "tokens", *(part.replace("_", " ") for part in PARTS), "total", "card", "free")
    for row, label in enumerate(labels):
        table.add_row(
            label, *(kind[row] for kind in list(kinds)[:MAX_KINDS]), end_section=label in ("tokens", PARTS[-1])
        )
    if len(kinds) > MAX_KINDS:
        table.caption = f"{len(kinds) - MAX_KINDS} more kinds of ranks: see --json"
    return table


def _cells(stack: Stack) -> tuple[str, ...]:
    parts = (bytes_text(getattr(stack, part)) for part in PARTS)
    return (*parts, bytes_text(stack.total), bytes_text(stack.card), bytes_text(stack.free))


def _advice_table(advice: Sequence[Advice]) -> Table:
    from rich.table import Table

    table = Table("change", "fits", "per iteration", "remark", title="What would make it fit, cheapest first")
    for each in advice:
        if each.after is None:
            table.add_row(each.name, "no", "-", each.why_not)
            continue
        lacks = "" if each.fits else f"{bytes_text(each.missing_bytes)} GiB too much"
        table.add_row(each.name, "yes" if each.fits else "no", time_text(each.after.iteration_s), lacks)
    return table


def _outlook_table(outlooks: Sequence[_Outlook]) -> Table:
    from rich.table import Table

    table = Table("what if", "fits", "longest", "per iteration", "tokens/s", title="The same on other clusters")
    for outlook in outlooks:
        if outlook.fitted is None:
            table.add_row(outlook.name, "no", "0", "-", "-")
            continue
        prediction = outlook.fitted.prediction
        speed = (time_text(prediction.iteration_s), f"{prediction.tokens_per_s:,.0f}")
        fits, shown = ("yes", speed) if outlook.fitted.fits else ("no", ("-", "-"))
        table.add_row(outlook.name, fits, f"{outlook.longest:,}", *shown)
    return table
