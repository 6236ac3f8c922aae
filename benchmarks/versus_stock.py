"""Compare uniform work in this engine with the engines that support nothing else.

    python -m benchmarks.versus_stock [--quick] [--json]

Stock DeepSpeed Ulysses, torch's ring attention and, with ``--contests ringmaster``, the Ulysses of axolotl-ringmaster
alternate in the same processes with this engine under the same uniform schedule. Measured are one attention layer
(forward and backward) and whole training steps of a small model through DeepSpeed engines: of a Llama, or with
``--family`` of a hybrid; over loopback and over an emulated link of 1 Gbit/s; float32, causal, one kernel thread per
rank. The bytes that a layer sends are counted, too, at torch's communication operators and at the network device.
`benchmarks.measure.contenders` describes the contenders, `benchmarks.measure.statistics` the ratios.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.emulation.network import EmulationError, Network, emulate
from benchmarks.measure import ranks
from benchmarks.measure.comparison import LAYER, STEP, Plan, measure
from benchmarks.measure.contenders import CONTESTS
from benchmarks.measure.models import FAMILIES, shape_of
from benchmarks.measure.results import FOLDER, header, write
from benchmarks.measure.statistics import compare

LINKS = ("loopback", "1gbit")
LINK_BIT_PER_S, LINK_DELAY_S = 1e9, 100e-6
TARGETS = {1024: 1.05, 4096: 1.0, 8192: 1.0}
"""Ratio to reach, by tokens."""

_BUSY_CORES = 0.2  # of others, above which a result is marked


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    begin = time.perf_counter()
    plans = [(link, plan) for link in options.links for plan in _plans(options)]
    result: dict[str, Any] = {
        **header(" ".join(["python -m benchmarks.versus_stock", *(sys.argv[1:] if arguments is None else arguments)])),
        "shape": asdict(shape_of(options.family)),
        "links": [],
        "cases": [],
        "traffic": [],
    }
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total} cases"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=sum(len(plan.cases) for _, plan in plans))
        done = 0
        for link, plan in plans:
            what = f"{plan.contest}, {plan.num_ranks} ranks, {link}"
            progress.update(task, completed=done, description=what)
            _run(link, plan, result, partial(_advance, progress, task, what, done))
            done += len(plan.cases)
    result["seconds"] = round(time.perf_counter() - begin, 1)
    output = options.output or FOLDER / f"versus_stock{'_quick' if options.quick else ''}.json"
    write(result, output)
    if options.json:
        print(json.dumps(result))
    else:
        show(result, Console(width=None if sys.stdout.isatty() else 130))
    console.print(f"written to {output}")


def _advance(progress: Progress, task: TaskID, what: str, before: int, done: float, now: str) -> None:
    """Show the progress of one plan of measurements, in seconds done, with a text on the present case."""
    progress.update(task, completed=before + done, description=f"{what}: {now}")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus_stock", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer pairs, and whole steps at the shortest length only")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 1024 4096 8192; with --quick 1024 4096")
    parser.add_argument("--links", choices=LINKS, nargs="+", default=list(LINKS))
    parser.add_argument("--contests", choices=CONTESTS, nargs="+", default=["ulysses", "ring"])
    parser.add_argument("--scopes", choices=(LAYER, STEP), nargs="+", default=[LAYER, STEP])
    parser.add_argument("--family", choices=FAMILIES, default="llama", help="of the model whose steps are measured")
    parser.add_argument("--output", type=Path, help="the result file; default: in benchmarks/results")
    return parser


def _plans(options: argparse.Namespace) -> list[Plan]:
    """Return one plan of measurements per number of ranks and contest; layers come before steps."""
    lengths = options.tokens or ([1024, 4096] if options.quick else [1024, 4096, 8192])
    cases = [(LAYER, tokens) for tokens in lengths if LAYER in options.scopes]
    cases += [(STEP, tokens) for tokens in (lengths[:1] if options.quick else lengths) if STEP in options.scopes]
    budget_s, min_pairs = (2.0, 3) if options.quick else (10.0, 5)
    return [
        Plan(contest, num_ranks, tuple(cases), budget_s, min_pairs, shape_of(options.family))
        for num_ranks in options.ranks
        for contest in options.contests
    ]


def _run(link: str, plan: Plan, result: dict[str, Any], on_report: Callable[[float, str], None]) -> None:
    """Measure one plan and add the outcome to ``result``."""
    label = {"link": link, "num_ranks": plan.num_ranks}
    try:
        with _network(link, plan.num_ranks) as network:
            nodes = network.nodes
            outcomes = ranks.run(measure, nodes, plan, network.pids, on_report=on_report)
            result["links"].append(label | network.to_dict() | {"text": network.describe(), **network.carried()})
    except EmulationError as error:
        result["links"].append(label | {"text": f"NOT MEASURED: {error}"})
        return
    peer, ours = CONTESTS[plan.contest]
    for (scope, tokens), outcome in zip(plan.cases, outcomes[0]["cases"], strict=True):
        comparison = compare(outcome["seconds"][peer], outcome["seconds"][ours])
        case = {"contest": plan.contest, "peer": peer, "ours": ours, "scope": scope, "tokens": tokens}
        result["cases"].append(case | label | asdict(comparison) | outcome | {"target": TARGETS.get(tokens)})
    for name in (peer, ours):
        by_rank = [outcome["traffic"][name] for outcome in outcomes]
        result["traffic"].append({"contender": name, **label, "by_rank": by_rank})


@contextmanager
def _network(link: str, num_ranks: int) -> Iterator[Network]:
    """Make the network of the ranks: loopback, or the emulated link."""
    if link == "loopback":
        with emulate(nodes=num_ranks, rate_bit_per_s=1.0, methods=["none"]) as network:
            yield network
    else:
        with emulate(nodes=num_ranks, rate_bit_per_s=LINK_BIT_PER_S, delay_s=LINK_DELAY_S) as network:
            yield network


# --- showing ----------------------------------------------------------------------------------------


def show(result: dict[str, Any], console: Console) -> None:
    """Print the tables of a result."""
    machine, shape = result["machine"], result["shape"]
    console.print(
        f"{machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}, DeepSpeed {machine['deepspeed']}, "
        f"transformers {machine['transformers']}; {result['seconds']:.0f} s in all\n"
        f"layer: {shape['num_heads']} heads of {shape['head_dim']}, {shape['num_kv_heads']} KV heads; "
        f"step: {shape['family']}, {shape['num_layers']} layers, hidden size {shape['hidden_size']}, ZeRO 1; "
        f"batch size {shape['batch_size']}, float32, causal, one thread per rank"
    )
    for text in dict.fromkeys(f"{n['link']}, {n['num_ranks']} ranks: {n['text']}" for n in result["links"]):
        console.print(text)
    console.print(_times(result["cases"]))
    console.print(_bytes(result["traffic"]))


def _times(cases: Sequence[dict[str, Any]]) -> Table:
    """Return the table of times."""
    table = Table(title="peer / ours: above 1 ours is faster (in brackets: 95 % interval)", caption=_caption(cases))
    links = list(dict.fromkeys(case["link"] for case in cases))
    for column in ("what", "peer"):
        table.add_column(column)
    for column in ("ranks", "tokens", "target"):
        table.add_column(column, justify="right")
    for link in links:
        table.add_column(f"{link}, ms", justify="right")
        table.add_column("ratio", justify="right")
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for case in cases:
        rows.setdefault((case["scope"], case["peer"], case["num_ranks"], case["tokens"], case["target"]), {})[
            case["link"]
        ] = case
    for (*labels, target), by_link in sorted(rows.items(), key=lambda row: row[0][:-1]):
        cells = [cell for link in links for cell in _cells(by_link.get(link))]
        table.add_row(*map(str, labels), "" if target is None else f"{target:.2f}", *cells)
    return table


def _cells(case: dict[str, Any] | None) -> tuple[str, str]:
    """Return the cells of one case."""
    if case is None:
        return "", ""
    low, high = case["interval"]
    color = "" if case["target"] is None else "[green]" if case["ratio"] >= case["target"] else "[red]"
    busy = "*" if case["foreign_cores"] > _BUSY_CORES else ""
    return (
        f"{case['peer_s'] * 1e3:.0f} / {case['ours_s'] * 1e3:.0f}",
        f"{color}{case['ratio']:.3f}[/] ({low:.2f}-{high:.2f}){busy}" if color else f"{case['ratio']:.3f}{busy}",
    )


def _caption(cases: Sequence[dict[str, Any]]) -> str:
    """Return the caption of the table of times."""
    judged = [case for case in cases if case["target"] is not None]
    met = sum(case["ratio"] >= case["target"] for case in judged)
    busy = sum(case["foreign_cores"] > _BUSY_CORES for case in cases)
    load = f"; * others used more than {_BUSY_CORES} cores meanwhile" if busy else ""
    return f"{met} of {len(judged)} targets met{load}"


def _bytes(traffic: Sequence[dict[str, Any]]) -> Table:
    """Return the table of bytes."""
    table = Table(title="sent by one layer, forward and backward, by the rank that sends most")
    for column in ("contender", "link"):
        table.add_column(column)
    for column in ("ranks", "tokens", "calls", "payload bytes", "bytes at the device"):
        table.add_column(column, justify="right")
    for entry in sorted(traffic, key=lambda e: (e["link"] != "loopback", e["num_ranks"])):
        most = max(entry["by_rank"], key=lambda rank: rank["payload_bytes"])
        device = "" if entry["link"] == "loopback" else f"{most['device_bytes']:,}"
        table.add_row(
            *(entry["contender"], entry["link"], str(entry["num_ranks"]), str(most["tokens"]), str(most["calls"])),
            *(f"{most['payload_bytes']:,}", device),
        )
    return table


if __name__ == "__main__":
    main()
