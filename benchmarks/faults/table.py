"""Print tables of verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.faults.verdict import Verdict

_COLUMNS = ("fault", "phase", "ZeRO", "rank", "loop", "store on", "ended", "s", "named", "raw text", "checkpoint")


def show(verdicts: Sequence[Verdict], seconds: float, console: Console) -> None:
    """Print one row per job, sums, and the problems."""
    table = Table(*_COLUMNS, title="faults in training jobs")
    for verdict in verdicts:
        job = verdict.job
        table.add_row(
            job.fault,
            job.phase,
            f"{job.stage}{' weighted' if job.weighted else ''}",
            f"{job.victim} of {job.ranks}",
            job.loop,
            job.store,
            "no" if verdict.hung else "yes",
            "" if verdict.seconds is None else f"{verdict.seconds:.2f}",
            verdict.named,
            ", ".join(map(str, verdict.raw)),
            verdict.checkpoint,
            style="" if verdict.is_good else "bold red",
        )
    console.print(table)
    console.print(_sums(verdicts, seconds))
    for verdict in verdicts:
        if not verdict.is_good:
            console.print(f"\n{verdict.job.name}: {'; '.join(verdict.problems)}", markup=False)
            for rank, word in enumerate(verdict.last_words):
                console.print(f"  rank {rank}: {word[:600]}", markup=False)


def _sums(verdicts: Sequence[Verdict], seconds: float) -> str:
    """Return the line of sums."""
    took = sorted(verdict.seconds for verdict in verdicts if verdict.seconds is not None)
    restarted = sum(verdict.job.is_restarted for verdict in verdicts)
    resumed = sum(verdict.checkpoint == "resumed" for verdict in verdicts)
    counts = {
        "hangs": sum(bool(verdict.hung) for verdict in verdicts),
        "wrong rank named": sum(verdict.named == "wrong" for verdict in verdicts),
        "nobody named": sum(verdict.named == "nobody" for verdict in verdicts),
        "raw text as last word": sum(bool(verdict.raw) for verdict in verdicts),
        "checkpoints that load": sum(verdict.checkpoint == "loads" for verdict in verdicts),
        "bad checkpoints": sum(verdict.checkpoint == "bad" for verdict in verdicts),
        "restarted jobs that resumed": f"{resumed} of {restarted}",
        "jobs with a problem": sum(not verdict.is_good for verdict in verdicts),
    }
    times = f"median {took[len(took) // 2]:.2f} s, longest {took[-1]:.2f} s to the end" if took else "no times"
    text = ", ".join(f"{name} {number}" for name, number in counts.items())
    return f"{len(verdicts)} jobs in {seconds:.0f} s: {text}; {times}"
