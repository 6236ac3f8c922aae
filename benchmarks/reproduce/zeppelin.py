"""Rebuild Zeppelin's evaluation: published figures, the simulator's, and our planner in the same simulator.

    python -m benchmarks.reproduce.zeppelin [--batches N] [--json]

    cells      36: four models with their clusters, three data sets, three contexts; speed-up over Transformer Engine's
               context parallelism, with the constants of the paper's traces ("fitted") and at nominal rates
    ablation   routing alone, engine alone, both, and with remapping: 3B on 32 GPUs of cluster A, ArXiv
    rounds     all rounds of one ring: 3B on 16 GPUs, 64K tokens

Nothing is measured. The batches are drawn from the published distributions.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure.results import FOLDER, header, write
from benchmarks.reproduce import zeppelin_paper as paper
from benchmarks.reproduce.zeppelin_plot import draw
from benchmarks.reproduce.zeppelin_setting import Setting
from benchmarks.reproduce.zeppelin_simulator import METHODS, round_s
from ds_hetero.planner.documents.length_distributions import DISTRIBUTIONS

SEED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every expectation holds."""
    options = _parser().parse_args(arguments)
    outcome: dict[str, Any] = header(
        " ".join(["python -m benchmarks.reproduce.zeppelin", *(arguments or sys.argv[1:])])
    )
    outcome["fitted_constants"] = {name: {"value": value, "from": why} for name, (value, why) in paper.FITTED.items()}
    outcome["batches"] = options.batches
    outcome["cells"] = [cell(*which, options.batches) for which in track(cells(), "cells", console=_progress())]
    outcome["summary"] = {rates: summary(outcome["cells"], rates) for rates in ("fitted", "nominal")}
    outcome["ablation"] = [ablation(rates, options.batches) for rates in ("fitted", "nominal")]
    outcome["rounds_ms"] = rounds()
    outcome["failures"] = list(failures(outcome))
    output = options.output or FOLDER / "zeppelin.json"
    write(outcome, output)
    draw(outcome, output.with_suffix(".png"))
    if options.json:
        print(json.dumps(outcome))
    else:
        show(outcome, Console(width=None if sys.stdout.isatty() else 130))
    _progress().print(f"written to {output}")
    return 1 if outcome["failures"] else 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce.zeppelin", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--batches", type=int, default=20, help="batches of every cell")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--output", type=Path, help="the result file; default: in benchmarks/results")
    return parser


def _progress() -> Console:
    return Console(stderr=True)


def cells() -> list[tuple[str, str, str, int, str, int]]:
    """Return rates, model, cluster, tensor parallelism, data set and context of every cell."""
    models = [(rates, *which) for rates in ("fitted", "nominal") for which in paper.CELLS]
    return [(*model, name, context) for model, name, context in product(models, DISTRIBUTIONS, paper.CONTEXTS)]


def setting(rates: str, model: str, machine: str, tensor_parallel: int, gpus: int) -> Setting:
    """Return a setting with fitted constants or with nominal rates."""
    if rates == "fitted":
        return Setting.fitted(model, machine, tensor_parallel, gpus)
    return Setting(model=model, machine=machine, tensor_parallel=tensor_parallel, gpus=gpus)


def gains(where: Setting, name: str, context: int, batches: int) -> dict[str, float]:
    """Return the speed-up of every method over ``te``: mean times of the same batches."""
    generator = random.Random(SEED)
    lengths = [DISTRIBUTIONS[name].batch(context, generator) for _ in range(batches)]
    times = {method: mean(run(batch, where) for batch in lengths) for method, run in METHODS.items()}
    return {method: times["te"] / seconds for method, seconds in times.items()}


