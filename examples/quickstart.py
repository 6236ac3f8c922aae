"""Train a small Llama on four unequal ranks and in one process, and compare: what examples/quickstart.sh runs.

The shell script launches this script twice with DeepSpeed's launcher:

    1 process    plain DeepSpeed, without a "heterogeneity" section: the reference
    4 processes  first with even shares, for their time per step; then with tokens and heads in proportion to the
                 speeds of the ranks, whose losses and gradient norms are compared with the reference

The ranks are processes on this machine, slowed down to speeds of 4:3:2:1, see emulated_speed.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import corpus
import ds_hetero
from ds_hetero import Schedule
from emulated_speed import EmulatedSpeed
from tiny_llama import tiny_llama, without_compiling

CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"
SPEEDS = (4, 3, 2, 1)
FASTEST_CORES = 0.6  # of a core, for the fastest rank: all four then take 1.5 cores
TOLERANCE = 1e-4  # relative; sums of fp32 taken in another order differ by less

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
Step = dict[str, float]
console = Console(quiet=RANK > 0)


def main() -> int:
    args = _arguments()
    without_compiling()
    config = json.loads(args.ds_config.read_text())
    if WORLD_SIZE == 1:
        del config["heterogeneity"]
        args.reference.parent.mkdir(parents=True, exist_ok=True)
        args.reference.write_text(json.dumps(train("1 process", config, args.steps, args)))
        return 0
    even_config = {**config, "heterogeneity": {"schedule": "ring"}}
    even = train("even shares", even_config, min(args.steps, 3), args)
    uneven = train("uneven shares", config, args.steps, args)
    return report(uneven, json.loads(args.reference.read_text()), even)


def train(name: str, config: dict[str, Any], num_steps: int, args: argparse.Namespace) -> list[Step]:
    """Train a new model for some steps; tokens, loss, gradient norm and seconds of each."""
    handle = ds_hetero.register()
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = corpus.long_files(min_tokens=args.min_tokens, max_tokens=args.max_tokens, count=num_steps)
    loader = handle.dataloader(torch.utils.data.DataLoader(data, batch_size=1), batches="same")
    if "heterogeneity" in config:
        speed = EmulatedSpeed(FASTEST_CORES * SPEEDS[RANK] / max(SPEEDS))
        speed.attach(model)
        console.print(_schedule_table(name, handle.schedule, len(data[0]["input_ids"])))

    steps = []
    with _progress() as progress:
        bar = progress.add_task(name, total=num_steps, shows="")
        for sample, batch in zip(data, loader, strict=True):
            start = time.perf_counter()
            loss = handle.loss(engine(**batch), batch)
            engine.backward(loss)
            engine.step()
            step = {
                "tokens": len(sample["input_ids"]),
                "loss": loss.item(),
                "gradient norm": float(engine.get_global_grad_norm()),
                "seconds": time.perf_counter() - start,
            }
            steps.append(step)
            progress.update(bar, advance=1, shows=f"loss {step['loss']:.4f}, {step['seconds']:.1f} s per step")
    if "heterogeneity" in config:
        _warn_if_late(speed.late_s / sum(step["seconds"] for step in steps))
    handle.undo()
    return steps


def _warn_if_late(share: float) -> None:
    latest = torch.tensor(share)
    torch.distributed.all_reduce(latest, torch.distributed.ReduceOp.MAX)
    if latest > 0.05:
        console.print(f"Machine too busy, a rank was late by {latest.item():.0%} of the time: do not trust the times.")


def report(uneven: list[Step], one: list[Step], even: list[Step]) -> int:
    """Print the steps of uneven ranks beside those of one process; 1 if they differ, else 0."""
    table = Table(title="The same steps on 4 uneven ranks and in 1 process", box=box.SIMPLE)
    for heading in ("step", "tokens"):
        table.add_column(heading, justify="right")
    for key in ("loss", "grad norm"):
        for heading in (f"{key}\n4 ranks", f"{key}\n1 process", "rel.\ndiff."):
            table.add_column(heading, justify="right")
    differences = []
    for number, (ours, theirs) in enumerate(zip(uneven, one, strict=True), 1):
        row = [str(number), f"{ours['tokens']:,}"]
        for key in ("loss", "gradient norm"):
            differences.append(abs(ours[key] / theirs[key] - 1))
            row += [f"{ours[key]:.5f}", f"{theirs[key]:.5f}", f"{differences[-1]:.0e}"]
        table.add_row(*row)
    console.print(table)
    timed = slice(1, len(even))  # the same sequences, without the first step, in which everything is cold
    even_s, uneven_s = (median(step["seconds"] for step in steps[timed]) for steps in (even, uneven))
    bound = sum(SPEEDS) / (len(SPEEDS) * min(SPEEDS))  # with even shares all wait for the slowest
    ratio = f"{even_s / uneven_s:.2f} times as fast"
    if even_s / uneven_s > bound:
        ratio = f"[yellow]invalid[/]: more than the {bound:.2f} times that are possible, the machine was too busy"
    console.print(f"Emulated time per step: even shares {even_s:.2f} s, uneven shares {uneven_s:.2f} s, {ratio}.")
    same = max(differences) <= TOLERANCE
    verdict = "[green]PASS[/]: uneven ranks train as one process" if same else "[red]FAIL[/]: uneven ranks differ"
    console.print(f"{verdict}; largest relative difference {max(differences):.0e}, allowed {TOLERANCE:.0e}.")
    return 0 if same else 1


def _schedule_table(name: str, schedule: Schedule, length: int) -> Table:
    table = Table(title=f"{name}: {len(schedule.groups)} groups, {schedule.layout}, {length:,} tokens", box=box.SIMPLE)
    for heading in ("rank", "emulated speed", "group", "tokens", "share", "heads"):
        table.add_column(heading, justify="right")
    tokens = schedule.tokens(length)
    for rank in schedule.ranks:
        group = schedule.ring_groups[schedule.ring_position(rank)]
        first, stop = group.head_range(rank)
        heads = f"{stop - first} of {schedule.num_heads}"
        members = "+".join(map(str, group.ranks))
        table.add_row(str(rank), str(SPEEDS[rank]), members, f"{tokens[rank]:,}", f"{tokens[rank] / length:.1%}", heads)
    return table


def _progress() -> Progress:
    columns = (TextColumn("{task.description:13}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[shows]}"), console=console)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds-config", type=Path, default=CONFIGS / "zero2.json")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--min-tokens", type=int, default=6144)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--reference", type=Path, default=Path("runs/quickstart/reference.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