def cell(
    rates: str, model: str, machine: str, tensor_parallel: int, name: str, context: int, batches: int
) -> dict[str, Any]:
    """Return one cell of figure 8."""
    where = setting(rates, model, machine, tensor_parallel, context // paper.TOKENS_PER_GPU)
    facts = {"rates": rates, "model": model, "cluster": machine, "data": name, "context": context}
    return {**facts, "gain": gains(where, name, context, batches)}


def summary(cells: Sequence[dict[str, Any]], rates: str) -> dict[str, dict[str, float]]:
    """Return mean and best gain of every method over the cells."""
    of_rates = [cell["gain"] for cell in cells if cell["rates"] == rates]
    return {
        method: {"mean": mean(gain[method] for gain in of_rates), "best": max(gain[method] for gain in of_rates)}
        for method in METHODS
    }


def ablation(rates: str, batches: int, data: str = "arxiv") -> dict[str, Any]:
    """Rebuild section 5.3 on one data set, with a context of 4K tokens per GPU."""
    where = setting(rates, "3b", "A", 1, 32)
    return {"rates": rates, "gain": gains(where, data, 32 * paper.TOKENS_PER_GPU, batches)}


def rounds() -> dict[str, dict[str, Any]]:
    """Rebuild section 5.4.1: a ring of one 64K document over two nodes, and one of a 32K document inside a node."""
    where = Setting.fitted("3b", "A", 1, 16)
    rounds_ms = {}
    for name, (size, forward_ms, backward_ms) in paper.ROUNDS_MS.items():
        tokens = paper.TOKENS_PER_GPU
        wire_s = where.wire_s(tokens, crosses=name == "te", routed=False)
        forward_s, backward_s = round_s(tokens * tokens / 2 * where.pair_s, wire_s)
        rounds_ms[name] = {
            "rounds": size,
            "published": [forward_ms, backward_ms, size * (forward_ms + backward_ms)],
            "simulated": [forward_s * 1e3, backward_s * 1e3, size * (forward_s + backward_s) * 1e3],
        }
    return rounds_ms


def failures(outcome: dict[str, Any]) -> Iterator[str]:
    """Yield the expectations that do not hold."""
    fitted = outcome["summary"]["fitted"]
    if fitted["ours"]["mean"] <= fitted["with remap"]["mean"]:
        yield f"our mean gain {fitted['ours']['mean']:.2f} is not above Zeppelin's {fitted['with remap']['mean']:.2f}"
    if not 0.85 <= fitted["with remap"]["mean"] / paper.GAIN_MEAN <= 1.15:
        yield f"Zeppelin's simulated mean gain {fitted['with remap']['mean']:.2f} is far from {paper.GAIN_MEAN}"


def show(outcome: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    table = Table("speed-up over TE", title="36 cells: mean and best")
    for heading in ("published", "fitted mean", "best", "nominal mean", "best"):
        table.add_column(heading, justify="right")
    for method in METHODS:
        published = f"{paper.GAIN_MEAN:.2f}, best {paper.GAIN_BEST:.2f}" if method == "with remap" else ""
        cells = [
            f"{outcome['summary'][r][method][what]:.2f}" for r in ("fitted", "nominal") for what in ("mean", "best")
        ]
        table.add_row("Zeppelin, with remap" if method == "with remap" else method, published, *cells)
    console.print(table)
    table = Table("3B, 32 GPUs, ArXiv", "published", "fitted", "nominal", title="Ablation: speed-up over TE")
    for method, published_gain in paper.ABLATION.items():
        simulated = (f"{cell['gain'][method]:.2f}" for cell in outcome["ablation"])
        table.add_row(method, f"{published_gain:.2f}", *simulated)
    console.print(table)
    table = Table(
        "3B, 16 GPUs, 64K", "rounds", "published, ms", "fitted, ms", title="One ring: forward + backward, all"
    )
    for name, cell in outcome["rounds_ms"].items():
        texts = ("{:.3g} + {:.3g}, {:.1f}".format(*cell[kind]) for kind in ("published", "simulated"))
        table.add_row(name, str(cell["rounds"]), *texts)
    console.print(table)
    for name, constant in outcome["fitted_constants"].items():
        console.print(f"fitted: {name} = {constant['value']:.3g}, as {constant['from']}", highlight=False)
    for failure in outcome["failures"]:
        console.print(f"NOT MET: {failure}")


if __name__ == "__main__":
    sys.exit(main())
